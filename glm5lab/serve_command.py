"""`glm5lab serve`: its options."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from glm5lab.options import Context, ContextRanks, GgufFile, Stages, TensorRanks


def serve(
    file: GgufFile,
    vllm_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- VLLM OPTIONS]", help="Passed on to vLLM; they win over the plan's."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; 0.0.0.0 opens it to the network, with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0: any.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_API_KEY",
            metavar="KEY",
            show_envvar=True,
            help="Demanded of requests. Default: a generated one where others reach the address.",
        ),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="No key, whoever reaches the address.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of a machine. Default: all that are visible.", min=1)
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GiB",
            help="Plan as if a GPU (without any: this machine) had so much memory.",
        ),
    ] = None,
    tp: TensorRanks = None,
    pp: Stages = None,
    dcp: ContextRanks = None,
    context: Context = None,
    kv_dtype: Annotated[
        Literal["auto", "bf16", "fp8_ds_mla"], typer.Option(help="Rows of the cache, on GPUs.")
    ] = "auto",
    nodes: Annotated[int, typer.Option(help="Machines that serve together.", min=1)] = 1,
    node_rank: Annotated[
        int, typer.Option(help="Number of this machine; 0 has the endpoint.", min=0)
    ] = 0,
    head: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of machine 0, for all the others.")
    ] = None,
    head_port: Annotated[
        int, typer.Option(help="Where the machines meet.", min=1, max=65535)
    ] = 29501,
    ray: Annotated[
        bool, typer.Option("--ray", help="Workers on a Ray cluster that runs already.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Without any progress for so long it is stuck, and ends. 0: never.",
            min=0,
        ),
    ] = 600.0,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="vLLM's output. Default: a temporary file.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="What fills each parameter, as JSON, a file a rank."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show plan and command, of every machine; no more.")
    ] = False,
    smoke: Annotated[bool, typer.Option(help="Try the server before it is announced.")] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="vLLM's output on stderr, too.")
    ] = False,
) -> None:
    """Layer 5: an OpenAI endpoint over the file; Ctrl-C stops it."""
    from glm5lab.loading.report import ask_for_report
    from glm5lab.serving.nodes import Nodes
    from glm5lab.serving.planning import Wanted
    from glm5lab.serving.serve import ServeOptions
    from glm5lab.serving.serve import serve as run_server

    ask_for_report(report)
    wanted = Wanted(
        gpus, gpu_memory, tp, pp, dcp, context, kv_dtype, nodes, tuple(vllm_options or ())
    )
    options = ServeOptions(
        host=host,
        port=port,
        api_key=api_key,
        no_auth=no_auth,
        nodes=Nodes(nodes, node_rank, head, head_port, ray),
        wanted=wanted,
        stall_s=timeout or None,
        log=log,
        dry_run=dry_run,
        smoke=smoke,
        verbose=verbose,
    )
    if not run_server(file, options):
        raise typer.Exit(130)  # interrupted before it was ready

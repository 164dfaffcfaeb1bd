"""The command line: one command a layer, each calling one function of that layer.

Every body imports what it calls, so that `glm5lab --help` loads neither torch nor vLLM nor pandas.
"""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from glm5lab import __version__, backend_commands, bench_commands, serve_command
from glm5lab.errors import CheckError, Glm5labError, printable
from glm5lab.json_output import json_text, require_writable, write_json
from glm5lab.options import (
    Context,
    ContextRanks,
    GgufFile,
    GgufName,
    JsonOut,
    Stages,
    TensorRanks,
    counts,
    not_empty,
)

# typer's own click, which it does not export: what all mistyped commands end in.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
app = typer.Typer(
    name="glm5lab",
    help="Run GLM-5 from GGUF files in vLLM, and prove every layer of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_commands.app)
app.add_typer(backend_commands.app)


class Referee(StrEnum):
    """Who the engine is compared with."""

    HF = "hf"
    LLAMA_CPP = "llama.cpp"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"glm5lab {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run GLM-5 from GGUF files in vLLM, and prove every layer of it."""


@app.command()
def env(
    capability: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MAJOR.MINOR", help="Which attention backend vLLM takes there, such as 12.0."
        ),
    ] = None,
) -> None:
    """Layer 0: what this machine can run, and how to get what is missing."""
    from glm5lab.env import format_report, report
    from glm5lab.selection_table import present_capabilities, selection
    from glm5lab.views.selection import format_selection

    if capability:
        typer.echo(format_selection(selection(capability)))
        return
    facts = report()
    typer.echo(format_report(facts))
    if present := present_capabilities(facts):
        typer.echo("\n" + format_selection(selection(present)))


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write.")],
    kind: Annotated[
        Literal["full", "share", "mtp"],
        typer.Option(help="Every layer with an indexer, shared indices, or a draft layer."),
    ] = "full",
    types: Annotated[
        Literal["f32", "f16", "q8_0", "q4_k_m", "mix", "q2_k", "iq4_xs"],
        typer.Option(help="Tensor types."),
    ] = "f32",
    shards: Annotated[int, typer.Option(help="Number of files.", min=1)] = 1,
    metadata_first_shard: Annotated[
        bool, typer.Option("--metadata-first-shard", help="First shard without tensors.")
    ] = False,
    hf: Annotated[
        bool, typer.Option("--hf", help="The same weights as a safetensors folder in DIR/hf.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.", min=0)] = 0,
) -> None:
    """Write a tiny GLM-5 GGUF file with random weights; prints its (first) path."""
    from glm5lab.gguf.sample import write_sample

    first = write_sample(
        folder,
        kind=kind,
        types=types,
        shards=shards,
        metadata_first_shard=metadata_first_shard,
        hf=hf,
        seed=seed,
    )
    typer.echo(first)


@app.command()
def inspect(
    file: GgufName,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Layer 1: every tensor, type and byte of the file."""
    from glm5lab.views.inspection import inspect_json
    from glm5lab.views.tables import inspect_text

    typer.echo(json_text(inspect_json(file)) if as_json else inspect_text(file))


@app.command()
def plan(
    file: GgufName,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.", min=1)],
    gpu_memory: Annotated[float, typer.Option(metavar="GiB", help="Memory of one GPU.")],
    tp: TensorRanks = None,
    pp: Stages = None,
    dcp: ContextRanks = None,
    context: Context = None,
    kv_dtype: Annotated[
        Literal["auto", "bf16", "fp8_ds_mla"], typer.Option(help="Rows of the cache.")
    ] = "auto",
    utilization: Annotated[
        float | None,
        typer.Option(help="The part of a GPU's memory that vLLM takes. Default: vLLM's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Layer 1: does the file fit on these GPUs, spread how, with how many tokens."""
    from glm5lab.views.plan import plan_json, plan_text

    show = plan_json if as_json else plan_text
    result, fits = show(
        file,
        gpus,
        gpu_memory,
        tp=tp,
        pp=pp,
        dcp=dcp,
        context=context,
        kv_dtype=kv_dtype,
        utilization=utilization,
    )
    typer.echo(json_text(result) if as_json else result)
    if not fits:
        raise typer.Exit(1)


@app.command("map")
def map_names(
    file: GgufName,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", min=1)] = 1,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="One line a tensor, however long.")
    ] = False,
    device: Annotated[
        Literal["auto", "gpu", "cpu"],
        typer.Option(help="Kernels and bytes as there; auto: as on this machine."),
    ] = "auto",
    expert_parallel: Annotated[
        bool | None,
        typer.Option(help="Whole experts a rank, or slices. Default: as plan proposes."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every tensor as JSON.")] = False,
) -> None:
    """Layer 2: which vLLM parameter each tensor fills, and what is left over."""
    from glm5lab.views.names import map_json, map_text

    gpu = {"auto": None, "gpu": True, "cpu": False}[device]
    if as_json:
        content, complete = map_json(file, tp, pp, gpu, expert_parallel)
        typer.echo(json_text(content))
    else:
        text, complete = map_text(file, tp, pp, tensors, gpu, expert_parallel=expert_parallel)
        typer.echo(text)
    if not complete:
        raise typer.Exit(1)


@app.command()
def prepare(
    file: GgufFile,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Default: the cache folder.")
    ] = None,
) -> None:
    """Layer 2: write config and tokenizer from the file's metadata; prints the folder."""
    from glm5lab.loading.prepare import prepare as write_folder

    typer.echo(write_folder(file, folder))


@app.command("compile")
def compile_kernels(
    arch: Annotated[
        str, typer.Option(metavar="SM,SM,...", help="Architectures to compile for.")
    ] = "sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,sm_121",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Layer 3: every tile of the kernels, compiled without a GPU; exit 1 if one does not fit."""
    from glm5lab.views.kernels import run_compile

    if not run_compile(arch, as_json, typer.echo):
        raise typer.Exit(1)


@app.command()
def check(
    file: GgufFile,
    against: Annotated[
        list[Referee] | None, typer.Option(help="Referee; repeat for more. Default: both.")
    ] = None,
    prompts: Annotated[
        str, typer.Option(metavar="N,N,...", help="Prompt lengths in tokens.")
    ] = "8,16,40,200",
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="OUT", help="What fills each parameter, as JSON."),
    ] = None,
) -> None:
    """Layer 4: the engine's log-probabilities against HF transformers and llama.cpp."""
    lengths = counts(prompts, "token counts such as 8,16,40,200", "a prompt has at least 1 token")
    from glm5lab.check import run_check
    from glm5lab.loading.report import ask_for_report

    ask_for_report(report_file)
    report = run_check(file, against=[r.value for r in against or Referee], prompts=lengths)
    typer.echo(report.format())
    if not report.ok:
        raise CheckError(f"{file}: the engine disagrees with a referee; see the rows above")


app.command()(serve_command.serve)


@app.command()
def doctor(
    logs: Annotated[
        list[str], typer.Argument(metavar="LOG...", help="Logs of one server; - is a pipe.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="The verdict as JSON.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more, as tail -f, until it fails or hangs.")
    ] = False,
) -> None:
    """Layer 5: what failed first in a log of vLLM, where, and what to do; exit 0 if nothing did."""
    from glm5lab.views.doctor import run_doctor

    code = run_doctor(logs, as_json, follow, typer.echo)
    if code:
        raise typer.Exit(code)


@app.command()
def demo(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="Default: a tiny sample.", callback=not_empty),
    ] = None,
) -> None:
    """All layers on one file, ending with a served answer."""
    from glm5lab.demo import run_demo

    run_demo(file)


@app.command()
def fuzz(
    cases: Annotated[int, typer.Option(help="Number of damaged files.", min=1)] = 20_000,
    seed: Annotated[int, typer.Option(help="Another seed, other files.")] = 0,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=0)] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes. Default: one a core.", min=1, max=8)
    ] = None,
    out: JsonOut = None,
    case: Annotated[
        int | None, typer.Option(metavar="N", help="Write the files of one case to ./case-N.")
    ] = None,
) -> None:
    """Layers 1 and 2: damaged headers end in a result or in an error that says why."""
    from glm5lab.fuzz.command import keep_case, run_command

    if case is not None:
        typer.echo(keep_case(seed, case))
        return
    require_writable(out)
    text, report = run_command(cases, seed, seconds, jobs)
    typer.echo(text)
    write_json(out, report)
    if not report["ok"]:
        if not report["cases"]:
            raise CheckError("no case ran")
        raise CheckError("some cases failed; `glm5lab fuzz --case N` writes one's files")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Exit codes: 0 done; 1 a proof failed or an unexpected error; 2 unusable input or a mistyped
    command; 130 interrupted. GLM5LAB_DEBUG=1 shows tracebacks.
    """
    try:
        given = None if arguments is None else list(arguments)
        # Not standalone: typer would take four lines to say that an option is mistyped.
        sys.exit(app(args=given, prog_name="glm5lab", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        sys.exit(130)
    except UsageError as error:
        sys.exit(_report_usage(error))
    except Exception as error:
        if os.environ.get("GLM5LAB_DEBUG") == "1":
            traceback.print_exc()
        sys.exit(_report(error))


def _report_usage(error: Any) -> int:
    """One line on stderr for a mistyped command; help for an empty one. The exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        where = error.ctx.command_path if error.ctx else "glm5lab"
        text = printable(" ".join(error.format_message().split()))
        vllm = type(error).__name__ == "NoSuchOption" and where == "glm5lab serve"
        hint = "vLLM's own options stand behind `--`; " if vllm else ""
        print(f"{where}: {text.removesuffix('.')}; {hint}see `{where} --help`", file=sys.stderr)
    return int(error.exit_code)


def _report(error: Exception) -> int:
    """One line on stderr; the exit code."""
    if isinstance(error, Glm5labError):
        print(f"glm5lab: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        _drop_output()
        print("glm5lab: standard output: no space left; write to another place", file=sys.stderr)
        return 1
    text = printable(f"{type(error).__name__}: {error}".splitlines()[0])
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("glm5lab"):
        fix = "`glm5lab env` says what is missing and how to get it"
    else:
        fix = "GLM5LAB_DEBUG=1 shows the traceback"
    print(f"glm5lab: {text}; {fix}", file=sys.stderr)
    return 1


def _drop_output() -> None:
    """What is still buffered for standard output goes nowhere: else Python fails again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

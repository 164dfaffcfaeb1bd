"""`glm5lab bench`: measurements, each beside the tool that people use otherwise."""

from pathlib import Path
from typing import Annotated

import typer

from glm5lab.errors import CheckError, InputError
from glm5lab.json_output import require_writable, write_json
from glm5lab.options import JsonOut, counts

app = typer.Typer(
    name="bench",
    help="Measure speed beside the tools that people use otherwise.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """Measure speed beside the tools that people use otherwise."""


@app.command()
def reader(
    out: JsonOut = None,
    rounds: Annotated[int, typer.Option(help="Runs of each reader.", min=1)] = 3,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Leave the files of GLM-5's size there.")
    ] = None,
) -> None:
    """Layer 1: the table of a GLM-5-sized set, beside gguf-py's GGUFReader."""
    from glm5lab.gguf.bench import bench_reader, bench_text

    require_writable(out)
    result = bench_reader(rounds, keep)
    typer.echo(bench_text(result))
    write_json(out, result)
    if not result["ok"]:
        raise CheckError("the reader missed a limit; see above")


@app.command()
def kernels(
    out: JsonOut = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="SM", help="Our kernels alone, compiled as for sm_120, say."),
    ] = None,
) -> None:
    """Layer 3: sparse MLA, indexer and top-k beside every peer on this GPU."""
    from glm5lab.kernel_bench.report import run
    from glm5lab.views.kernels import parse_architectures

    if arch:
        wanted = parse_architectures(arch)
        if len(wanted) > 1:
            raise InputError("--arch", f"{arch!r} names several", "give one")
        arch = f"sm{wanted[0]}"
    if not run(out, typer.echo, arch):
        raise CheckError("a kernel of ours did not run or was wrong; see above")


@app.command()
def weights(
    out: JsonOut = None,
) -> None:
    """Layer 4: products with GGUF blocks beside bf16, and loading them, on this GPU."""
    from glm5lab.kernel_bench.report import run_weights

    run_weights(out, typer.echo)


@app.command()
def server(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Of the server, http://HOST:PORT.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Requests under way at once.")
    ] = "1,4,16",
    prompts: Annotated[
        str, typer.Option(metavar="N,N,...", help="Prompt lengths in tokens.")
    ] = "128,1024",
    output: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 64,
    requests: Annotated[
        int | None,
        typer.Option(help="Of each point. Default: four for each at once, at least 8.", min=1),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", metavar="KEY", help="The server's.", show_envvar=True),
    ] = None,
    out: JsonOut = None,
    chart: Annotated[Path | None, typer.Option(metavar="HTML", help="Draw them there.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Two files of --json side by side; measures nothing."),
    ] = None,
) -> None:
    """Layer 5: time to the first token, per token, and throughput, by vLLM's own benchmark."""
    from glm5lab.serving.bench import LOST, Grid, bench_server, comparison, read_result
    from glm5lab.views.server_speed import (
        bench_header,
        bench_line,
        comparison_text,
        speed_figure,
    )

    if (url is None) == (compare is None):
        raise typer.BadParameter("give either the server's URL or --compare A B")
    require_writable(out)
    require_writable(chart)
    if compare is not None:
        results = [read_result(path) for path in compare]
        rows = comparison(*results)
        typer.echo(comparison_text(rows))
        write_json(out, {"before": str(compare[0]), "after": str(compare[1]), "rows": rows})
        if chart is not None:
            speed_figure(*results, names=[path.stem for path in compare]).write_html(chart)
        return
    at_once, lengths = (
        counts(text, "counts such as 1,4,16", "each count is at least 1")
        for text in (concurrency, prompts)
    )
    grid = Grid(str(url), at_once, lengths, output, requests, api_key)
    typer.echo(bench_header())
    result = bench_server(grid, lambda row: typer.echo(bench_line(row)))
    write_json(out, result)
    if chart is not None:
        speed_figure(result).write_html(chart)
    if not result["ok"]:
        raise CheckError(LOST)


@app.command()
def doctor(
    out: JsonOut = None,
    size: Annotated[float, typer.Option(metavar="GB", help="Size of each log.", min=0.001)] = 1.0,
) -> None:
    """Layer 5: the doctor on large logs: seconds and memory."""
    from glm5lab.serving.doctor.bench import bench_doctor, bench_text

    require_writable(out)
    result = bench_doctor(size)
    typer.echo(bench_text(result))
    write_json(out, result)
    if not result["ok"]:
        raise CheckError("the doctor missed a limit; see above")


@app.command("top-k")
def top_k(
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the verdicts there too.")
    ] = None,
) -> None:
    """Layer 3: which top-k kernels are exact on hard cases: ours, and vLLM's own."""
    from glm5lab.kernel_bench.report import run_top_k

    if not run_top_k(out, typer.echo):
        raise CheckError("our top-k was wrong; see above")

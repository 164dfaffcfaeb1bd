"""`glm5lab bench`: measurements, each beside the tool that people use otherwise."""

import re
from pathlib import Path
from typing import Annotated

import typer

from glm5lab.errors import CheckError, InputError
from glm5lab.json_output import require_writable, write_json

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
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures there too.")
    ] = None,
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
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures there too.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="SM", help="Our kernels alone, compiled as for sm120, say."),
    ] = None,
) -> None:
    """Layer 3: sparse MLA, indexer and top-k beside every peer on this GPU."""
    from glm5lab.kernel_bench.report import run

    if arch and not re.fullmatch(r"sm\d{2,3}", arch):
        raise InputError("--arch", f"{arch!r} is no architecture", "give one such as sm120")
    run(out, typer.echo, arch)

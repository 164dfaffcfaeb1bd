"""`glm5lab backends`: layer 4 on a GPU, TRITON_MLA_SPARSE beside vLLM's own backends."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from glm5lab.errors import CheckError
from glm5lab.options import JsonOut

app = typer.Typer(
    name="backends",
    help="Layer 4 on a GPU: TRITON_MLA_SPARSE beside vLLM's own backends, in vLLM's engine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Work = Annotated[
    Path, typer.Option(metavar="DIR", help="Where models, answers and logs of the engines go.")
]
Timeout = Annotated[float, typer.Option(help="Seconds an engine may take.", min=1)]
WORK = Path(tempfile.gettempdir()) / "glm5lab-backends"


@app.callback()
def _group() -> None:
    """Layer 4 on a GPU: TRITON_MLA_SPARSE beside vLLM's own backends, in vLLM's engine."""


@app.command()
def answers(
    only: Annotated[str | None, typer.Option(help="Names of cases, by commas.")] = None,
    at_once: Annotated[int, typer.Option(help="Engines side by side.", min=1)] = 4,
    timeout: Timeout = 300,
    work: Work = WORK,
    out: JsonOut = None,
) -> None:
    """Tokens and log-probabilities of every feature, as far from vLLM's as those are apart."""
    from glm5lab.gpu_check.answers import check_answers

    names = None
    if only is not None:
        names = [name.strip() for name in only.split(",") if name.strip()]
    check_answers(work, names, at_once, timeout, out, typer.echo)


@app.command()
def speed(
    layers: Annotated[int, typer.Option(help="Decoder layers of the model.", min=2)] = 24,
    at_once: Annotated[int, typer.Option(help="Engines that start side by side.", min=1)] = 5,
    timeout: Timeout = 600,
    work: Work = WORK,
    out: JsonOut = None,
) -> None:
    """Time a token at 1, 8 and 64 requests, and to the first token of 2K, 32K and 128K."""
    from glm5lab.gpu_check.speed_cases import measure_speed

    measure_speed(work, layers, at_once, timeout, out, typer.echo)


@app.command()
def soak(
    requests: Annotated[int, typer.Option(help="At least so many.", min=10)] = 1000,
    seconds: Annotated[float, typer.Option(help="At least so long.", min=0)] = 600,
    work: Work = WORK,
    out: JsonOut = None,
) -> None:
    """Serve random requests with random aborts: no error, no wrong token, memory flat."""
    from glm5lab.cuda_device import require_cuda
    from glm5lab.gpu_check.cases import OURS, EngineCase
    from glm5lab.gpu_check.machine import machine
    from glm5lab.gpu_check.model import write_model
    from glm5lab.gpu_check.run import Children, run_case
    from glm5lab.gpu_check.soak import wrong
    from glm5lab.json_output import require_writable, write_json

    require_cuda("backends soak")
    require_writable(out)
    model = write_model(work / "model-full", "full")
    extra = {"soak": {"requests": requests, "seconds": seconds}, "lengths": [17]}
    with Children() as children:
        found = run_case(EngineCase("soak", OURS), model, work, seconds * 2 + 900, extra, children)
    if "error" in found:
        raise CheckError(f"soak: {found['error']}")
    typer.echo(str(found["soak"]))
    write_json(out, machine("glm5lab backends soak") | found["soak"])
    if lines := wrong(found["soak"]):
        raise CheckError("; ".join(lines))

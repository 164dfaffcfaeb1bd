"""What `glm5lab compile` prints."""

import json
import sys
from collections.abc import Callable

from glm5lab.attention.compile import ARCHITECTURES, Resources, as_dict, compile_all
from glm5lab.errors import InputError

NAME_WIDTH = 54  # of the longest configuration's name


def parse_architectures(text: str) -> list[int]:
    """Read "sm_80,sm_120", or "sm80,sm120", as [80, 120]; each counts once.

    Raises:
        InputError: a name that is not among ARCHITECTURES.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {f"sm_{a}": a for a in ARCHITECTURES}
    written = known | {name.replace("_", ""): a for name, a in known.items()}
    wrong = [name for name in names if name not in written]
    if wrong or not names:
        cause = f"{wrong[0] if wrong else text!r} is no architecture that is known"
        raise InputError("--arch", cause, f"give some of {', '.join(known)}, with commas between")
    return list(dict.fromkeys(written[name] for name in names))


def line(r: Resources) -> str:
    """One configuration as a line."""
    if r.error:
        return f"{r.architecture:7} {r.kernel:{NAME_WIDTH}} does not compile: {r.error}"
    mark = "" if r.fits else "  exceeds the device"
    if r.understated:
        mark = f"  exceeds the {r.declared} bytes that its tile states"
    took = "cached" if r.cached else f"{r.seconds:4.1f} s"
    return (
        f"{r.architecture:7} {r.kernel:{NAME_WIDTH}} {r.shared_memory:6} of {r.limit:6} bytes, "
        f"{r.registers:3} registers, {r.spilled:4} of stack, {took}{mark}"
    )


def run_compile(
    architectures: str, as_json: bool, echo: Callable[[str], None], jobs: int | None = None
) -> bool:
    """Compile and print each configuration as it is done; whether all fit.

    Args:
        architectures: comma-separated, such as "sm_90,sm_120".
        as_json: one JSON document at the end in place of lines.
        echo: where lines go.
        jobs: processes; None for one a core.

    Raises:
        InputError: an unknown architecture.
        Glm5labError: Triton is not installed.
    """
    results: list[Resources] = []
    for result in compile_all(parse_architectures(architectures), jobs):
        results.append(result)
        if as_json:
            _progress(len(results))
        else:
            echo(line(result))
    failed = sum(not r.fits for r in results)
    if as_json:
        document = {"kernels": [as_dict(r) for r in results], "failed": failed}
        echo(json.dumps(document, indent=2))
    else:
        echo(f"{len(results)} configurations, {failed} that do not fit their device")
    return failed == 0


def _progress(done: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} compiled", end="", file=sys.stderr, flush=True)

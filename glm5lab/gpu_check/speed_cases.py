"""Speed of TRITON_MLA_SPARSE beside vLLM's own backends in its engine: `glm5lab backends speed`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm5lab.cuda_device import require_cuda
from glm5lab.errors import CheckError
from glm5lab.gpu_check.cases import FLASH_ATTN, FLASHMLA, FP8, OURS, EngineCase
from glm5lab.gpu_check.machine import machine
from glm5lab.gpu_check.model import write_model
from glm5lab.gpu_check.run import run_cases
from glm5lab.json_output import require_writable, write_json

# What repeats stands apart, so that a drift of the host shows. 64 prompts and the longest take too
# long for that; the longest need no warm-up: they are cut into the same chunks as 32,768.
SHORT = {"length": 2048, "warm": 5, "rounds": 9}  # mostly the host's time, which settles
WANTED = {
    "requests": [1, 8, 64, 1, 8],
    "context": 4096,
    "steps": 48,
    "rounds": 3,
    "first": [
        SHORT,
        {"length": 32768, "warm": 1, "rounds": 3},
        SHORT,
        {"length": 131072, "warm": 0, "rounds": 2},
        SHORT,
    ],
}
CACHE = {"kv_cache_memory_bytes": 12 << 30, "max_model_len": 131072 + 64}
CASES = (
    EngineCase("flash_attn", FLASH_ATTN, options=CACHE),
    EngineCase("flashmla", FLASHMLA, options=CACHE),
    EngineCase("ours", OURS, options=CACHE),
    EngineCase("flashmla fp8", FLASHMLA, options=CACHE | FP8),
    EngineCase("ours fp8", OURS, options=CACHE | FP8),
)


def measure_speed(
    work: Path,
    layers: int,
    at_once: int,
    timeout_s: float,
    out: Path | None,
    echo: Callable[[str], None],
) -> None:
    """Measure the engines in turns, print a table, write all figures.

    Args:
        work: folder for the model, answers and logs.
        layers: decoder layers of the model; with few, the host's work hides the GPU's.
        at_once: engines that start side by side; each takes about 24 GB with 24 layers.
        timeout_s: seconds an engine may take to start, and again for its parts together.
        out: JSON file, or None.
        echo: where lines go.

    Raises:
        CheckError: an engine failed.
        InputError: there is no CUDA device, or the file cannot be written.
    """
    require_cuda("backends speed")
    require_writable(out)
    models = {"full": write_model(work / f"model-{layers}", "full", layers)}
    extra = {"speed": WANTED, "lengths": [17]}
    found = run_cases(CASES, models, work, at_once, timeout_s, extra, echo, in_turns=True)
    measured = {name: answer["speed"] for name, answer in found.items() if "speed" in answer}
    for name, speed in measured.items():
        echo(line(name, speed))
    document = {"layers": layers, "heads": 8, "wanted": WANTED, "engines": measured}
    write_json(out, machine("glm5lab backends speed") | document)
    failed = [f"{name}: {answer['error']}" for name, answer in found.items() if "error" in answer]
    if failed:
        raise CheckError("; ".join(failed))


def line(name: str, speed: dict[str, Any]) -> str:
    """One engine's medians."""
    steps = ", ".join(f"{n}: {x['median']:.2f}" for n, x in speed["ms_per_token"].items())
    first = ", ".join(f"{n}: {x['median']:.0f}" for n, x in speed["first_ms"].items())
    return f"{name:14} ms a token at requests {steps}; ms to the first token of {first}"

"""How fast the reader is on a set of GLM-5's size, beside gguf-py's own GGUFReader.

Each reader runs in a fresh Python process that reads the same files, several times in turn. Time is
that of reading alone, and of the whole process, imports included; peak memory is the process's.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glm5lab.env import child_environment, report
from glm5lab.errors import CheckError
from glm5lab.gguf.large_sample import write_large_sample
from glm5lab.gguf.reader import open_gguf

LIMIT_S, LIMIT_MB, LEAST_RATIO = 1.0, 300.0, 5.0

OURS = """
import sys, time
from glm5lab.gguf.reader import open_gguf
import pandas
start = time.perf_counter()
tensors = len(open_gguf(sys.argv[1]).table())
"""
# GGUFReader's tensors are named tuples already: what they hold is its table.
THEIRS = """
import sys, time
from gguf import GGUFReader
start = time.perf_counter()
tensors = sum(len(GGUFReader(path).tensors) for path in sys.argv[1:])
"""
# VmHWM is this process's own peak; ru_maxrss would include its parent's before exec.
FIGURES = """
seconds = time.perf_counter() - start
peak = next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]
import json
print(json.dumps({"tensors": tensors, "seconds": seconds, "mb": int(peak) * 1024 / 1e6}))
"""


def bench_reader(rounds: int = 3, keep: Path | None = None) -> dict[str, Any]:
    """Measure both readers on the large sample.

    Args:
        rounds: how often each reader runs; the medians count.
        keep: write the files there and leave them; default is a temporary folder.

    Returns:
        `set` (files, tensors, bytes, tokens, merges), `ours` and `theirs` (median seconds,
        those of the whole process, peak memory in MB, seconds of each round), `ratio` of the
        seconds, `limits`, `ok`, and what was measured where and when.
    """
    with _folder(keep) as folder:
        write_large_sample(folder)
        model = open_gguf(folder)
        files = [str(path) for path in model.files]
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
        for _ in range(rounds):
            runs["ours"].append(fresh_figures(OURS + FIGURES, files[:1], "a reader's"))
            runs["theirs"].append(fresh_figures(THEIRS + FIGURES, files, "a reader's"))
        counts = {run["tensors"] for side in runs.values() for run in side}
        if counts != {len(model.tensors)}:
            raise CheckError(f"the readers disagree on the number of tensors: {sorted(counts)}")
        sides = {name: _summary(side) for name, side in runs.items()}
        ratio = sides["theirs"]["seconds"] / sides["ours"]["seconds"]
        return {
            "command": "glm5lab bench reader",
            "date": datetime.now(UTC).date().isoformat(),
            **_machine(),
            "set": {
                "files": len(files),
                "tensors": len(model.tensors),
                "bytes": model.nbytes,
                "tokens": len(model.metadata["tokenizer.ggml.tokens"]),
                "merges": len(model.metadata["tokenizer.ggml.merges"]),
            },
            **sides,
            "ratio": round(ratio, 1),
            "limits": {"seconds": LIMIT_S, "mb": LIMIT_MB, "ratio": LEAST_RATIO},
            "ok": sides["ours"]["seconds"] < LIMIT_S
            and sides["ours"]["mb"] < LIMIT_MB
            and ratio >= LEAST_RATIO,
        }


def bench_text(result: dict[str, Any]) -> str:
    """The result of `bench_reader` in a few lines."""
    shape = result["set"]
    lines = [
        f"{shape['tensors']:,} tensors in {shape['files']} files of {shape['bytes'] / 1e9:.0f} GB "
        f"(sparse), {shape['tokens']:,} tokens, {shape['merges']:,} merges",
        f"{'':12}{'seconds':>9}{'with imports':>14}{'peak MB':>9}",
    ]
    for name, side in (("glm5lab", result["ours"]), ("GGUFReader", result["theirs"])):
        lines.append(f"{name:12}{side['seconds']:9.2f}{side['process_s']:14.2f}{side['mb']:9.0f}")
    limits = result["limits"]
    lines.append(
        f"{result['ratio']:.1f} times as fast as GGUFReader; limits: {limits['seconds']:g} s, "
        f"{limits['mb']:.0f} MB, {limits['ratio']:g} times: {'kept' if result['ok'] else 'MISSED'}"
    )
    return "\n".join(lines)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="glm5lab-bench-") as folder:
        yield Path(folder)


def fresh_figures(
    code: str, arguments: list[str], whose: str, timeout_s: float = 600
) -> dict[str, Any]:
    """What code prints as JSON in a fresh process, and `process_s`, the seconds it took.

    Args:
        code: Python.
        arguments: for it.
        whose: process it is, for the error.
        timeout_s: seconds after which subprocess.TimeoutExpired is raised.

    Raises:
        CheckError: it failed.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise CheckError(f"{whose} process failed: {done.stderr.strip()[-400:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures | {"process_s": time.perf_counter() - start}


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    seconds, whole = [r["seconds"] for r in runs], [r["process_s"] for r in runs]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "process_s": round(statistics.median(whole), 3),
        "mb": round(max(r["mb"] for r in runs), 1),
        "rounds": [round(s, 3) for s in seconds],
    }


def _machine() -> dict[str, Any]:
    """Hardware and versions that decide the figures."""
    found = report()
    versions = {name: found["packages"][name] for name in ("gguf", "numpy", "pandas")}
    return {
        "cpu": found["cpu"],
        "versions": {"glm5lab": found["glm5lab"], "python": platform.python_version(), **versions},
    }

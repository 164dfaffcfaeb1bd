"""Lines, JSON and machine of `glm5lab bench kernels`."""

import math
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton

from glm5lab.cuda_device import require_cuda
from glm5lab.errors import CheckError
from glm5lab.json_output import require_writable, write_json
from glm5lab.kernel_bench.gguf_weights import bench_loading, bench_weights
from glm5lab.kernel_bench.kernels import bench_kernels
from glm5lab.kernel_bench.timing import Row
from glm5lab.kernel_bench.top_k_cases import exactness, random_shapes


def machine(command: str) -> dict[str, Any]:
    """Command, date, GPU, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    with suppress(PackageNotFoundError):
        versions["vllm"] = version("vllm")
    return {
        "command": command,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.strip().splitlines()[0],
        "versions": versions,
    }


def line(row: Row) -> str:
    """One measurement as a line."""
    if row.note:
        return f"{row.case:46} {row.name:26} did not run: {row.note}"
    wrong = "" if row.right else f", above our bound of {row.bound:g}"
    floor = "" if math.isnan(row.floor_us) else f", {row.us / row.floor_us:.2f} x the floor"
    return f"{row.case:46} {row.name:26} {row.us:8.1f} us, error {row.error:.4f}{floor}{wrong}"


def written(row: Row) -> dict[str, Any]:
    """What a file says of a measurement: what there is of it; NaN is no JSON."""
    return {k: v for k, v in asdict(row).items() if v == v and v != ""}


def run(out: Path | None, echo: Callable[[str], None], architecture: str | None = None) -> bool:
    """Measure, print each row, and write all of them.

    Args:
        out: JSON file, or None.
        echo: where lines go.
        architecture: see `bench_kernels`.

    Returns:
        Whether our own kernels ran and were right everywhere.

    Raises:
        InputError: there is no CUDA device, or the file cannot be written.
    """
    require_cuda("bench kernels")
    require_writable(out)
    rate, measured = bench_kernels(architecture)
    command = "glm5lab bench kernels" + (f" --arch {architecture}" if architecture else "")
    document = {**machine(command), "copy_tb_s": rate / 1e6}
    echo(f"copy kernel: {rate / 1e6:.2f} TB/s")
    rows, right = [], True
    for row in measured:
        echo(line(row))
        right &= row.right or not row.name.startswith("glm5lab")
        rows.append(written(row))
    write_json(out, {**document, "rows": rows})
    return right


def run_weights(out: Path | None, echo: Callable[[str], None]) -> None:
    """Measure weights that stay GGUF blocks, print each row, write all of them, judge each.

    Args:
        out: JSON file, or None.
        echo: where lines go.

    Raises:
        CheckError: a product did not run, or its error is above its bound.
        InputError: there is no CUDA device, or the file cannot be written.
    """
    require_cuda("bench weights")
    require_writable(out)
    rate, measured = bench_weights()
    echo(f"copy kernel: {rate / 1e6:.2f} TB/s")
    rows, wrong = [], []
    for row in measured:
        echo(line(row))
        rows.append(written(row))
        if not row.right:
            error = f"error {row.error:.4g}, above our bound of {row.bound:g}"
            why = f"did not run: {row.note}" if row.note else error
            wrong.append(f"{row.case}, {row.name}: {why}")
    loading = bench_loading()
    echo(
        "GB/s from the page cache: loading {load:.2f}, plain reading {read:.2f} by one thread, "
        "{together:.2f} by several".format(
            load=loading["load_bytes_s"] / 1e9,
            read=loading["read_bytes_s"] / 1e9,
            together=loading["read_together_bytes_s"] / 1e9,
        )
    )
    document = {**machine("glm5lab bench weights"), "copy_tb_s": rate / 1e6}
    write_json(out, {**document, "rows": rows, "loading": loading})
    if wrong:
        raise CheckError("; ".join(wrong))


def run_top_k(out: Path | None, echo: Callable[[str], None]) -> bool:
    """Try the top-k kernels on hard cases, print what is wrong and how many are exact; write all.

    Args:
        out: JSON file, or None.
        echo: where lines go.

    Returns:
        Whether our own kernel was exact everywhere.

    Raises:
        InputError: there is no CUDA device, or the file cannot be written.
    """
    require_cuda("bench top-k")
    require_writable(out)
    cases: dict[str, list[dict[str, Any]]] = {}
    for case in exactness(random_shapes(220, 20)):
        cases.setdefault(case["kernel"], []).append(case)
        if case["verdict"]:
            echo("{kernel}, {kind}, {rows} x {width}, k {k}: {verdict}".format(**case))
    for kernel, tried in cases.items():
        echo(f"{kernel}: {sum(not c['verdict'] for c in tried)} of {len(tried)} exact")
    write_json(out, {**machine("glm5lab bench top-k"), "cases": cases})
    return not any(c["verdict"] for c in cases["glm5lab"])

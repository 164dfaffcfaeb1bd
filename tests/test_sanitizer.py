"""Layer 3 under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory.

That no kernel is left out is checked without a GPU: launches are recorded in place of made.
"""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import racecheck
import sanitized
from specialized import forms_on

from glm5lab.attention import compile as aot

TOOL = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
needs_tool = pytest.mark.skipif(
    TOOL is None, reason="compute-sanitizer, of the CUDA toolkit, is not installed"
)


def report_of(check: str) -> str:
    """The report of every kernel under a check of the tool."""
    assert TOOL is not None
    # Without torch's caching every tensor ends where its own allocation does. Triton 3.8 asks the
    # driver for what it refuses, and goes on: no error of a kernel.
    child = subprocess.run(
        [TOOL, "--tool", check, "--report-api-errors", "no", sys.executable, "sanitized.py"],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert "every kernel ran" in child.stdout
    return child.stdout


@pytest.mark.gpu
@needs_tool
def test_no_access_out_of_bounds():
    report = report_of("memcheck")
    assert "ERROR SUMMARY: 0 errors" in report, report[-4000:]


@pytest.mark.gpu
@needs_tool
def test_no_race_within_a_partition():
    report = report_of("racecheck")
    assert "RACECHECK SUMMARY" in report
    assert racecheck.hazards(report) == [], report[-4000:]


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_every_kernel_runs_with_every_switch(capability):
    """Whatever `glm5lab compile` lists, and constants that are True there, False, or capacities."""
    with forms_on(capability) as forms:
        sanitized.everything("cpu")
    device = aot.device_for(capability)
    for module in aot.MODULES:
        for listed in aot._compilations(module, device):
            kernel = getattr(import_module(module), listed.kernel)
            launched = forms.get(kernel.fn.__name__, set())
            assert launched, listed.kernel
            for at, name in enumerate(parameter.name for parameter in kernel.params):
                value = listed.constants.get(name)
                if isinstance(value, bool) or name in ("BLOCK_P", "D_ROPE", "HOW"):
                    given = str(("constexpr", value))
                    assert given in {form[at] for form in launched}, (listed.name, name, value)


def line_of(file: str, text: str) -> int:
    lines = (racecheck.SOURCES / file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def hazard(kernel: str, one: tuple[str, int], other: tuple[str, int]) -> str:
    return (
        f"========= Error: Race reported between Read access at {kernel}+0x3e10 in "
        f"{one[0]}:{one[1]}\n"
        f"=========     and Write access at {kernel}+0x8b60 in {other[0]}:{other[1]} [48 hazards]\n"
    )


def test_which_hazards_count():
    attend, gather = "sparse_mla_hopper_fp8.py", "hopper_fp8_rows.py"
    read = attend, line_of(attend, ".load(line)")
    write = gather, line_of(gather, ".store(b_s0)")
    handed = attend, line_of(attend, "def _attend_hopper_fp8_kernel(")
    queries = gather, line_of(gather, "s_q.store(")
    slots = "sparse_mla_hopper.py", line_of("sparse_mla_hopper.py", "b_slot = gl.load(")
    kernel = "_attend_hopper_fp8_kernel"
    assert len(racecheck.partitions(kernel)[1]) == 3
    assert racecheck.hazards(hazard(kernel, read, write)) == []
    assert racecheck.hazards(hazard(kernel, (f"/a/b/{read[0]}", read[1]), write)) == []
    assert racecheck.hazards(hazard(kernel, handed, handed)) == []
    # Within a partition, where both may run, where a line is nobody's, in kernels without any.
    nobody = "standard.py", 5
    for one, other in ((read, read), (write, write), (read, queries), (slots, write)):
        assert len(racecheck.hazards(hazard(kernel, one, other))) == 1
    assert len(racecheck.hazards(hazard(kernel, read, nobody))) == 1
    assert len(racecheck.hazards(hazard("_attend_kernel", read, write))) == 1
    assert racecheck.partitions("_attend_kernel")[1] == ()


def test_what_is_not_understood_counts():
    unknown = "========= Error: Race reported between Read access at k+0x10\n"
    behind = "=========     and Write access at k+0x20 [4 hazards]\n"
    assert len(racecheck.hazards(unknown + behind)) == 2

"""Layer 3 under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")


@pytest.mark.gpu
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer, of the CUDA toolkit, is not installed")
@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_every_kernel_is_clean(check):
    assert TOOL is not None
    # Without torch's caching every tensor ends where its own allocation does.
    # Triton 3.8 asks the driver for what it refuses, and goes on: no error of a kernel.
    command = [TOOL, "--tool", check, "--report-api-errors", "no", "--error-exitcode", "9"]
    child = subprocess.run(
        [*command, sys.executable, "sanitized.py"],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert "every kernel ran" in child.stdout
    assert ("0 errors" in child.stdout) or ("0 hazards" in child.stdout), child.stdout[-500:]

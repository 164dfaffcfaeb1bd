"""What commands for a GPU say where there is none."""

import subprocess
import sys

import pytest
import torch

from glm5lab.cuda_device import require_cuda
from glm5lab.errors import InputError

COMMANDS = (
    "backends answers",
    "backends speed",
    "backends soak",
    "bench kernels",
    "bench weights",
    "bench top-k",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_cuda_device_a_command_says_so_and_writes_nothing(command, tmp_path):
    options = ["--json", str(tmp_path / "out.json")]
    if command.startswith("backends"):
        options += ["--work", str(tmp_path / "work")]
    program = (
        "import sys, torch; torch.cuda.is_available = lambda: False; "
        "from glm5lab.__main__ import main; main()"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, *command.split(), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr == (
        f"glm5lab: {command}: there is no CUDA device, as torch {torch.__version__} sees "
        "it; run it on a machine with an NVIDIA GPU and a CUDA build of torch\n"
    )
    assert not list(tmp_path.iterdir())


def test_with_a_cuda_device_nothing_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_cuda("bench kernels")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError):
        require_cuda("bench kernels")

"""The comparison of layer 3 with the compiled kernel, from a process that runs the interpreter."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from glm5lab.env import child_environment
from glm5lab.errors import CheckError


def compiled_kernel() -> str:
    """The compiled Triton kernel against the reference on this machine's GPU, in one line.

    Raises:
        CheckError: they differ, or the child that compares them ended without a word.
    """
    import torch

    if not torch.cuda.is_available():
        return "no GPU here, so no compiled kernel to try"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "kernel.json"
        line = [sys.executable, "-m", "glm5lab.demo_children", "kernel", str(result)]
        # TRITON_INTERPRET is read when triton is imported: a process of its own goes without it.
        environment = child_environment()
        environment.pop("TRITON_INTERPRET", None)
        child = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        if not result.exists():
            raise CheckError((child.stderr.strip().splitlines() or ["no message"])[-1])
        found = json.loads(result.read_text())
    if "error" in found:
        raise CheckError(found["error"])
    return (
        f"compiled, {found['where']}: at most {found['largest']:.1e} from the reference over "
        f"{found['tokens']} tokens, {found['heads']} heads, top-k {found['top_k']}"
    )

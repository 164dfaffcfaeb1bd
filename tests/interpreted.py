"""Python code in a process of its own, with Triton's CPU interpreter in place of its compiler."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(code: str) -> None:
    """Run code that imports test modules; it fails the test where the code raises.

    TRITON_INTERPRET is read when triton is imported, so that a process that runs both needs two.
    """
    child = subprocess.run(
        [sys.executable, "-c", f"{code}; print('equal')"],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.strip() == "equal"

"""What a Python child of a test says."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def printed(
    mark: str, arguments: Sequence[object], env: Mapping[str, str], timeout: float = 300
) -> tuple[Any, str]:
    """The JSON that a Python child prints behind a mark, and all that it says.

    Args:
        mark: the line's first word.
        arguments: of Python.
        env: further variables of its environment.
        timeout: seconds that the child may take.
    """
    child = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    said = child.stdout + child.stderr
    lines = [line for line in child.stdout.splitlines() if line.startswith(f"{mark} ")]
    assert lines, said[-4000:]
    return json.loads(lines[0].removeprefix(f"{mark} ")), said

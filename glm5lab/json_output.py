"""Files of figures that a command writes at its end, `--json OUT`."""

import json
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError


def require_writable(path: Path | None) -> None:
    """InputError when the file could not be written: asked before the work, not after hours of it.

    A file that is not there yet is not left behind.
    """
    if path is None:
        return
    try:
        new = not path.exists()
        path.open("a", encoding="utf-8").close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise _failure(path, error) from error


def write_json(path: Path | None, content: Any) -> None:
    """Write plain values, indented; None writes nothing. InputError when it fails."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _failure(path, error) from error


def _failure(path: Path, error: OSError | ValueError) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(path, f"cannot be written: {why}", "name a file in a folder that is there")

"""Files of figures that a command writes at its end, `--json OUT`."""

import json
import re
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError, printable

SURROGATE = re.compile("[\ud800-\udfff]")


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


def json_text(content: Any) -> str:
    """Plain values as JSON that is valid Unicode.

    A path may hold bytes that are no UTF-8, which Python keeps as halves of surrogate pairs: they
    are written out, as messages have them.
    """
    return json.dumps(_valid(content), indent=2)


def _valid(content: Any) -> Any:
    if isinstance(content, str):
        return SURROGATE.sub(lambda half: printable(half[0]), content)
    if isinstance(content, dict):
        return {_valid(key): _valid(value) for key, value in content.items()}
    return [_valid(item) for item in content] if isinstance(content, list | tuple) else content


def write_json(path: Path | None, content: Any) -> None:
    """Write plain values, indented; None writes nothing. InputError when it fails."""
    if path is None:
        return
    try:
        path.write_text(json_text(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise _failure(path, error) from error


def _failure(path: Path, error: OSError | ValueError) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(path, f"cannot be written: {why}", "name a file in a folder that is there")

"""The figures of data/measurements: each file says on which GPU, when and by which command."""

import json
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError

FOLDER = Path(__file__).resolve().parents[2] / "data" / "measurements"


def measurements(name: str) -> dict[str, Any]:
    """One file by its name without .json.

    Raises:
        InputError: there is none of that name; an installed package has no data/ at all.
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json"))) or "nothing"
        raise InputError(path, f"no such file, there is {there}", "run from a checkout")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def origin(measured: dict[str, Any]) -> str:
    """Where, when and with what a file was measured, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    device = measured.get("gpu", "no GPU")
    driver = f", driver {measured['driver']}" if "driver" in measured else ""
    return f"{device}{driver}, {versions}, {measured['date']}"

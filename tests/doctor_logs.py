"""Logs for the doctor's tests."""

import json
from pathlib import Path
from typing import Any

from glm5lab.serving.doctor import Diagnosis
from glm5lab.serving.doctor.diagnosis import diagnose
from glm5lab.serving.doctor.reader import LineSplitter
from glm5lab.serving.doctor.scan import Scanner

FOLDER = Path(__file__).parent / "data" / "doctor"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
FAILED = [case for case in CASES if case["verdict"] != "healthy"]


def log(case: dict[str, Any]) -> bytes:
    """A case's log."""
    return (FOLDER / case["file"]).read_bytes()


def diagnosed(content: bytes | str, block: int = 1 << 20) -> Diagnosis:
    """The verdict on a log, read in blocks of so many bytes."""
    if isinstance(content, str):
        content = content.encode()
    splitter, scanner = LineSplitter(), Scanner("a.log")
    for start in range(0, len(content), block):
        scanner.read([splitter.feed(content[start : start + block])])
    scanner.read([splitter.end()])
    return diagnose([scanner.scan])

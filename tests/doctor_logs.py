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


TAG = "ERROR 11-29 20:13:26 [multiproc_executor.py:1057]"


def crash(messages: list[str], stage: str = "", first_error: str = "") -> str:
    """The log of a start of four workers, of which the fourth says `messages` and ends.

    The others fail after it in ways that name no cause; `first_error` comes before them all.
    """
    worker = [f"(Worker_TP3 pid=1004) {TAG} {text}" for text in messages]
    before, after = ((FOLDER / f"crash-{name}.txt").read_text() for name in ("before", "after"))
    return before + stage + first_error + "\n".join(worker) + "\n" + after

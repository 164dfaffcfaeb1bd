"""Find everything that a test has started: all of it inherits a marked environment."""

import os
import time
import uuid
from pathlib import Path

NAME = "GLM5LAB_TEST_MARK"


def mark() -> dict[str, str]:
    """An environment variable that only this test's processes have."""
    return {NAME: uuid.uuid4().hex}


def marked(mark: dict[str, str]) -> list[str]:
    """`pid command` of the living processes with that mark, this one left out."""
    wanted = f"{NAME}={mark[NAME]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            variables = (folder / "environ").read_bytes().split(b"\0")
            if state in "ZX" or wanted not in variables or int(folder.name) == os.getpid():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            found.append(f"{folder.name} {command[:80]}")
        except OSError:
            continue
    return found


def wait_for(condition, timeout_s: float, every_s: float = 0.1):
    """The condition's first true value, or its last one when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return value

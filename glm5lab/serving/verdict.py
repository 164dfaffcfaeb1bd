"""Why a server ended or does not go on, in one sentence."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm5lab.errors import InputError
from glm5lab.serving.doctor import examine
from glm5lab.serving.leash import states
from glm5lab.serving.process import LONGEST, first_error

# Letters of proc(5) for a process that a signal or a debugger has stopped.
STOPPED = "tT"


def ended(code: int) -> str:
    """An exit code in words: a process that a signal has killed says nothing itself."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with code {code}"
    hint = " (the system does that when memory runs out)" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def verdict(log: Path, lines: Sequence[str]) -> str:
    """The cause that a log names: the doctor's words, else the first error.

    Args:
        log: the whole output, if it could be written.
        lines: its end.
    """
    return doctor(log) or first_error(lines)


def doctor(log: Path) -> str:
    """Layer, cause, evidence and fix by the doctor; "" where it knows none."""
    try:
        found = examine([str(log)]) if log.is_file() else None
    except InputError:
        found = None
    if found is None or found.layer is None or not found.cause:
        return ""
    said = found.evidence["text"] if found.evidence else ""
    parts = (f"{found.layer}: {found.cause}", said[:LONGEST], found.fix)
    return "; ".join(part.rstrip(".") for part in parts if part)


def halted(group: int, names: Mapping[int, str], last: str) -> str:
    """What is known about a process group that does not go on.

    Args:
        group: its id.
        names: what the log calls its processes, by id.
        last: the last line of the log.
    """
    stopped = [pid for pid, state in states(group).items() if state in STOPPED]
    words = [
        f"process {pid} ({names.get(pid, 'without a name')}) is stopped by a signal"
        for pid in stopped
    ]
    return "; ".join([*words, f"its last words: {last or 'none'}"])

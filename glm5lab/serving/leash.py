"""Run a command that cannot outlive its owner: `python -m glm5lab.serving.leash DIR COMMAND...`.

The owner starts this in a new session and holds the other end of its stdin. When the owner ends,
in whatever way, that pipe closes and the command is ended with everything it has started. SIGINT
and SIGTERM go to the command alone: an engine stops its own workers in order, and a worker that
is interrupted first makes it report a failure instead. Exits as the command does.

DIR holds the command's temporary files and is removed at the end.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Seconds for a command whose owner is gone, and for workers whose command is gone.
OWNER_GONE_S = 10.0
COMMAND_GONE_S = 3.0
# And for a resource tracker after the last process that it works for.
TRACKER_S = 5.0


def states(group: int) -> dict[int, str]:
    """State letters (see proc(5)) of the living processes of a group, by id; Linux."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group ...; a name may hold spaces and brackets
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found[int(stat.parent.name)] = state
    return found


def members(group: int) -> list[int]:
    """Ids of the living processes of a process group; zombies do not count."""
    return list(states(group))


def end_group(group: int, patience_s: float) -> None:
    """End the processes of a group but this one: SIGTERM, and SIGKILL after `patience_s`.

    Python's resource tracker is among them: it takes no SIGTERM, removes the shared memory of
    the dead once the last of them has gone, and then ends by itself. It gets time for that.
    """
    deadline = time.monotonic() + patience_s
    signum = signal.SIGTERM
    while others := [pid for pid in members(group) if pid != os.getpid()]:
        if signum == signal.SIGKILL and time.monotonic() < deadline + TRACKER_S:
            others = [pid for pid in others if not _is_tracker(pid)]
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        late = time.monotonic() > deadline
        signum = signal.SIGKILL if late else signal.SIGTERM
        time.sleep(0.1)


def _is_tracker(pid: int) -> bool:
    """Whether a process is one of Python's resource trackers."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def remove_scratch(scratch: Path) -> None:
    """Remove a command's temporary files, and the shared memory that is called after one of them.

    vLLM's CPU workers share blocks named after the file by which they meet, and a killed one
    leaves them.
    """
    for meeting in scratch.glob("vllm_dist_*"):
        for block in Path("/dev/shm").glob(f"{meeting.name}*"):
            block.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def main(scratch: str, command: Sequence[str]) -> int:
    """Run the command; its exit code, 128 + N where signal N ended it."""
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(signum: int, _frame: Any) -> None:
        if started:
            started[0].send_signal(signum)
        else:
            early.append(signum)

    # Before the command starts: no signal is lost, and one that is ignored here (a shell ignores
    # SIGINT for its background jobs) is not ignored by the command.
    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    started.append(child)
    for signum in early:
        child.send_signal(signum)

    def hold() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(OWNER_GONE_S)
        child.kill()

    threading.Thread(target=hold, daemon=True).start()
    code = child.wait()
    end_group(os.getpgrp(), COMMAND_GONE_S)
    remove_scratch(Path(scratch))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

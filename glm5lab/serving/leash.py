"""Run a command that cannot outlive its owner: `python -m glm5lab.serving.leash COMMAND...`.

The owner starts this in a new session and holds the other end of its stdin. When the owner ends,
in whatever way, that pipe closes and the command is ended with everything it has started. SIGINT
and SIGTERM go to the command alone: an engine stops its own workers in order, and a worker that
is interrupted first makes it report a failure instead. Exits as the command does.
"""

import contextlib
import os
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


def members(group: int) -> list[int]:
    """Ids of the living processes of a process group (Linux); zombies do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group ...; a name may hold spaces and brackets
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def end_group(patience_s: float) -> None:
    """End all other processes of this process's group: SIGTERM, and SIGKILL after `patience_s`."""
    deadline = time.monotonic() + patience_s
    signum = signal.SIGTERM
    while others := [pid for pid in members(os.getpgrp()) if pid != os.getpid()]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        late = time.monotonic() > deadline
        signum = signal.SIGKILL if late else signal.SIGTERM
        time.sleep(0.1)


def main(command: Sequence[str]) -> int:
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
    end_group(COMMAND_GONE_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

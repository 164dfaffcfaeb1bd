"""A server that a test does something to, and what must hold afterwards."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from processes import mark, marked, wait_for

from glm5lab.serving.client import Client, ClientError
from glm5lab.serving.command import LOCAL, settings, usable_port

READY_S = 300.0  # a hang guard
END_S = 30.0  # what a server may take to end, once its timeout has passed
MAPPED = re.compile(r"/dev/shm/\S+")
LONG = {"max_tokens": 3000, "temperature": 0, "ignore_eos": True}


class Victim:
    """`glm5lab serve` in a session of its own, with a folder for all its temporary files.

    Args:
        file: what it serves.
        timeout_s: its --timeout.
        log: its --log; None for one in its folder.
        options: further words of the command.
    """

    def __init__(
        self, file: Path, timeout_s: float = 60.0, log: Path | None = None, options: tuple = ()
    ) -> None:
        self.marker = mark()
        self.folder = Path(tempfile.mkdtemp(prefix="gf-"))
        self.temporary = self.folder / "t"
        self.temporary.mkdir()
        self.log, self.said = log or self.folder / "log", self.folder / "said"
        self.port = usable_port(LOCAL, 0)
        words = ["--port", str(self.port), "--log", str(self.log), "--timeout", str(timeout_s)]
        environment = {**os.environ, **settings({}), **self.marker}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "glm5lab", "serve", str(file), *words, *options],
            env={**environment, "TMPDIR": str(self.temporary)},
            stdout=self.said.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.client = Client(f"http://{LOCAL}:{self.port}", timeout_s=END_S + timeout_s)
        self.shared: set[str] = set()

    def wait_ready(self) -> None:
        """Wait until it says that it is ready."""
        done = wait_for(lambda: "ready after" in self.text() or self.process.poll(), READY_S)
        assert done is True, self.text()

    def text(self) -> str:
        """What it has said."""
        return self.said.read_text()

    def tree(self) -> dict[str, int]:
        """Ids of its processes by role, as far as they are there."""
        found = {"glm5lab": self.process.pid}
        parents: dict[str, int] = {}
        for line in marked(self.marker):
            pid, _, command = line.partition(" ")  # none yet, of a process that has just begun
            number = int(pid)
            if "serving.leash" in command:
                found["leash"] = number
            elif "spawn_main" in command or "multiprocessing.spawn" in command:
                parents[str(number)] = _parent(number)
        if "leash" in found:
            children = [p for p in _children(found["leash"]) if p]
            found |= {"api": children[0]} if children else {}
        for spawned, parent in parents.items():
            if parent == found.get("api"):
                found["engine"] = int(spawned)
        workers = sorted(int(n) for n, p in parents.items() if p == found.get("engine"))
        return found | {f"worker{rank}": pid for rank, pid in enumerate(workers)}

    def victim(self, role: str) -> int:
        """The process of a role, as soon as it is there."""
        pid = wait_for(lambda: self.tree().get(role) or self.process.poll() is not None, READY_S)
        assert isinstance(pid, int), self.text()
        return pid

    def hit(self, role: str, signum: signal.Signals) -> int:
        """Send a signal to a role's process; its id. Notes which shared memory is in use."""
        pid = self.victim(role)
        self.shared |= self.mapped()
        os.kill(pid, signum)
        return pid

    def mapped(self) -> set[str]:
        """Files of /dev/shm that its processes have mapped."""
        found = set()
        for line in marked(self.marker):
            with contextlib.suppress(OSError):
                found |= set(MAPPED.findall(Path(f"/proc/{line.split()[0]}/maps").read_text()))
        return found

    def works(self) -> bool:
        """Whether it answers."""
        return bool(self.client.completion([5, 6, 7], max_tokens=2, ignore_eos=True))

    def end(self, seconds: float) -> int:
        """Wait for its end; the exit code. Fails where it hangs."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs: {self.text()}; {self.tree()}") from None

    def interrupt(self) -> int:
        """Ctrl-C, and the exit code."""
        self.shared |= self.mapped()
        self.process.send_signal(signal.SIGINT)
        return self.end(END_S)

    def leftovers(self) -> list[str]:
        """Processes, port, shared memory and temporary files that it has left; none is right."""
        wait_for(lambda: not marked(self.marker), END_S)
        found = marked(self.marker)
        try:
            usable_port(LOCAL, self.port)
        except ValueError as error:
            found.append(str(error))
        found += [name for name in sorted(self.shared) if Path(name).exists()]
        # What belongs to a killed owner, its leash removes a moment later.
        wait_for(lambda: not self.files(), 5)
        return found + self.files()

    def files(self) -> list[str]:
        """Its temporary files; what torch has compiled stays for the next run."""
        paths = self.temporary.iterdir()
        return [str(path) for path in paths if not path.name.startswith("torchinductor_")]

    def close(self) -> None:
        """End whatever a failed test has left."""
        for line in marked(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Stream:
    """A long answer that is read in a thread; `error` is what ended it, None for its own end."""

    def __init__(self, client: Client) -> None:
        self.pieces = 0
        self.error: ClientError | None = None
        self.thread = threading.Thread(target=self._read, args=(client,), daemon=True)
        self.thread.start()
        assert wait_for(lambda: self.pieces > 2 or self.error, 60), "no answer began"

    def _read(self, client: Client) -> None:
        try:
            for _ in client.stream_completion([9, 8, 7], **LONG):
                self.pieces += 1
        except ClientError as error:
            self.error = error

    def ended(self, seconds: float) -> bool:
        """Whether it came to an end."""
        self.thread.join(seconds)
        return not self.thread.is_alive()


@contextlib.contextmanager
def victim(
    file: Path, timeout_s: float = 60.0, log: Path | None = None, options: tuple = ()
) -> Iterator[Victim]:
    """A starting server, gone afterwards."""
    server = Victim(file, timeout_s, log, options)
    try:
        yield server
    finally:
        server.close()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _children(pid: int) -> list[int]:
    try:
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def pause(seconds: float, server: Victim) -> None:
    """Let time pass while the server lives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.process.poll() is None:
        time.sleep(0.05)

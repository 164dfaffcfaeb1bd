"""vLLM's OpenAI server over a GGUF file, as a process: its start, its end.

with Server.of_file("GLM-5-Q4_K_M-00001-of-00010.gguf") as server:
    server.wait_ready()
    Client(server.url).chat([{"role": "user", "content": "Hello"}])
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from glm5lab.errors import InputError
from glm5lab.serving.client import Client
from glm5lab.serving.command import (
    LOCAL,
    ServerError,
    command,
    selected_backend,
    settings,
    url,
    usable_port,
)
from glm5lab.serving.leash import states
from glm5lab.serving.process import LoggedProcess
from glm5lab.serving.progress import Progress
from glm5lab.serving.verdict import doctor, ended, halted, verdict

POLL_S = 0.25
SAY_S = 30.0
# Seconds that a stuck engine gets to end by itself.
STUCK_PATIENCE_S = 5.0
# Seconds in which a server ends whose engine is dead.
DYING_S = 10.0
# Stages that may be silent while a process works, and states of one that does: it computes, waits
# for a core or for the disk (proc(5)); looked at so often.
SILENT, BUSY, LOOKS = ("imports", "engine", "http"), "RD", 16
USAGE = 2  # vLLM's exit code for options that it does not know


class Server(LoggedProcess):
    """A running server; inside its context the process lives, outside nothing of it does.

    Args:
        command: program and arguments.
        url: where it will answer, without /v1.
        log: file that gets its output.
        settings: environment variables beside those of this process.
        echo: called with every line of output, in another thread.

    Attributes:
        backend: the line in which the engine names TRITON_MLA_SPARSE, once it has.
        progress: how far the start is.
        stuck: whether it was found not to go on; it is then ended with less patience.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log: Path,
        settings: Mapping[str, str] | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(command, log, settings, echo)
        self.url = url
        self.backend: str | None = None
        self.progress = Progress()
        self.stuck = False

    @classmethod
    def of_file(
        cls,
        file: str | Path,
        host: str = LOCAL,
        port: int = 0,
        options: Sequence[str] = (),
        log: Path | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> Self:
        """A server for a GGUF file, not yet started; port 0 takes a free one.

        Raises:
            InputError: the port cannot be bound.
            ServerError: vLLM is not installed.
        """
        port = usable_port(host, port)
        line = command(file, host, port, options)
        log = log or Path(tempfile.mkdtemp(prefix="glm5lab-serve-")) / "server.log"
        return cls(line, url(host, port), log, settings(os.environ), echo)

    def start(self) -> None:
        """As LoggedProcess, with the clock of `progress` set back."""
        self.progress = Progress()
        super().start()

    def stop(self, patience_s: float = 20.0) -> None:
        """As LoggedProcess; a stuck server gets less patience."""
        super().stop(min(patience_s, STUCK_PATIENCE_S) if self.stuck else patience_s)

    def saw(self, line: str) -> None:
        """Note the backend's line, and the stage of the start."""
        if self.backend is None:
            self.backend = selected_backend([line])
        self.progress.see(line)

    def wait_ready(
        self,
        timeout_s: float | None = 1800.0,
        say: Callable[[str], None] | None = None,
        stall_s: float | None = None,
    ) -> float:
        """Wait until the server answers requests.

        Args:
            timeout_s: seconds to wait at most; None for no limit.
            say: called with a line for every stage, and every half minute.
            stall_s: seconds without a line of output after which it counts as stuck; None for no
                limit.

        Returns:
            Seconds waited.

        Raises:
            InputError: vLLM does not know an option.
            ServerError: it ended, is stuck, or was not ready in time; the message has the cause.
        """
        began, said, stage = time.monotonic(), time.monotonic(), ""
        probe = Client(self.url, timeout_s=5.0)
        while not probe.healthy():
            if self.exit_code is not None:
                raise self.failed("before it was ready")
            now = time.monotonic()
            if timeout_s is not None and now - began > timeout_s:
                raise self.halted(f"was not ready after {now - began:.0f} s")
            if stall_s is not None and self.progress.quiet_s > stall_s and not self._computes():
                quiet = f"has written nothing for {self.progress.quiet_s:.0f} s"
                raise self.halted(f"is stuck, {now - began:.0f} s after its start: it {quiet}")
            if say is not None and (now - said > SAY_S or self.progress.stage != stage):
                said, stage = now, self.progress.stage
                say(self.progress.waiting())
            time.sleep(POLL_S)
        return time.monotonic() - began

    def _computes(self) -> bool:
        """Whether it is importing, say, which is silent and takes a slow disk's time.

        In other stages a process that computes may well wait for another one: that is no progress.
        """
        if self.progress.stage not in SILENT:
            return False
        busy = 0
        for _ in range(LOOKS):
            time.sleep(POLL_S / 2)
            busy += any(state in BUSY for state in states(self.group).values())
        return busy > LOOKS // 5

    def failed(self, when: str) -> ServerError | InputError:
        """The error for a server that has ended by itself."""
        code = self.wait()
        found = self.first_error()
        if code == USAGE and " error: " in f" {found}":
            words = found.partition("error: ")[2]
            return InputError("vLLM's options", words, "`vllm serve --help=all` lists them all")
        return ServerError(f"the server {ended(code)} {when}: {self._verdict()}")

    def unsound(self, error: ServerError) -> ServerError | InputError:
        """The error for a server that is ready and fails its first request.

        An engine or worker that died answers 500 first, and then the server ends: its log says why.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(DYING_S)
            return self.failed(f"at its first request ({error})")
        known = doctor(self.log)
        return ServerError("; ".join(filter(None, [str(error), known, self._log()])))

    def halted(self, what: str) -> ServerError:
        """The error for a server that runs and does not go on; it is given no more time."""
        self.stuck = True
        where = f"stage {self.progress.where()}; {self.doing()}"
        if known := doctor(self.log):
            where = f"{known}; {where}"
        return ServerError(f"the server {what}: {where}; {self._log()}")

    def doing(self) -> str:
        """Which of its processes do not run, and the last line that it wrote."""
        return halted(self.group, self.progress.names, self.progress.last)

    def _verdict(self) -> str:
        return f"{verdict(self.log, list(self.lines))}; {self._log()}"

    def _log(self) -> str:
        lost = f" (the log is not complete: {self.log_error})" if self.log_error else ""
        return f"its whole output: {self.log}{lost}"


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT interrupt inside the context (main thread), in background jobs too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signum: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

"""A child process on a leash: its output in a log file, its end complete and always reached."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from glm5lab.errors import InputError
from glm5lab.serving.leash import COMMAND_GONE_S, end_group, remove_scratch

KEPT_LINES = 2000
LONGEST = 600  # characters of an error that is reported in one line
# What vLLM and its logger put before a message.
PREFIX = re.compile(
    r"^(\([\w. -]+ pid=\d+\) ?)?((INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^]]*\] ?)?"
)
ERROR = re.compile(r"^([\w.]+(Error|Exception|Interrupt|Exit)\b(: .*)?|.*\berror: .+)$")
STOPPED = ("KeyboardInterrupt", "SystemExit")
# A socket's path has 107 characters at most, and vLLM's sockets are called by 36 of them.
LONGEST_SCRATCH = 60


def message(line: str) -> str:
    """A line of vLLM's log without process, level, time and place."""
    return PREFIX.sub("", line, count=1).rstrip()


def first_error(lines: Iterable[str]) -> str:
    """The first error that a log names, or else its last line.

    vLLM's processes fail one after another and each reports the failure of the one below it, so
    the cause stands first, in a worker's traceback, and the last line says little.
    """
    texts = [text for text in map(message, lines) if text]
    for number, text in enumerate(texts):
        if ERROR.match(text) and not text.startswith(STOPPED):
            # pydantic counts its errors in the first line and names them in the next ones.
            more = texts[number + 1 : number + 2] if "validation error" in text else []
            return " ".join([text, *(line.strip() for line in more)])[:LONGEST]
    return texts[-1][:LONGEST] if texts else "it wrote nothing"


def scratch_folder() -> Path:
    """A new folder for the temporary files of one command: engines leave sockets and more there.

    Raises:
        InputError: there is no room for one.
    """
    short = None if len(tempfile.gettempdir()) < LONGEST_SCRATCH - 20 else "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="glm5lab-", dir=short))
    except OSError as error:
        place = short or tempfile.gettempdir()
        cause = f"takes no temporary files: {error.strerror or error}"
        raise InputError(place, cause, "make room there, or set TMPDIR") from error


class LoggedProcess:
    """A command on a leash (see `leash`), its output going to a log file and to memory.

    Use it as a context manager: the process runs inside, and nothing of it is left behind. Its
    temporary files have a folder of their own, which goes with it.

    Args:
        command: program and arguments.
        log: file that gets the output; its folder is made.
        settings: environment variables beside those of this process.
        echo: called with every line of output, in another thread.

    Attributes:
        log_error: why the log file does not hold all of the output; "" when it does. A full disk
            ends the log, and nothing else.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        settings: Mapping[str, str] | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self.command, self.log = list(command), log
        self.settings = dict(settings or {})
        self.echo = echo
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.log_error = ""
        self._scratch: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the command in a session of its own, so that Ctrl-C reaches its owner only.

        Raises:
            InputError: the log file cannot be written, or there is no room for temporary files.
        """
        log = self._open_log()
        self._scratch = scratch_folder()
        leash = [sys.executable, "-P", "-m", "glm5lab.serving.leash", str(self._scratch)]
        self._process = subprocess.Popen(
            [*leash, *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=self._environment(self._scratch),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def _open_log(self) -> TextIO:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            return self.log.open("w", encoding="utf-8")
        except OSError as error:
            cause = f"cannot be written: {error.strerror or error}"
            raise InputError(self.log, cause, "name another log file") from error

    def _environment(self, scratch: Path) -> dict[str, str]:
        # What torch compiles is kept for the next run, and so lies where it always does.
        kept = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        ours = {"PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": kept}
        return {**ours, **os.environ, "TMPDIR": str(scratch), **self.settings}

    def _read(self, log: TextIO) -> None:
        """Take in the output to its end, whatever happens to the log: a full pipe would stop it."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._write(log, line)
            self.lines.append(line.rstrip("\n"))
            self.saw(self.lines[-1])
            if self.echo is not None:
                # A terminal that has gone takes no more lines.
                with contextlib.suppress(OSError, ValueError):
                    self.echo(self.lines[-1])
        with contextlib.suppress(OSError):
            log.close()

    def _write(self, log: TextIO, line: str) -> None:
        if self.log_error:
            return
        try:
            log.write(line)
            log.flush()
        except OSError as error:
            self.log_error = error.strerror or str(error)

    def saw(self, line: str) -> None:
        """For subclasses: called with every line of output, in another thread."""

    @property
    def group(self) -> int:
        """Id of the process group that holds the command and everything it starts."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The command's exit code, 128 + N for signal N, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the command to end by itself; its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._end_group()
        self._join()
        return code

    def first_error(self) -> str:
        """The first error in the output so far, see `first_error`."""
        return first_error(list(self.lines))

    def stop(self, patience_s: float = 20.0) -> None:
        """End the command and all of its children: SIGINT, SIGTERM, SIGKILL; harmless to repeat.

        Args:
            patience_s: seconds between SIGINT and SIGTERM; another Ctrl-C cuts them short.
        """
        process = self._process
        if process is None:
            return
        # A stopped process takes no other signal, and a stopped leash passes none on.
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
        try:
            for signum, seconds in ((signal.SIGINT, patience_s), (signal.SIGTERM, 5.0)):
                if process.poll() is None:
                    process.send_signal(signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
        finally:
            # The leash leaves an empty group behind, unless it is stuck or was killed itself.
            if process.poll() is None:
                process.kill()
                process.wait()
            self._end_group()
            self._join()

    def _end_group(self) -> None:
        """What a killed leash has left behind; nothing, otherwise."""
        assert self._process is not None
        if (self._process.returncode or 0) < 0:
            end_group(self._process.pid, COMMAND_GONE_S)
        if self._scratch is not None:
            remove_scratch(self._scratch)

    def _join(self) -> None:
        assert self._process is not None
        if self._reader is not None:
            self._reader.join(5.0)
        if self._process.stdin is not None:
            self._process.stdin.close()

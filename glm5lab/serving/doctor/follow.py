"""Logs that still grow: a verdict as soon as there is one."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from glm5lab.errors import InputError
from glm5lab.serving.doctor.diagnosis import diagnose
from glm5lab.serving.doctor.reader import BLOCK, FIX, PIPE, LineSplitter, is_log_name
from glm5lab.serving.doctor.scan import Scanner
from glm5lab.serving.doctor.verdict import Diagnosis

POLL_S = 0.25
# Quiet seconds after which a failure counts: workers' tracebacks come in any order, and an error
# that the server survives is followed by more lines.
SETTLED_S, SURVIVED_S = 2.0, 10.0
SILENT_S = 300.0  # a start that writes nothing for so long hangs


class Tail:
    """What is appended to a file or comes through a pipe; a file that starts anew is read anew."""

    def __init__(self, name: str) -> None:
        self.name, self.ended = name, False
        self.scanner, self._splitter = Scanner(name), LineSplitter()
        self._stream: BinaryIO | None = None if name == PIPE else self._open()

    def _open(self) -> BinaryIO:
        try:
            return Path(self.name).open("rb")
        except OSError as error:
            raise InputError(
                self.name, f"cannot be read: {error.strerror or error}", FIX
            ) from error

    def read(self) -> bool:
        """Take what is new; whether there was any."""
        block = self._pipe() if self._stream is None else self._file(self._stream)
        if block:
            self.scanner.read([self._splitter.feed(block)])
        elif self.ended:
            self.scanner.read([self._splitter.end()])
        return bool(block)

    def _pipe(self) -> bytes:
        if self.ended or not select.select([sys.stdin.fileno()], [], [], 0)[0]:
            return b""
        block = os.read(sys.stdin.fileno(), BLOCK)
        self.ended = not block
        return block

    def _file(self, stream: BinaryIO) -> bytes:
        block = stream.read(BLOCK)
        if not block and self._replaced(stream):
            stream.close()
            self._stream = self._open()
            self.scanner, self._splitter = Scanner(self.name), LineSplitter()
        return block

    def _replaced(self, stream: BinaryIO) -> bool:
        """The name belongs to another file by now (rotated), or the file was cut."""
        try:
            now, mine = os.stat(self.name), os.fstat(stream.fileno())
        except OSError:  # gone for a moment, as while it is rotated
            return False
        return (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev) or now.st_size < stream.tell()


def follow(
    names: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Diagnosis]:
    """Verdicts on growing logs: each new one, until one is `failed` or `hang`.

    A pipe's end, and Ctrl-C, ask for the verdict so far.

    Raises:
        InputError: a log is missing or not readable.
    """
    is_log_name(names)
    tails = [Tail(name) for name in names]
    heard, said = clock(), ""
    try:
        while True:
            heard_from = [tail for tail in tails if tail.read()]
            if heard_from:
                heard = clock()
                continue
            now = diagnose([tail.scanner.scan for tail in tails])
            if all(tail.ended for tail in tails):
                yield now
                return
            if _reached(now, tails, clock() - heard) and now.verdict != said:
                said = now.verdict
                yield now
                if now.verdict in ("failed", "hang") or (now.verdict == "unknown" and now.weight):
                    return
            sleep(POLL_S)
    except KeyboardInterrupt:
        yield diagnose([tail.scanner.scan for tail in tails])


def _reached(now: Diagnosis, tails: Sequence[Tail], quiet_s: float) -> bool:
    """The verdict will not change by lines that are about to come."""
    if now.verdict in ("healthy", "degraded"):
        return True
    if now.verdict == "hang":
        return now.stage == "serving" or quiet_s >= SILENT_S
    fatal = any(tail.scanner.scan.run.fatal for tail in tails)
    return now.weight > 0 and quiet_s >= (SETTLED_S if fatal else SURVIVED_S)

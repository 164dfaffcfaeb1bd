"""Run long commands as numbered stages: what runs now, and for how long. Standard library only."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

TAIL_LINES = 25
HEARTBEAT_S = 10.0
# pip's lines that say where it is; its other lines go to the log only.
PIP_STEP = re.compile(r"^\s*(Collecting|Downloading|Processing|Building|Installing) .*")


class StageError(Exception):
    """A stage's command failed; `tail` holds the end of its output."""

    def __init__(self, stage: str, tail: Sequence[str], log: Path) -> None:
        super().__init__(f"stage '{stage}' failed; all of its output is in {log}")
        self.tail = list(tail)


class Progress:
    """Shows `[2/6] torch`, then `done in 31 s`.

    On a terminal pip's current step stands on the same line; elsewhere it is a line every 10 s.
    """

    def __init__(self, total: int, log: Path) -> None:
        self.total, self.log = total, log
        self.number, self.stage = 0, ""
        self.began = self.stage_began = self.last_beat = time.monotonic()
        self.terminal = sys.stdout.isatty()

    def run(self, stage: str, *commands: Sequence[str]) -> None:
        """Run a stage: its commands are alternatives, and the first that succeeds ends it.

        Raises:
            StageError: all of them failed.
        """
        self.number, self.stage = self.number + 1, stage
        self.stage_began = self.last_beat = time.monotonic()
        self._say(self._head(), end="" if self.terminal else "\n")
        lines: list[str] = []
        for command in commands:
            code, lines = self._follow(command)
            if code == 0:
                break
        else:
            self._say(f"{self._prefix()}FAILED after {self._seconds():.0f} s")
            raise StageError(stage, lines[-TAIL_LINES:], self.log)
        total = time.monotonic() - self.began
        self._say(f"{self._prefix()}done in {self._seconds():.0f} s (total {total:.0f} s)")

    def _follow(self, command: Sequence[str]) -> tuple[int, list[str]]:
        """Run one command to its end; its exit status and output lines, which the log gets too."""
        lines: list[str] = []
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert process.stdout is not None
            try:
                for line in _lines_or_ticks(process.stdout):
                    if line is not None:
                        log.write(line)
                        lines.append(line.rstrip())
                    self._beat(lines)
                return process.wait(), lines
            except BaseException:
                process.terminate()
                process.wait()
                raise

    def _beat(self, lines: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self.last_beat < (0.5 if self.terminal else HEARTBEAT_S):
            return
        self.last_beat = now
        steps = [line.strip() for line in lines if PIP_STEP.match(line)]
        packages = sum(step.startswith(("Collecting", "Processing")) for step in steps)
        last = steps[-1].partition(" (from")[0].partition(": ")[0] if steps else ""
        doing = f"{packages} packages, {re.sub('[^ ]*/', '', last)}" if steps else ""
        text = f"{self._prefix()}{self._seconds():4.0f} s  {doing}"[:110]
        self._say(text, end="" if self.terminal else "\n")

    def _head(self) -> str:
        return f"[{self.number}/{self.total}] {self.stage}"

    def _prefix(self) -> str:
        return f"\r\x1b[K{self._head()}: " if self.terminal else "      "

    def _seconds(self) -> float:
        return time.monotonic() - self.stage_began

    @staticmethod
    def _say(text: str, end: str = "\n") -> None:
        print(text, end=end, flush=True)


def _lines_or_ticks(stream: IO[str]) -> Iterator[str | None]:
    """The stream's lines as they come, and None for each half second without one."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=0.5)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line

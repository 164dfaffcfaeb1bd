"""Runs many cases in child processes and watches them.

A case that ends its process, or gives no answer for long, counts as failed, and the next one runs
in a new process.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from glm5lab.env import child_environment
from glm5lab.fuzz.case import Outcome
from glm5lab.fuzz.report import FuzzReport

# A case that gives no answer for so long hangs; starting a child may take longer on a busy machine.
HANG_S, START_S = 20.0, 120.0


def run_fuzz(
    cases: int = 20_000,
    seed: int = 0,
    seconds: float | None = None,
    jobs: int | None = None,
    progress: Callable[[int], object] = lambda _: None,
    child: str = "glm5lab.fuzz.child",
) -> FuzzReport:
    """Run cases 0 to `cases` - 1.

    Args:
        cases: how many.
        seed: another seed, other cases.
        seconds: stop after so many seconds, whatever is done by then, but at least one case.
        jobs: child processes; default is the machine's cores, at most 8.
        progress: called with the number of cases done.
        child: the module that runs them; tests put a broken one in its place.
    """
    jobs = max(1, min(jobs or len(os.sched_getaffinity(0)), 8, cases))
    start, report = time.monotonic(), FuzzReport(seed)
    stop = threading.Event()
    done: queue.Queue[Outcome | BaseException | None] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="glm5lab-fuzz-") as folder:
        workers = [
            _Worker(Path(folder) / f"{i}", child, (seed, i, cases, jobs), done, stop)
            for i in range(jobs)
        ]
        for worker in workers:
            worker.start()
        try:
            running = jobs
            while running:
                late = seconds is not None and time.monotonic() > start + seconds
                if late and report.cases:
                    stop.set()
                with contextlib.suppress(queue.Empty):
                    item = done.get(timeout=0.2)
                    if isinstance(item, BaseException):
                        raise item
                    if item is None:
                        running -= 1
                    else:
                        report.add(item)
                        progress(report.cases)
        finally:
            stop.set()
            for worker in workers:
                worker.join()
    report.seconds = time.monotonic() - start
    return report


class _Worker(threading.Thread):
    """Cases first, first + step, ..., with a new child behind each case that ends its process.

    Args:
        folder: for the child's files.
        module: what the child runs.
        numbers: seed, first case, number of all cases, step.
        done: takes each outcome, and None or an error at the end.
        stop: set when no more cases are wanted.
    """

    def __init__(
        self,
        folder: Path,
        module: str,
        numbers: tuple[int, int, int, int],
        done: "queue.Queue[Outcome | BaseException | None]",
        stop: threading.Event,
    ) -> None:
        super().__init__()
        self.folder, self.module, self.done, self.stop = folder, module, done, stop
        self.seed, self.next, self.cases, self.step = numbers
        self.log = folder.with_suffix(".log")

    def run(self) -> None:
        """Run the cases."""
        try:
            while self.next < self.cases and not self.stop.is_set():
                self._one_child()
            self.done.put(None)
        except BaseException as error:
            self.done.put(error)

    def _one_child(self) -> None:
        """Run one child until it ends, hangs, or is no longer wanted."""
        child = self._spawn()
        lines: queue.Queue[bytes] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(child, lines))
        reader.start()
        started = False
        try:
            while self.next < self.cases and not self.stop.is_set():
                line = self._line(lines, HANG_S if started else START_S)
                if line == b"{}\n":
                    started = True
                elif line:
                    self.done.put(Outcome(**json.loads(line)))
                    self.next += self.step
                elif self.stop.is_set():
                    return
                elif started:
                    self.done.put(self._lost(child, hung=line is None))
                    self.next += self.step
                    return
                else:
                    raise RuntimeError(f"the fuzzer's child did not start: {self._last_words()}")
        finally:
            child.kill()
            child.wait()
            reader.join()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        numbers = (self.seed, self.next, self.cases, self.step)
        with self.log.open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", self.module, *map(str, numbers), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(),
            )

    def _line(self, lines: "queue.Queue[bytes]", patience: float) -> bytes | None:
        """The child's next line; b"" when it has ended, None when it says nothing for too long."""
        end = time.monotonic() + patience
        while time.monotonic() < end and not self.stop.is_set():
            with contextlib.suppress(queue.Empty):
                return lines.get(timeout=0.2)
        return None

    def _lost(self, child: "subprocess.Popen[bytes]", hung: bool) -> Outcome:
        """The outcome of the case that ended its process, or would not end."""
        if hung:
            error, detail = "Hang", f"no answer in {HANG_S:.0f} s"
        else:
            error, detail = "Crash", f"exit code {child.wait()}: {self._last_words()}"
        seconds = HANG_S if hung else 0.0
        return Outcome(self.next, "?", "?", error, False, detail, seconds, 0.0, 0, 0.0)

    def _last_words(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())[-300:]


def _read_lines(child: "subprocess.Popen[bytes]", lines: "queue.Queue[bytes]") -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.put(line)
    lines.put(b"")

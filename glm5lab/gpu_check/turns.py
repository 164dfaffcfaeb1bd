"""Engines that start side by side and then work in turns, a part of the measurement each.

The host's speed drifts; where every engine does one part before any does the next, the drift falls
on all of them alike. They share a folder: NAME.0.done says that an engine has started, NAME.K.go
that it may begin part K, NAME.K.done that the part has ended.
"""

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAUSE_S = 0.02  # between two looks at the folder


class Turn:
    """An engine's side; to be made before the engine starts.

    Args:
        folder: shared by the engines.
        name: of this engine.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.parts = 0
        self.parent = os.getppid()

    def started(self) -> None:
        """Say that the engine has started."""
        done_file(self.folder, self.name, 0).touch()

    @contextmanager
    def part(self) -> Iterator[None]:
        """The next part: begins when it is this engine's turn.

        Where it raises, the turn lasts until the process has ended.
        """
        self.parts += 1
        while not go_file(self.folder, self.name, self.parts).exists():
            if os.getppid() != self.parent:
                raise SystemExit("the program that started this engine has ended")
            time.sleep(PAUSE_S)
        yield
        done_file(self.folder, self.name, self.parts).touch()


class Turns:
    """Whose turn it is, said by the program that started the engines.

    Args:
        folder: shared by the engines; emptied.
        timeout_s: seconds an engine may take to start, and for its parts together.
        stop: ends the engine of a name.
    """

    def __init__(self, folder: Path, timeout_s: float, stop: Callable[[str], None]) -> None:
        self.folder, self.timeout_s, self.stop = folder, timeout_s, stop
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def deal(self, jobs: Mapping[str, Future[Any]]) -> None:
        """Let each engine do one part after the other, until all engines have ended.

        An engine that failed or was killed, in its turn or waiting, is left out from there on.

        Args:
            jobs: name of an engine -> what runs it.
        """
        names, begun = list(jobs), time.monotonic()
        for name in names:
            self.wait(name, 0, jobs[name], begun)
        spent = dict.fromkeys(names, 0.0)
        for part in itertools.count(1):
            first = part % len(names)  # another one begins each part
            for name in names[first:] + names[:first]:
                if not jobs[name].done():
                    begun = time.monotonic() - spent[name]
                    go_file(self.folder, name, part).touch()
                    spent[name] = self.wait(name, part, jobs[name], begun)
            if all(job.done() for job in jobs.values()):
                return

    def wait(self, name: str, part: int, job: Future[Any], begun: float) -> float:
        """Wait until an engine's part or the engine has ended; one that takes too long is stopped.

        Args:
            name: of the engine.
            part: its number.
            job: what runs the engine.
            begun: time.monotonic() when its time began.

        Returns:
            Seconds since then.
        """
        done = done_file(self.folder, name, part)
        while not (done.exists() or job.done()):
            if time.monotonic() - begun > self.timeout_s:
                self.stop(name)
            time.sleep(PAUSE_S)
        return time.monotonic() - begun


def go_file(folder: Path, name: str, part: int) -> Path:
    """There as soon as an engine may begin a part."""
    return folder / f"{name}.{part}.go"


def done_file(folder: Path, name: str, part: int) -> Path:
    """There as soon as an engine has ended a part; part 0 is its start."""
    return folder / f"{name}.{part}.done"

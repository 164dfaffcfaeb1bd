"""A log that still grows: `glm5lab doctor --follow`."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doctor_logs import CASES, FOLDER, crash, log

from glm5lab.errors import InputError
from glm5lab.serving.doctor.follow import SETTLED_S, SILENT_S, SURVIVED_S, follow
from glm5lab.serving.doctor.verdict import Diagnosis

LINES = crash(["OSError: [Errno 98] Address already in use"]).splitlines(keepends=True)
HEALTHY = (FOLDER / "healthy-long-compile.txt").read_text(encoding="utf-8")


class Clock:
    """Time that passes only while somebody sleeps, and what happens meanwhile."""

    def __init__(self, events: dict[float, Callable[[], object]]) -> None:
        self.now, self.events = 0.0, dict(sorted(events.items()))

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [w for w in self.events if w <= self.now]:
            self.events.pop(when)()
        if self.now > 1000:
            raise KeyboardInterrupt


def watched(path: Path, events: dict[float, str]) -> Iterator[tuple[float, Diagnosis]]:
    """Verdicts on a file to which text is appended at the given times, with their times."""

    def writer(text: str) -> Callable[[], object]:
        def write() -> None:
            with path.open("a", encoding="utf-8") as stream:
                stream.write(text)

        return write

    clock = Clock({when: writer(text) for when, text in events.items()})
    for found in follow([str(path)], clock, clock.sleep):
        yield clock.now, found


def test_a_failure_is_reported_when_its_errors_have_settled(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("")
    found = list(watched(path, {i + 1.0: line for i, line in enumerate(LINES)}))
    assert [d.verdict for _, d in found] == ["failed"]
    when, last = found[0]
    assert last.layer == "server"
    assert len(LINES) + SETTLED_S <= when <= len(LINES) + SETTLED_S + 1


def test_an_error_that_is_survived_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    head, tail = HEALTHY.split("Loading safetensors", 1)
    path.write_text(head + "OSError: [Errno 98] Address already in use\n")
    events = {SURVIVED_S - 2: "Loading safetensors" + tail}
    found = list(watched(path, events))
    assert [d.verdict for _, d in found[:1]] == ["healthy"]
    assert all(d.verdict == "healthy" for _, d in found)


def test_ready_is_said_once_and_then_the_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(HEALTHY)
    tag = "(EngineCore pid=30) ERROR 11-29 06:10:09 [core.py:2806] "
    messages = ["torch.OutOfMemoryError: CUDA out of memory.", "EngineCore encountered an issue."]
    dead = "".join(f"{tag}{message}\n" for message in messages)
    found = list(watched(path, {100.0: dead}))
    assert [d.verdict for _, d in found] == ["healthy", "failed"]
    assert found[1][1].layer == "memory"


def test_silence_while_starting_is_a_hang(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    content = log(next(c for c in CASES if c["kind"] == "nccl_p2p_hang")).decode()
    path.write_text(content.split("-- docker")[0])
    found = list(watched(path, {}))
    assert [d.verdict for _, d in found] == ["hang"]
    assert found[0][0] >= SILENT_S
    assert found[0][1].layer == "distributed"


def test_a_rotated_log_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("INFO:     Waiting for application startup.\n" * 1000)

    def rotate() -> None:
        path.rename(tmp_path / "a.log.1")
        path.write_text("".join(LINES))

    clock = Clock({5.0: rotate})
    found = list(follow([str(path)], clock, clock.sleep))
    assert [(d.verdict, d.layer) for d in found] == [("failed", "server")]


def test_a_missing_log(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        list(follow([str(tmp_path / "a.log")]))


def test_a_pipe_that_ends() -> None:
    line = [sys.executable, "-m", "glm5lab", "doctor", "-", "--follow", "--json"]
    done = subprocess.run(line, input=log(CASES[0]), capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout)["layer"] == "gguf"


def test_a_pipe_that_stays_open() -> None:
    """The verdict comes while the writer still lives."""
    line = [sys.executable, "-m", "glm5lab", "doctor", "-", "--follow"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        reader.stdin.write(log(CASES[0]))
        reader.stdin.flush()
        deadline = time.monotonic() + 60
        while reader.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert reader.returncode == 1
        assert reader.stdout is not None
        assert b"layer: gguf" in reader.stdout.read()

"""Engines measured in turns: small programs stand for them, in processes as the engines are."""

import json
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from stepped_engine import Engine

from glm5lab.gpu_check import cases, child, run, speed, turns

# Starts, measures three parts and answers; one writes into a log when a part begins and ends.
ENGINE = """
import json, os, signal, sys, time
from pathlib import Path
from glm5lab.gpu_check.turns import Turn

case, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
name, fate = case["name"], case["options"].get("fate")
turn = Turn(Path(case["turns"]), name)
if fate == "no start":
    raise SystemExit("out of memory")
if fate == "hangs at start":
    time.sleep(600)
with (out.parent / "log").open("a", buffering=1) as log:
    time.sleep(case["options"].get("late", 0))
    print(name, "started", file=log)
    turn.started()
    if fate == "killed while it waits":
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(3):
        with turn.part():
            print(name, "begins", number, file=log)
            if number == 1 and fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 1 and fate == "raises":
                raise ValueError("an illegal memory access")
            if number == 1 and fate == "hangs":
                time.sleep(600)
            time.sleep(0.02)
            print(name, "ends", number, file=log)
out.write_text(json.dumps({"speed": name}))
"""


def run_engines(tmp_path, monkeypatch, timeout_s=60.0, **fates):
    """What `run_cases` found, and the engines' log."""
    monkeypatch.setattr(run, "CHILD", ("-c", ENGINE))
    monkeypatch.setattr(run, "visible_gpus", list)
    engines = [
        cases.EngineCase(name, cases.OURS, options=options) for name, options in fates.items()
    ]
    models, size = {"full": tmp_path}, len(engines)
    echo: list[str] = []
    found = run.run_cases(
        engines, models, tmp_path, size, timeout_s, None, echo.append, in_turns=True
    )
    return found, [line.split() for line in (tmp_path / "log").read_text().splitlines()]


def in_parts(log):
    """Part -> names in the order of their turns; each part ends before the next one begins."""
    measured = [line for line in log if line[1] != "started"]
    order: dict[int, list[str]] = {}
    for name, what, number in measured:
        if what == "begins":
            order.setdefault(int(number), []).append(name)
    assert [int(line[2]) for line in measured] == sorted(int(line[2]) for line in measured)
    return order


def test_every_engine_measures_a_part_before_the_next_one_begins(tmp_path, monkeypatch):
    found, log = run_engines(tmp_path, monkeypatch, a={}, b={"late": 0.5}, c={})
    assert {name: answer["speed"] for name, answer in found.items()} == {n: n for n in "abc"}
    assert [line[1] for line in log[:3]] == ["started"] * 3
    for begun, ended in zip(log[3::2], log[4::2], strict=True):
        assert (begun[1], ended[1], begun[0]) == ("begins", "ends", ended[0])
    assert in_parts(log) == {0: ["b", "c", "a"], 1: ["c", "a", "b"], 2: ["a", "b", "c"]}


@pytest.mark.parametrize("fate", ["no start", "killed while it waits", "killed", "raises"])
def test_the_others_go_on_without_an_engine_that_ends(tmp_path, monkeypatch, fate):
    found, log = run_engines(tmp_path, monkeypatch, a={}, b={"fate": fate}, c={})
    assert "error" in found["b"]
    assert (found["a"]["speed"], found["c"]["speed"]) == ("a", "c")
    begun = [name for name, what, *_ in log if what == "begins"]
    assert (begun.count("a"), begun.count("c")) == (3, 3)
    assert begun.count("b") == (2 if fate in ("killed", "raises") else 0)
    in_parts(log)


@pytest.mark.parametrize("fate", ["hangs at start", "hangs"])
def test_an_engine_that_hangs_is_killed_and_the_others_go_on(tmp_path, monkeypatch, fate):
    found, log = run_engines(tmp_path, monkeypatch, 5.0, a={}, b={"fate": fate}, c={})
    assert found["b"]["error"].startswith("exit -9")
    assert (found["a"]["speed"], found["c"]["speed"]) == ("a", "c")
    in_parts(log)


def test_an_engine_ends_with_the_program_that_started_it(tmp_path):
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"name": "a", "options": {}, "turns": str(tmp_path)}))
    engine = [sys.executable, "-c", ENGINE, str(case), str(tmp_path / "out.json")]
    start = (
        "import subprocess, sys, time; from pathlib import Path\n"
        f"subprocess.Popen({engine!r})\n"
        f"while not Path({str(turns.done_file(tmp_path, 'a', 0))!r}).exists(): time.sleep(0.02)"
    )
    # The engine inherits the output, which is closed when the engine has ended as well.
    command = [sys.executable, "-c", start]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=True, text=True)
    assert ended.stderr == "the program that started this engine has ended\n"
    assert not (tmp_path / "out.json").exists()


def test_rounds_of_the_same_entry_are_joined_and_each_entry_is_a_part(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    short = {"length": 3, "warm": 1, "rounds": 2}
    first = [short, {"length": 9, "warm": 0, "rounds": 1}, short]
    wanted = {"requests": [1, 4, 1], "context": 5, "steps": 2, "rounds": 3, "first": first}
    parts = []

    @contextmanager
    def part():
        parts.append("begun")
        yield
        parts.append("ended")

    found = speed.measure(SimpleNamespace(llm_engine=Engine()), wanted, part)
    assert parts == ["begun", "ended"] * 6
    counts = {
        name: {key: len(entry["rounds"]) for key, entry in entries.items()}
        for name, entries in found.items()
    }
    assert counts == {"ms_per_token": {"1": 6, "4": 3}, "first_ms": {"3": 4, "9": 1}}
    middle = found["first_ms"]["3"]
    assert middle["median"] == sorted(middle["rounds"])[1]


def test_an_engine_answers_and_measures_in_parts_of_its_turn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(child, "engine", lambda case: SimpleNamespace(llm_engine=Engine()))
    monkeypatch.setattr(child, "answer", lambda llm, prompts, case: [len(p) for p in prompts])
    first = [{"length": 3, "warm": 0, "rounds": 1}]
    wanted = {"requests": [1, 2], "context": 5, "steps": 2, "rounds": 3, "first": first}
    given = {"name": "a", "backend": cases.OURS, "turns": str(tmp_path), "lengths": [17]}
    case, out = tmp_path / "a.case.json", tmp_path / "a.json"
    case.write_text(json.dumps(given | {"speed": wanted}))
    for part in range(1, 5):
        turns.go_file(tmp_path, "a", part).touch()
    child.main(str(case), str(out))
    found = json.loads(out.read_text())
    assert found["alone"] == [17]
    assert list(found["speed"]["ms_per_token"]) == ["1", "2"]
    assert all(turns.done_file(tmp_path, "a", part).exists() for part in range(5))
    assert not turns.done_file(tmp_path, "a", 5).exists()

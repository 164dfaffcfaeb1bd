"""Damaged headers: a short run of the fuzzer, and whether it would notice a fault at all."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from typer.testing import CliRunner

from glm5lab.__main__ import app
from glm5lab.errors import InputError
from glm5lab.fuzz import case, run
from glm5lab.fuzz.case import write_case
from glm5lab.fuzz.draft import Draft, base_sets, write_bytes
from glm5lab.fuzz.mutations import BYTES, STRUCTURE
from glm5lab.fuzz.report import FuzzReport, fuzz_text
from glm5lab.gguf.reader import open_gguf

KINDS = {m.__name__ for m in (*STRUCTURE, *BYTES)}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[list[Draft]]:
    return base_sets(tmp_path_factory.mktemp("bases"))


def test_a_short_run() -> None:
    report = run.run_fuzz(600, seed=1, jobs=2)
    assert report.failures == []
    assert report.cases == 600
    assert set(report.by_kind) == KINDS
    read = sum(counts["read"] for counts in report.by_kind.values())
    refused = sum(counts["InputError at open"] for counts in report.by_kind.values())
    assert read > 60  # the damage is not so crude that the layers behind open_gguf see nothing
    assert refused > 200
    assert 20 < report.mb < 500
    assert report.handles == 0
    assert "limits: our errors only, 1 s, 500 MB, no handles: kept" in fuzz_text(report)


@pytest.mark.slow
def test_the_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    done = CliRunner().invoke(app, ["fuzz", "--cases", "20000", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["cases"] == 20_000


@pytest.mark.slow
def test_every_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    monkeypatch.setattr(run, "HANG_S", 8.0)
    report = run.run_fuzz(12, jobs=1, child="fuzz_broken_child")
    assert report.cases == 12
    reasons = {outcome.index: reason for outcome, reason in report.failures}
    assert set(reasons) == {3, 5, 7, 9, 11}, reasons
    assert reasons[3] == "KeyError at open: 'blk.0'"
    assert reasons[5] == "Crash at ?: exit code 3: out of luck"
    assert reasons[7] == "left 1 files open"
    assert reasons[9] == "Hang at ?: no answer in 8 s"
    assert reasons[11].startswith(("needed ", "MemoryError at open"))  # as the machine can give
    assert not report.ok
    assert "MISSED by 5 cases" in fuzz_text(report)


def test_a_child_that_does_not_start() -> None:
    with pytest.raises(RuntimeError, match=r"did not start: .*No module named glm5lab\.none"):
        run.run_fuzz(2, child="glm5lab.none")


def test_time_ends_a_run() -> None:
    report = run.run_fuzz(10_000_000, seconds=5, jobs=1)
    assert 0 < report.cases < 10_000


def test_a_run_without_cases_proves_nothing() -> None:
    report = run.run_fuzz(100, seconds=0, jobs=1)  # the time is up before the child has started
    assert 0 < report.cases < 100
    none = FuzzReport(0)
    assert not none.ok
    assert "no handles: not tried" in fuzz_text(none)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ([{"seconds": 0.5}], 0),
        ([{"seconds": 3.0}, {"seconds": 0.5}], 1),
        ([{"seconds": 3.0}, {"seconds": 4.0}], 0),
        ([{"seconds": 3.0, "expected": False}], 0),
        ([{"seconds": 3.0, "handles": 1}], 0),
        ([{"seconds": 3.0}, {"seconds": 4.0, "expected": False}], 1),
        ([{"seconds": 3.0}, {"seconds": 4.0, "handles": 1}], 1),
    ],
)
def test_slow_cases_run_again_and_lose_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: list[dict[str, Any]], kept: int
) -> None:
    sound = case.Outcome(0, "", "done", "", True, "", 0.0, 0.0, 0, 0.0)
    runs = [replace(sound, **changes) for changes in fields]
    waiting = list(runs)
    monkeypatch.setattr(case, "_run_once", lambda *_: waiting.pop(0))
    assert case.run_case([], 0, 0, tmp_path) == runs[kept]
    assert waiting == []


@pytest.mark.parametrize("command", [["fuzz"], ["bench", "reader"]])
@pytest.mark.parametrize("name", ["none/out.json", "", "file/out.json"])
def test_figures_that_cannot_be_written(tmp_path: Path, command: list[str], name: str) -> None:
    """Refused before the run, not behind it."""
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / name)])
    assert isinstance(done.exception, InputError)
    assert "cannot be written" in str(done.exception)
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_bases_are_sound(bases: list[list[Draft]], tmp_path: Path) -> None:
    """Put together unchanged, gguf-py reads them; else all cases would be refused for one fault."""
    for number, drafts in enumerate(bases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for draft in drafts:
            write_bytes(folder / draft.name, draft.encode(), draft.data, draft.size)
        model = open_gguf(folder)
        assert model.warnings == []
        theirs = [t.name for p in model.files for t in gguf.GGUFReader(p).tensors]
        assert theirs == list(model.tensors)


def test_a_case_is_its_seed_and_number(bases: list[list[Draft]], tmp_path: Path) -> None:
    def content(seed: int, index: int, name: str) -> dict[str, bytes]:
        folder = tmp_path / name
        folder.mkdir()
        write_case(bases, seed, index, folder)
        return {p.name: p.read_bytes()[:100_000] for p in folder.iterdir()}

    assert content(0, 17, "a") == content(0, 17, "b")
    assert content(0, 17, "c") != content(1, 17, "d")


def test_one_case_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["fuzz", "--case", "17"])
    assert done.stdout.strip() == "case-17"
    assert any((tmp_path / "case-17").iterdir())
    assert CliRunner().invoke(app, ["fuzz", "--case", "17"]).exit_code != 0

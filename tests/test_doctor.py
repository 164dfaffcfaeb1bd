"""The doctor's verdicts on logs with a known cause, and each of its rules."""

import subprocess
import sys
from typing import Any

import pytest
from doctor_logs import CASES, crash, diagnosed, log

from glm5lab.serving.doctor.lines import parse as parse_line
from glm5lab.serving.doctor.rules import LAYERS, Rule, book, parse
from glm5lab.serving.doctor.verdict import FIELDS

RULES = book().rules


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_case(case: dict[str, Any]) -> None:
    found = diagnosed(log(case))
    assert (found.verdict, found.layer, found.rank) == (
        case["verdict"],
        case["layer"],
        case["rank"],
    )
    if case["evidence"] is None:
        assert found.evidence is None
        assert found.symptoms == []
        return
    assert found.evidence is not None
    assert found.evidence["line"] == case["line"]
    assert case["evidence"] in found.evidence["text"]
    assert found.fix
    assert found.confidence >= 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
@pytest.mark.parametrize("block", [1, 7, 333])
def test_blocks_do_not_matter(case: dict[str, Any], block: int) -> None:
    assert diagnosed(log(case), block) == diagnosed(log(case))


@pytest.mark.parametrize("rule", [r for r in RULES if r.role != "symptom"], ids=lambda r: r.id)
def test_rule(rule: Rule) -> None:
    found = diagnosed(rule.example)
    assert found.rule == rule.id
    assert found.layer == rule.layer
    expected = {"degraded": "degraded", "hang": "hang"}.get(rule.role, "failed")
    assert found.verdict == expected
    assert found.cause.endswith((".", "!", "?"))
    assert (
        not {"{", "}"} & set(found.cause.replace("{'", "").replace("'}", "")) or "{" in rule.example
    )
    assert found.fix


@pytest.mark.parametrize("rule", [r for r in RULES if r.role == "symptom"], ids=lambda r: r.id)
def test_symptom_is_never_a_cause(rule: Rule) -> None:
    assert diagnosed(rule.example).verdict == "unknown"
    with_cause = diagnosed(f"{rule.example}\nOSError: [Errno 98] Address already in use\n")
    assert (with_cause.verdict, with_cause.layer) == ("failed", "server")
    assert rule.example.strip() in [symptom["text"] for symptom in with_cause.symptoms]


def test_every_rule_is_complete() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.example.strip(), rule.id
        assert rule.role == "symptom" or (rule.cause and rule.fix and rule.layer in LAYERS), rule.id
        assert all(word == word.lower() or word == "userError" for word in rule.words), rule.id


def test_a_wrong_rule_is_named() -> None:
    entry = {"id": "x", "role": "root", "words": ["a"], "pattern": "(", "layer": "kernel"}
    content = {"rule": [entry], "place": [], "stage": [], "silence": [], "absence": {}}
    with pytest.raises(ValueError, match="rule x"):
        parse(content)
    with pytest.raises(ValueError, match="rule x: role root, layer moon"):
        parse({**content, "rule": [{**entry, "pattern": "a", "layer": "moon"}]})


def test_json_has_the_published_fields() -> None:
    fields = diagnosed(log(CASES[0])).as_json()
    assert tuple(fields) == FIELDS
    assert set(fields["evidence"]) == {"file", "line", "text"}


def test_only_the_standard_library_is_loaded() -> None:
    code = (
        "import sys; from glm5lab.serving.doctor import examine; examine([sys.argv[1]]);"
        "names = {n.split('.')[0] for n in sys.modules};"
        "print(sorted(n for n in names if n not in sys.stdlib_module_names and n[0] != '_'))"
    )
    name = str(log.__globals__["FOLDER"] / CASES[0]["file"])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, name], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['glm5lab']"


@pytest.mark.parametrize(
    "rule", [r for r in RULES if r.role in ("root", "late")], ids=lambda rule: rule.id
)
def test_rule_among_the_errors_of_other_ranks(rule: Rule) -> None:
    """One rank has the cause; the front end, the engine and the other ranks only follow."""
    lines = [parse_line(0, line.encode()) for line in rule.example.strip().splitlines()]
    messages = [line.text for line in lines if line.level not in ("INFO", "WARNING")]
    before = [line.whole for line in lines if line.level in ("INFO", "WARNING")]
    stage = "".join(f"{line}\n" for line in before)
    for first in ("", "[rank0]:[W1129 20:13:26.8 TCPStore.cpp:125] [c10d] recvValue failed\n"):
        found = diagnosed(crash(messages, stage, first))
        assert (found.verdict, found.rule, found.layer) == ("failed", rule.id, rule.layer)
        if found.rank is not None and "Worker_TP" in found.rank:
            assert (found.rank, found.pid) == ("Worker_TP3", 1004)
        assert len(found.symptoms) >= 5


def test_a_worker_that_vanished_while_loading() -> None:
    """No traceback of the worker that ended, only of others that lost it: absence is the sign."""
    found = diagnosed(crash([]))
    assert (found.verdict, found.layer, found.stage) == ("failed", "memory", "loading")

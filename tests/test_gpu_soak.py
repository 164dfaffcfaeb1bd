"""`glm5lab backends soak`: what it sends and when it fails; an engine itself needs a GPU."""

import sys
from types import SimpleNamespace

import pytest
from stepped_engine import Engine

from glm5lab.gpu_check import soak


def test_a_soak_fails_on_other_tokens_and_on_rising_memory():
    good = {"answers": 80, "equal": 70, "mean": 0.04, "worst": 0.2}
    flat = {"same": True, "memory_mib": [[10, 1], [90, 1], [100, 4]], "among": good}
    assert not soak.wrong(flat)
    rising = flat | {"memory_mib": [[10, 1], [20, 2], [40, 1], [50, 1], [60, 1]]}
    assert soak.wrong(rising) == ["soak: memory rises from 40 to 60 MiB"]
    assert not soak.wrong(flat | {"memory_mib": [[40, 2], [60, 2]]})
    assert soak.wrong(flat | {"same": False}) == [
        "soak: the fixed sample got other tokens afterwards"
    ]
    for bad in ({"mean": 0.08}, {"worst": 0.6}):
        (line,) = soak.wrong(flat | {"among": good | bad})
        assert line.startswith("soak: answers among other requests have log-probabilities")


def test_equal_figures_are_written_as_runs():
    assert soak.runs([5, 7, 7, 5, 5]) == [[5, 1], [7, 2], [5, 2]]
    assert soak.runs([]) == []


def test_an_answer_among_others_is_judged_by_what_its_tokens_have_alone(monkeypatch):
    logprobs = {7: -0.5, 8: -1.0}
    monkeypatch.setattr(soak, "sample_prompts", lambda: [[1, 2], [3]])

    def alone(engine, tokens, new, **options):
        steps = [{token: SimpleNamespace(logprob=logprobs.get(token))} for token in tokens]
        return SimpleNamespace(prompt_logprobs=steps)

    monkeypatch.setattr(soak, "alone", alone)
    near, far = soak.Answer(0, (7, 8), [-0.5, -1.2]), soak.Answer(1, (8, 8), [-2.0, -3.0])
    found = soak.judged(None, [(7, 8), (7, 7)], [near, far, near])
    assert (found["answers"], found["equal"]) == (3, 2)
    assert found["worst"] == pytest.approx(1.5)
    assert found["mean"] == pytest.approx((0.1 + 1.5 + 0.1) / 3)


def test_a_soak_sends_aborts_and_answers_its_sample_among_others(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 20)
    monkeypatch.setattr(soak, "LONGEST", 50)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    found = soak.soak(SimpleNamespace(llm_engine=Engine()), 300, 0.0)
    assert found["sent"] >= 300
    assert 0 < found["aborted"] == found["sent"] - found["finished"]
    assert found["same"]
    assert found["among"]["answers"] == found["among"]["equal"] >= soak.SAMPLE * 8
    assert (found["among"]["mean"], found["among"]["worst"]) == (0, 0)
    ((mib, samples),) = found["memory_mib"]
    assert mib == 5
    assert samples >= 10
    assert soak.wrong(found) == []

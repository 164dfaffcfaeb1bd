"""Layer 4's proof: the engine agrees with both referees, and no deliberate mistake goes unseen."""

from dataclasses import replace

import numpy as np
import pytest
from check_prompts import prompts_of

from glm5lab.check import engine, run_check
from glm5lab.check.compare import TOLERANCE, compare_case
from glm5lab.check.run import LazyHf
from glm5lab.gguf.part_reader import PartReader
from glm5lab.loading import destinations, transforms

FLOAT32 = TOLERANCE["float32"]


@pytest.fixture(scope="module")
def hf(sample_f32):
    """The HF referee; what it says is kept for every engine that is compared with it."""
    return LazyHf(sample_f32)


@pytest.mark.parametrize(
    "sample",
    [pytest.param("sample_f32", marks=pytest.mark.slow), "sample_share", "sample_mix"],
)
def test_the_engine_agrees_with_both_referees(sample, request):
    file = request.getfixturevalue(sample)

    result = run_check(file)
    print(result.format())
    assert result.ok, result.format()
    assert result.backend == "TRITON_MLA_SPARSE"
    assert result.largest <= 1e-3
    assert [(row.referee, row.prompt) for row in result.rows] == [
        (name, length) for name in ("hf", "llama.cpp") for length in (8, 16, 40, 200)
    ]
    for row in result.rows:
        assert row.rows + len(row.flipped) == row.prompt + 7
        assert row.argmax_equal == row.rows


def test_the_64_most_likely_tokens_are_compared_in_a_large_vocabulary(sample_f32, hf, monkeypatch):
    monkeypatch.setattr(engine, "FULL_VOCABULARY", 100)
    (case,) = prompts_of(sample_f32, [20])
    (ours,), _ = engine.engine_rows(sample_f32, [case], 3, "float32")
    assert ours.logprobs.shape == (22, 64)
    assert (np.diff(ours.logprobs) <= 0).all()
    row = compare_case("hf", ours, hf(ours.case).logprobs, FLOAT32, None)
    assert row.ok, row


def k_b_not_transposed(monkeypatch):
    def join(k_b, v_b):
        heads, rank, nope = k_b.shape
        joined = np.concatenate([k_b.reshape(heads, nope, rank), v_b], axis=1)
        return joined.reshape(-1, rank)

    monkeypatch.setattr(transforms, "join_kv_b", join)


def v_before_k(monkeypatch):
    def join(k_b, v_b):
        joined = np.concatenate([v_b, k_b.transpose(0, 2, 1)], axis=1)
        return joined.reshape(-1, joined.shape[-1])

    monkeypatch.setattr(transforms, "join_kv_b", join)


def drop(monkeypatch, role):
    """The engine gets zeros where the file has this role."""
    original = PartReader.values

    def values(self, part, blocks=None):
        return original(self, part, blocks) * (part.tensor.role != role)

    monkeypatch.setattr(PartReader, "values", values)


def k_norm_bias_dropped(monkeypatch):
    drop(monkeypatch, "indexer.k_norm.bias")


def correction_bias_dropped(monkeypatch):
    drop(monkeypatch, "exp_probs_b.bias")


def gate_and_up_swapped(monkeypatch):
    def copies(model, gguf, *arguments):
        found = original(model, gguf, *arguments)
        swapped = []
        for copy in found:
            name = copy.part.tensor.name
            other = name.replace("gate_exps" if "gate_exps" in name else "up_exps", "SWAP")
            other = other.replace("SWAP", "up_exps" if "gate_exps" in name else "gate_exps")
            part = replace(copy.part, tensor=gguf.tensors[other])
            swapped.append(replace(copy, part=part))
        assert swapped != found  # otherwise the test would prove nothing
        return swapped

    original = destinations.copies
    monkeypatch.setattr("glm5lab.loading.loader.copies", copies)


def indexer_rope_neox(monkeypatch):
    return {"hf_overrides": {"indexer_rope_interleave": False}}


def no_mistake(monkeypatch):
    """The same engine and prompts, to show that only the mistakes make the difference."""


@pytest.mark.parametrize(
    ("mistake", "fails"),
    [
        (no_mistake, ()),
        (k_b_not_transposed, (12, 40)),
        (v_before_k, (12, 40)),
        (gate_and_up_swapped, (12, 40)),
        (correction_bias_dropped, (12, 40)),
        # top-k is 16: a prompt of 12 tokens keeps every key, whatever the indexer says.
        (k_norm_bias_dropped, (40,)),
        (indexer_rope_neox, (40,)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_one_mistake_makes_the_check_fail(sample_f32, hf, monkeypatch, mistake, fails):
    options = mistake(monkeypatch) or {}
    cases = prompts_of(sample_f32, [12, 40])
    # One new token: it is never fed, so the referee's rows do not depend on the mistake.
    ours, _ = engine.engine_rows(sample_f32, cases, 1, "float32", **options)
    assert [side.case for side in ours] == cases
    for side in ours:
        row = compare_case("hf", side, hf(side.case).logprobs, FLOAT32, hf)
        print(f"{mistake.__name__}, {row.prompt} tokens: max |dlogprob| {row.largest:.1e}")
        if row.prompt in fails:
            assert not row.ok
            assert not row.flipped
            assert row.largest > 0.1
            assert len(row.wrong) >= 10
        else:
            assert row.ok
            assert row.largest <= FLOAT32.logprob

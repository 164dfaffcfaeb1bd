"""Layer 4's proof: HF transformers and llama.cpp agree with each other, and fail clearly."""

import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
from check_prompts import prompts_of

from glm5lab.check.cases import Candidates, Case
from glm5lab.check.compare import TOLERANCE, Tolerance, compare_case, differences
from glm5lab.check.hf import HfReferee
from glm5lab.check.llamacpp import LlamaCppReferee
from glm5lab.errors import CheckError, InputError

FLOAT32 = TOLERANCE["float32"]


@pytest.mark.parametrize("sample", ["sample_f32", "sample_share", "sample_mix", "sample_mtp"])
def test_hf_and_llama_cpp_agree(sample, request):
    file = request.getfixturevalue(sample)
    cases = [replace(case, forced=case.prompt[:5]) for case in prompts_of(file, [8, 40, 200])]
    theirs = LlamaCppReferee(file).judge_all(cases)
    hf = HfReferee(file)
    for case, logprobs in zip(cases, theirs, strict=True):
        row = compare_case(
            "llama.cpp", Candidates.of(case, logprobs), hf.judge(case).logprobs, FLOAT32, hf.judge
        )
        assert row.ok, row
        assert row.rows + len(row.flipped) == len(case.ids)
        assert row.largest <= 1e-3
        assert row.argmax_equal == row.rows


def test_hf_incremental_decoding_equals_one_prefill(sample_f32):
    hf = HfReferee(sample_f32)
    (case,) = prompts_of(sample_f32, [40])
    split = Case(case.prompt[:30], case.prompt[30:])
    np.testing.assert_allclose(hf.judge(split).logprobs, hf.judge(case).logprobs, atol=1e-4)


def test_flipping_the_closest_tie_explains_a_row_and_what_follows(sample_f32):
    hf = HfReferee(sample_f32)
    (case,) = prompts_of(sample_f32, [60])
    plain = hf.judge(case)
    assert all(choice.row >= 16 for choice in plain.gaps if choice.kind == "indexer")
    choice, gap = min(
        ((c, g) for c, g in plain.gaps.items() if c.kind == "indexer"), key=lambda item: item[1]
    )
    other = Candidates.of(case, hf.judge(case, [choice]).logprobs)
    moved = differences(other, plain.logprobs).beyond(FLOAT32)
    assert moved.min() == choice.row

    wide = Tolerance(FLOAT32.logprob, tie=gap * 1.01)
    row = compare_case("hf", other, plain.logprobs, wide, hf.judge)
    assert row.ok
    assert [flip.position for flip in row.flipped] == moved.tolist()
    first = row.flipped[0]
    assert (first.tie_position, first.layer, first.kind) == (choice.row, choice.layer, "indexer")

    narrow = Tolerance(FLOAT32.logprob, tie=gap * 0.99)
    row = compare_case("hf", other, plain.logprobs, narrow, hf.judge)
    assert not row.ok
    assert not row.flipped
    assert [wrong.position for wrong in row.wrong] == moved.tolist()


def test_llama_cpp_that_aborts_is_reported(sample_f32, tmp_path):
    content = sample_f32.read_bytes()
    key = b"glm-dsa.attention.key_length" + struct.pack("<I", 4)
    assert content.count(key) == 1
    at = content.index(key) + len(key)
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(content[:at] + struct.pack("<I", 256) + content[at + 4 :])
    with pytest.raises(CheckError) as caught:
        LlamaCppReferee(wrong).judge_all([Case((1, 2, 3))])
    assert "wrong.gguf: llama.cpp was ended by SIGABRT" in str(caught.value)
    assert "GGML_ASSERT" in str(caught.value)


def test_llama_cpp_that_hangs_is_ended(sample_f32):
    with pytest.raises(CheckError, match=r"gave no answer within 0 s"):
        LlamaCppReferee(sample_f32, timeout_s=0.05).judge_all([Case((1, 2, 3))])


def test_the_float32_copy_needs_room(sample_mix, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("glm5lab.check.f32_gguf.shutil.disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="set TMPDIR to a larger disk"):
        LlamaCppReferee(sample_mix).judge_all([Case((1, 2, 3))])


@pytest.mark.parametrize(
    ("referee", "package"), [("hf", "transformers"), ("llama.cpp", "xllamacpp")]
)
def test_a_missing_package_is_named(sample_f32, monkeypatch, referee, package):
    from glm5lab.check import run_check

    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckError, match=f"pip install {package}"):
        run_check(sample_f32, against=[referee])


def test_arguments_are_checked(sample_f32):
    from glm5lab.check import run_check

    with pytest.raises(InputError, match="no such referee: ollama"):
        run_check(sample_f32, against=["ollama"])
    with pytest.raises(InputError, match="bfloat16 cannot be checked"):
        run_check(sample_f32, dtype="bfloat16")
    with pytest.raises(InputError, match="prompts"):
        run_check(sample_f32, prompts=[0])

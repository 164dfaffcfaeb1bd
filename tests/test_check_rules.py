"""Layer 4's proof: the rules of a check, on made-up rows."""

from dataclasses import replace

import numpy as np
import pytest

from glm5lab.check.cases import Candidates, Case, log_softmax, random_prompts
from glm5lab.check.compare import TOLERANCE, compare_case
from glm5lab.check.hf import Choice, Judgement
from glm5lab.check.report import SHOWN, CheckReport, WrongRow

FLOAT32 = TOLERANCE["float32"]
VOCAB = 32


def synthetic(rows=20, seed=0):
    """A case and random log-probabilities for it."""
    rng = np.random.default_rng(seed)
    return Case(tuple(range(rows))), log_softmax(rng.normal(size=(rows, VOCAB)))


class FakeHf:
    """Rows that change where a swap is asked for; ties where told."""

    def __init__(self, logprobs, gaps=None, swapped=None):
        self.logprobs, self.gaps, self.swapped = logprobs, gaps or {}, swapped or {}

    def __call__(self, case, swaps=()):
        rows = self.logprobs.copy()
        for choice in swaps:
            for row, values in self.swapped.get(choice, {}).items():
                rows[row] = values
        return Judgement(rows, self.gaps)


def test_equal_rows_agree_also_with_few_candidates():
    case, logprobs = synthetic()
    for top in (None, 4):
        row = compare_case("hf", Candidates.of(case, logprobs, top), logprobs, FLOAT32, None)
        assert (row.ok, row.rows, row.argmax_equal, row.largest) == (True, 20, 20, 0.0)


def test_a_shifted_row_fails():
    case, logprobs = synthetic()
    ours = logprobs.copy()
    ours[7] += 2e-3
    row = compare_case("hf", Candidates.of(case, ours), logprobs, FLOAT32, FakeHf(logprobs))
    assert not row.ok
    assert [wrong.position for wrong in row.wrong] == [7]
    assert row.argmax_equal == 20


def two_most_likely_tokens(gap):
    """Row 3 with its two most likely tokens `gap` apart, and the engine's with the other first."""
    case, logprobs = synthetic()
    order = np.argsort(-logprobs[3])
    logprobs[3, order[0]] = logprobs[3, order[1]] + gap
    ours = logprobs.copy()
    ours[3, order[1]] += 2 * gap
    return case, logprobs, ours


def test_an_argmax_tie_is_listed_and_excused():
    case, logprobs, ours = two_most_likely_tokens(gap=1e-5)
    row = compare_case("llama.cpp", Candidates.of(case, ours), logprobs, FLOAT32, None)
    assert row.ok
    assert (row.rows, row.argmax_equal) == (19, 19)
    assert [(flip.position, flip.kind, flip.layer) for flip in row.flipped] == [(3, "argmax", None)]
    assert 0 < row.flipped[0].gap < FLOAT32.tie
    assert "row 3: 2.0e-05, argmax tie, gap " in report(row).format()


def test_another_argmax_fails_even_within_the_tolerance():
    case, logprobs, ours = two_most_likely_tokens(gap=4e-4)
    row = compare_case("hf", Candidates.of(case, ours), logprobs, FLOAT32, FakeHf(logprobs))
    assert not row.ok
    assert row.wrong == (WrongRow(3, row.wrong[0].largest, argmax_equal=False),)
    assert row.wrong[0].largest < FLOAT32.logprob


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["engine", "referee"])
def test_a_value_that_is_no_number_fails(bad, side):
    case, logprobs = synthetic()
    ours, theirs = logprobs.copy(), logprobs.copy()
    (ours if side == "engine" else theirs)[5, 9] = bad
    row = compare_case("hf", Candidates.of(case, ours), theirs, FLOAT32, FakeHf(theirs))
    assert not row.ok
    assert [wrong.position for wrong in row.wrong] == [5]


@pytest.mark.parametrize("side", ["engine", "referee"])
def test_missing_rows_fail(side):
    case, logprobs = synthetic()
    ours = Candidates.of(case, logprobs)
    theirs = logprobs
    if side == "engine":
        ours = replace(ours, tokens=ours.tokens[:-2], logprobs=ours.logprobs[:-2])
    else:
        theirs = logprobs[:-2]
    row = compare_case("hf", ours, theirs, FLOAT32, FakeHf(theirs))
    assert not row.ok
    assert [wrong.position for wrong in row.wrong] == [18, 19]


def test_another_vocabulary_fails():
    case, logprobs = synthetic()
    row = compare_case("hf", Candidates.of(case, logprobs[:, :-1]), logprobs, FLOAT32, None)
    assert len(row.wrong) == 20


CHOICE = Choice(row=9, layer=2, kind="indexer")


def flipped_case():
    """The engine decided a tie at row 9 the other way, which changes rows 9 and 12."""
    case, logprobs = synthetic()
    _, other = synthetic(seed=1)
    changed = {9: other[9], 12: other[12]}
    ours = logprobs.copy()
    for at, values in changed.items():
        ours[at] = values
    return case, logprobs, ours, {CHOICE: changed}


def test_a_tie_is_listed_and_excused():
    case, logprobs, ours, swapped = flipped_case()
    hf = FakeHf(logprobs, {CHOICE: 1e-7}, swapped)
    row = compare_case("hf", Candidates.of(case, ours), logprobs, FLOAT32, hf)
    assert row.ok
    assert (row.rows, row.argmax_equal, row.largest) == (18, 18, 0.0)
    assert [(f.position, f.tie_position, f.layer, f.gap) for f in row.flipped] == [
        (9, 9, 2, 1e-7),
        (12, 9, 2, 1e-7),
    ]


@pytest.mark.parametrize(
    ("gap", "reproduces", "at"),
    [(1e-3, True, 9), (1e-7, False, 9), (1e-7, True, 10), (1e-7, True, 8)],
    ids=["gap-too-wide", "flip-gives-other-rows", "tie-after-the-row", "tie-at-another-row"],
)
def test_what_does_not_excuse(gap, reproduces, at):
    case, logprobs, ours, swapped = flipped_case()
    choice = replace(CHOICE, row=at)
    hf = FakeHf(logprobs, {choice: gap}, {choice: swapped[CHOICE]} if reproduces else {})
    row = compare_case("hf", Candidates.of(case, ours), logprobs, FLOAT32, hf)
    assert not row.ok
    assert not row.flipped
    assert [wrong.position for wrong in row.wrong] == [9, 12]


def test_a_tie_does_not_excuse_another_mistake():
    case, logprobs, ours, swapped = flipped_case()
    ours[15] += 0.1
    hf = FakeHf(logprobs, {CHOICE: 1e-7}, swapped)
    row = compare_case("hf", Candidates.of(case, ours), logprobs, FLOAT32, hf)
    assert not row.ok
    assert [wrong.position for wrong in row.wrong] == [9, 12, 15]


def test_llama_cpp_may_be_the_side_that_flips():
    case, logprobs, theirs, swapped = flipped_case()
    hf = FakeHf(logprobs, {CHOICE: 1e-7}, swapped)
    ours = Candidates.of(case, logprobs)
    row = compare_case("llama.cpp", ours, theirs, FLOAT32, hf)
    assert row.ok
    assert [flip.position for flip in row.flipped] == [9, 12]
    assert not compare_case("llama.cpp", ours, theirs, FLOAT32, None).ok
    assert not compare_case("llama.cpp", ours, theirs, FLOAT32, FakeHf(logprobs)).ok


def report(*rows):
    return CheckReport("f.gguf", "float32", "TRITON_MLA_SPARSE", 1e-3, 1e-5, 16, rows)


def test_report():
    case, logprobs, ours, swapped = flipped_case()
    good = compare_case("llama.cpp", Candidates.of(case, logprobs), logprobs, FLOAT32, None)
    hf = FakeHf(logprobs, {CHOICE: 1e-7}, swapped)
    tie = compare_case("hf", Candidates.of(case, ours), logprobs, FLOAT32, hf)
    wrong = compare_case("hf", Candidates.of(case, ours + 1), logprobs, FLOAT32, None)
    assert report(good, tie).ok
    assert report(good, tie).to_dict()["flipped"] == 2
    assert "indexer tie in layer 2 at row 9" in report(good, tie).format()
    assert not report(good, wrong).ok
    assert not report().ok
    text = report(good, tie, wrong).format()
    assert text.count("  WRONG:") == SHOWN
    assert f"... and {20 - SHOWN} more" in text
    assert text.splitlines()[-1].startswith("DISAGREE")
    assert max(map(len, text.splitlines())) <= 100


def test_prompts_depend_on_length_and_seed_only():
    tokens = list(range(5, 500))
    a, b = random_prompts(tokens, [8, 40], 0), random_prompts(tokens, [40], 0)
    assert a[1] == b[0]
    assert len(a[0].prompt) == 8
    assert a[1] != random_prompts(tokens, [40], 1)[0]
    assert set(a[1].prompt) <= set(tokens)


def test_a_file_without_dimensions_is_unusable_input(tmp_path):
    import gguf

    from glm5lab.check import run_check
    from glm5lab.errors import InputError

    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "glm-dsa")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match="metadata key"):
        run_check(tmp_path / "bare.gguf")

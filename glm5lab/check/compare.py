"""The rules of a check: when rows agree, and which disagreement a near-tie excuses.

A row agrees when the argmax is the same token and no log-probability differs by more than the
tolerance. A row that does not agree is excused only by proof: the HF referee had a top-k choice
there (a key that the indexer keeps, or an expert) closer than `tie`, and with the runner-up taken
at that one choice its rows agree, the later rows that the changed row feeds included. The choice of
the most likely token is a choice too: where the referee has the two closer than `tie`, either may
win. Every excused row is listed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from glm5lab.check.cases import Candidates, Case
from glm5lab.check.hf import Choice, Judgement
from glm5lab.check.report import FlippedRow, ReportRow, WrongRow


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal.

    Attributes:
        logprob: largest difference of a log-probability.
        tie: distance of a winner and a runner-up, relative to the largest score they compete with,
            below which either may win.
    """

    logprob: float
    tie: float


# The one place where tolerances are stated, by the engine's dtype; referees are always float32.
# There is no bfloat16 row: rounding to 8 bits decides so many expert and indexer choices the other
# way (17 of 23 rows at 16 tokens of a random model) that agreement would prove nothing.
TOLERANCE = {"float32": Tolerance(logprob=1e-3, tie=1e-5)}
MAX_FLIPS = 8  # near-ties followed up in one prompt

Judge = Callable[[Case, Sequence[Choice]], Judgement]


@dataclass(frozen=True)
class Differences:
    """Engine against referee, a number a row.

    Attributes:
        largest: float [rows], max |dlogprob| over the candidates; NaN where a row is missing.
        mean: float [rows].
        argmax_equal: bool [rows].
        argmax_gap: float [rows], how far the engine's most likely token lies below the referee's,
            at the referee and relative to its largest |logprob|; 0 where they are the same.
    """

    largest: np.ndarray
    mean: np.ndarray
    argmax_equal: np.ndarray
    argmax_gap: np.ndarray

    def beyond(self, tolerance: Tolerance) -> np.ndarray:
        """Rows that do not agree, int [n]; NaN never agrees."""
        argmax = self.argmax_equal | (self.argmax_gap < tolerance.tie)
        return np.flatnonzero(~((self.largest <= tolerance.logprob) & argmax))


def differences(ours: Candidates, referee: np.ndarray) -> Differences:
    """Compares the candidates of every row of the case with the referee's [rows, vocab]."""
    rows = len(ours.case.ids)
    have = min(rows, len(ours.logprobs), len(referee))
    largest = np.full(rows, np.nan)
    mean = np.full(rows, np.nan)
    gap = np.full(rows, np.nan)
    equal = np.zeros(rows, bool)
    if have and referee.shape[-1] == ours.vocab_size and ours.tokens.shape[-1]:
        a = ours.logprobs[:have].astype(np.float64)
        b = np.take_along_axis(referee[:have], ours.tokens[:have], axis=1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            delta = np.where(a == b, 0.0, np.abs(a - b))  # two -inf are equal
        largest[:have], mean[:have] = delta.max(1), delta.mean(1)
        at = a.argmax(1)[:, None]
        equal[:have] = np.take_along_axis(ours.tokens[:have], at, 1)[:, 0] == referee[:have].argmax(
            1
        )
        scale = np.where(np.isfinite(referee[:have]), np.abs(referee[:have]), 0.0).max(1)
        below = referee[:have].max(1) - np.take_along_axis(b, at, 1)[:, 0]
        gap[:have] = below / np.maximum(scale, 1e-30)
    return Differences(largest, mean, equal, gap)


@dataclass(frozen=True)
class Flip:
    """One top-k choice that the other side decided the other way."""

    choice: Choice
    gap: float


def follow_ties(
    ours: Candidates, judge: Judge, tolerance: Tolerance
) -> tuple[list[Flip], np.ndarray]:
    """Explains differing rows by near-ties of the HF referee, first row first.

    Returns:
        The flips under which the referee's rows equal ours, and the rows (int [n]) that differ
        even so: empty when everything is explained.
    """
    flips: list[Flip] = []
    judgement = judge(ours.case, ())
    while len(bad := differences(ours, judgement.logprobs).beyond(tolerance)):
        taken = [flip.choice for flip in flips]
        near = [t for t in judgement.ties(int(bad[0]), tolerance.tie) if t[0] not in taken]
        for choice, gap in near if len(flips) < MAX_FLIPS else []:
            trial = judge(ours.case, [*taken, choice])
            if bad[0] not in differences(ours, trial.logprobs).beyond(tolerance):
                flips.append(Flip(choice, gap))
                judgement = trial
                break
        else:
            return flips, bad
    return flips, bad


def compare_case(
    name: str,
    ours: Candidates,
    referee: np.ndarray,
    tolerance: Tolerance,
    judge: Judge | None,
) -> ReportRow:
    """One line of the report.

    Args:
        name: the referee, "hf" or "llama.cpp".
        ours: the engine's rows.
        referee: float32 [rows, vocab], that referee's rows.
        tolerance: what counts as equal.
        judge: the HF referee, whose near-ties may excuse a row; None excuses nothing.
    """
    found = differences(ours, referee)
    bad = found.beyond(tolerance)
    flips: list[Flip] = []
    if len(bad) and judge is not None:
        flips, left = follow_ties(ours, judge, tolerance)
        if name != "hf" and not len(left):
            # Either side may have decided the tie against the HF referee.
            more, left = follow_ties(Candidates.of(ours.case, referee), judge, tolerance)
            flips = sorted({*flips, *more}, key=lambda flip: flip.choice)
        if len(left):
            flips = []
    first = min((flip.choice.row for flip in flips), default=None)
    moved = [int(r) for r in bad if first is not None and r >= first]
    tied = np.setdiff1d(np.flatnonzero(~found.argmax_equal), bad).tolist()
    excused = sorted(moved + tied)
    counted = np.setdiff1d(np.arange(len(found.largest)), excused)
    return ReportRow(
        referee=name,
        prompt=len(ours.case.prompt),
        rows=len(counted),
        argmax_equal=int(found.argmax_equal[counted].sum()),
        largest=float(found.largest[counted].max()) if len(counted) else 0.0,
        mean=float(found.mean[counted].mean()) if len(counted) else 0.0,
        flipped=tuple(flipped_row(r, flips if r in moved else [], found) for r in excused),
        wrong=tuple(
            WrongRow(int(r), float(found.largest[r]), bool(found.argmax_equal[r]))
            for r in bad
            if int(r) not in excused
        ),
    )


def flipped_row(row: int, flips: list[Flip], found: Differences) -> FlippedRow:
    """An excused row with the tie that moved it: the last of `flips`, or that of its argmax."""
    if not flips:
        gap = float(found.argmax_gap[row])
        return FlippedRow(row, row, None, "argmax", gap, float(found.largest[row]))
    flip = max((f for f in flips if f.choice.row <= row), key=lambda f: f.choice.row)
    return FlippedRow(
        position=row,
        tie_position=flip.choice.row,
        layer=flip.choice.layer,
        kind=flip.choice.kind,
        gap=flip.gap,
        largest=float(found.largest[row]),
    )

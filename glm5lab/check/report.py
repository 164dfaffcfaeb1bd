"""What a check found: the table, the flipped rows one by one, and the verdict."""

from dataclasses import asdict, dataclass
from typing import Any

SHOWN = 10  # rows listed one by one


@dataclass(frozen=True)
class FlippedRow:
    """A differing row that is excused, because a near-tie was decided the other way.

    Attributes:
        position: the row.
        tie_position: the row of the tie; an earlier one when its keys fed this row.
        layer, kind: where the tie was: in the "indexer", in the choice of an "expert", or between
            the two most likely tokens ("argmax", no layer).
        gap: relative distance of winner and runner-up at the HF referee.
        largest: max |dlogprob| of the row.
    """

    position: int
    tie_position: int
    layer: int | None
    kind: str
    gap: float
    largest: float


@dataclass(frozen=True)
class WrongRow:
    """A differing row that nothing excuses."""

    position: int
    largest: float
    argmax_equal: bool


@dataclass(frozen=True)
class ReportRow:
    """One prompt against one referee.

    Attributes:
        referee: "hf" or "llama.cpp".
        prompt: tokens of the prompt.
        rows: rows compared, flipped ones left out.
        argmax_equal: of these, rows with the same most likely token.
        largest, mean: |dlogprob| over these rows.
        flipped: excused rows.
        wrong: rows beyond the tolerance.
    """

    referee: str
    prompt: int
    rows: int
    argmax_equal: int
    largest: float
    mean: float
    flipped: tuple[FlippedRow, ...] = ()
    wrong: tuple[WrongRow, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether rows were compared and every one agrees or is excused."""
        return self.rows > 0 and not self.wrong


@dataclass(frozen=True)
class CheckReport:
    """Result of `run_check`.

    Attributes:
        file: what was checked.
        dtype: the engine's.
        backend: the attention backend that the engine selected.
        tolerance: largest |dlogprob| that counts as equal.
        tie: relative gap below which a top-k choice may go either way.
        top_k: keys that the indexer keeps; longer prompts test it.
        rows: one entry a referee and prompt.
    """

    file: str
    dtype: str
    backend: str
    tolerance: float
    tie: float
    top_k: int
    rows: tuple[ReportRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every row of every referee agrees or is excused; False without any row."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def largest(self) -> float:
        """Max |dlogprob| over all rows that were not flipped."""
        # A NaN counts as the largest of all.
        return max((row.largest for row in self.rows), key=lambda x: (x != x, x), default=0.0)

    @property
    def flipped(self) -> int:
        """How many rows are excused by near-ties."""
        return sum(len(row.flipped) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "ok": self.ok, "largest": self.largest, "flipped": self.flipped}

    def summary(self) -> str:
        """The verdict in one line."""
        rows = sum(row.rows for row in self.rows)
        equal = sum(row.argmax_equal for row in self.rows)
        verdict = "agree" if self.ok else "DISAGREE"
        flipped = f", {self.flipped} flipped by ties" if self.flipped else ""
        return (
            f"{verdict}: argmax equal {equal}/{rows}, max |dlogprob| {self.largest:.1e} "
            f"(tolerance {self.tolerance:g}){flipped}"
        )

    def format(self) -> str:
        """The table, at most 100 columns wide."""
        lines = [
            f"{self.backend} in {self.dtype} against float32 referees; "
            f"tolerance {self.tolerance:g}, top-k {self.top_k}",
            f"{'referee':<10} {'prompt':>7} {'rows':>6} {'argmax':>9} {'max |dlogprob|':>15} "
            f"{'mean':>9} {'flipped':>8}  ",
        ]
        for row in self.rows:
            argmax = f"{row.argmax_equal}/{row.rows}"
            lines.append(
                f"{row.referee:<10} {row.prompt:>7} {row.rows:>6} {argmax:>9} "
                f"{row.largest:>15.1e} {row.mean:>9.1e} {len(row.flipped):>8}  "
                f"{'ok' if row.ok else 'WRONG'}"
            )
        for row in self.rows:
            lines += listed([flipped_line(row, f) for f in row.flipped])
            lines += listed([wrong_line(row, w) for w in row.wrong])
        return "\n".join([line.rstrip() for line in lines] + [self.summary()])


def listed(lines: list[str]) -> list[str]:
    """At most SHOWN lines, then how many more."""
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"  ... and {more} more"]


def flipped_line(row: ReportRow, flip: FlippedRow) -> str:
    """One excused row in words."""
    where = "" if flip.layer is None else f" in layer {flip.layer}"
    where += "" if flip.tie_position == flip.position else f" at row {flip.tie_position}"
    return (
        f"  flipped: {row.referee}, prompt {row.prompt}, row {flip.position}: {flip.largest:.1e}, "
        f"{flip.kind} tie{where}, gap {flip.gap:.0e}"
    )


def wrong_line(row: ReportRow, wrong: WrongRow) -> str:
    """One wrong row in words."""
    argmax = "same" if wrong.argmax_equal else "another"
    return (
        f"  WRONG: {row.referee}, prompt {row.prompt}, row {wrong.position}: "
        f"{wrong.largest:.1e}, {argmax} most likely token"
    )

"""What a diagnosis is made of."""

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["failed", "hang", "degraded", "healthy", "unknown"]
FIELDS = (
    "verdict", "stage", "layer", "cause", "rank", "pid", "evidence", "fix", "confirm", "symptoms",
    "confidence",
)  # fmt: skip


@dataclass
class Diagnosis:
    """A verdict and what it rests on; `as_json` is what `--json` prints.

    Attributes:
        verdict: failed, hang, degraded, healthy or unknown.
        stage: how far the start had come.
        layer: where the cause lies; None where there is none, or none is known.
        cause: the cause in a sentence.
        rank: the process as the log names it.
        evidence: file, line and text of the line that shows the cause.
        fix, confirm: what to do, and a command that shows whether it is so.
        symptoms: other errors, which only follow from it: as evidence, with a rank.
        confidence: 0 to 1.
        rule: the rule that matched.
        reasons: of each attention backend, why it was refused.
        weight: how well the cause is known, to choose between several; 0 for no failure.
        time: of the evidence, `MM-DD HH:MM:SS`.
    """

    verdict: Verdict
    stage: str | None
    cause: str
    layer: str | None = None
    rank: str | None = None
    pid: int | None = None
    evidence: dict[str, Any] | None = None
    fix: str = ""
    confirm: str = ""
    symptoms: list[dict[str, Any]] = field(default_factory=list)
    confidence: float = 0.0
    rule: str | None = None
    reasons: list[tuple[str, str]] = field(default_factory=list)
    weight: int = 0
    time: str = ""

    def as_json(self) -> dict[str, Any]:
        """The published fields."""
        return {name: getattr(self, name) for name in FIELDS}

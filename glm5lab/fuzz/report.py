"""What came of all cases, and which of them failed.

A case fails when it raises anything but our error class, takes more than SLOW_S of processor time
(or STALLED_S by the clock: machines are busy), ends its process, leaves a file open, or when its
process needs more than LIMIT_MB.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from glm5lab.fuzz.case import SLOW_S, STALLED_S, Outcome

LIMIT_MB = 500.0
SHOWN = 10


@dataclass
class FuzzReport:
    """The sum of all cases.

    Attributes:
        cases: how many ran.
        by_kind: mutation -> Counter of what came of it: stage reached and error.
        slowest: the case that took most processor time.
        mb: highest peak memory of any child.
        handles: files left open, all cases together.
        failures: the cases that failed, with the reason.
        seconds: wall clock of the whole run.
    """

    seed: int
    cases: int = 0
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: Outcome | None = None
    mb: float = 0.0
    handles: int = 0
    failures: list[tuple[Outcome, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether cases ran and none failed."""
        return self.cases > 0 and not self.failures

    def add(self, outcome: Outcome) -> None:
        """Count one case."""
        self.cases += 1
        label = f"{outcome.error} at {outcome.stage}" if outcome.error else "read"
        self.by_kind.setdefault(outcome.kind, Counter())[label] += 1
        if self.slowest is None or outcome.cpu_s > self.slowest.cpu_s:
            self.slowest = outcome
        self.mb = max(self.mb, outcome.mb)
        self.handles += outcome.handles
        if reason := _reason(outcome):
            self.failures.append((outcome, reason))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "seed": self.seed,
            "cases": self.cases,
            "by_kind": {k: dict(v.most_common()) for k, v in sorted(self.by_kind.items())},
            "slowest": self.slowest.to_json() if self.slowest else None,
            "peak_mb": round(self.mb, 1),
            "open_handles": self.handles,
            "seconds": round(self.seconds, 1),
            "failures": [o.to_json() | {"reason": reason} for o, reason in self.failures],
            "limits": {"seconds": SLOW_S, "mb": LIMIT_MB},
            "ok": self.ok,
        }


def _reason(o: Outcome) -> str:
    """Why a case failed; "" when it did not."""
    if not o.expected:
        return f"{o.error} at {o.stage}: {o.detail}"
    if o.cpu_s > SLOW_S or o.seconds > STALLED_S:
        return f"took {o.seconds:.1f} s ({o.cpu_s:.1f} s of processor time)"
    if o.handles > 0:
        return f"left {o.handles} files open"
    if o.mb > LIMIT_MB:
        return f"needed {o.mb:.0f} MB"
    return ""


def fuzz_text(report: FuzzReport) -> str:
    """The report in lines: a table by kind of damage, extremes, failures."""
    labels = sorted({label for counts in report.by_kind.values() for label in counts})
    order = ["read", *[x for x in labels if x != "read"]]
    width = max([len(kind) for kind in report.by_kind] + [6])
    lines = [f"{report.cases:,} cases in {report.seconds:.0f} s, seed {report.seed}"]
    for kind, counts in sorted(report.by_kind.items()):
        shown = ", ".join(f"{counts[x]:,} {x}" for x in order if counts[x])
        lines.append(f"{kind:{width}}  {counts.total():6,}: {shown}")
    total: Counter[str] = sum(report.by_kind.values(), Counter())
    shown = ", ".join(f"{total[x]:,} {x}" for x in order if total[x])
    lines.append(f"{'all':{width}}  {report.cases:6,}: {shown}")
    if report.slowest is not None:
        s = report.slowest
        lines.append(
            f"slowest: case {s.index} ({s.kind}, {s.stage}) {s.cpu_s:.2f} s, "
            f"{s.seconds:.2f} s by the clock"
        )
    lines.append(f"peak memory {report.mb:.0f} MB, {report.handles} file handles left open")
    for outcome, reason in report.failures[:SHOWN]:
        lines.append(f"FAILED case {outcome.index} ({outcome.kind}): {reason}")
    more = len(report.failures) - SHOWN
    lines += [f"and {more} more failures"] if more > 0 else []
    kept = "kept" if report.ok else f"MISSED by {len(report.failures)} cases"
    kept = kept if report.cases else "not tried"
    lines.append(f"limits: our errors only, {SLOW_S:g} s, {LIMIT_MB:.0f} MB, no handles: {kept}")
    return "\n".join(lines)

"""From what a scan kept to a verdict: the first failure that explains the others."""

import re
from collections.abc import Sequence
from typing import Any

from glm5lab.serving.doctor.events import Event, Run, Scan
from glm5lab.serving.doctor.rules import book
from glm5lab.serving.doctor.stuck import stall, unfinished, vanished, waited_for
from glm5lab.serving.doctor.verdict import Diagnosis
from glm5lab.serving.doctor.wording import DURING, evidence, filled, safe

WEIGHTS = {"root": 30, "late": 20, "unknown": 20, "weak": 10}
SURVIVED = 5
CONFIDENCE = {"root": 0.95, "late": 0.75, "weak": 0.5, "unknown": 0.2}
GRAVITY = {"failed": 0, "hang": 1, "unknown": 2, "degraded": 3, "healthy": 4}
MOST_SYMPTOMS = 20
BACKEND = re.compile(r"(\w+): \[([^\]]*)\]")


def diagnose(scans: Sequence[Scan]) -> Diagnosis:
    """One verdict for the logs of one server: the gravest, and of equal ones the earliest."""
    found = [_of_scan(scan) for scan in scans]
    # A worker's log alone never says that the server is ready.
    if any(d.verdict == "healthy" for d in found):
        found = [d for d in found if d.verdict != "unknown" or d.weight]
    return min(found, key=lambda d: (GRAVITY[d.verdict], -d.weight, d.time or "99"))


def _of_scan(scan: Scan) -> Diagnosis:
    """The first run that failed counts, or a later one if only that says why."""
    results = [_of_run(scan, run) for run in scan.runs]
    last = results[-1]
    bad = [d for d in results if d.weight and d.verdict in ("failed", "hang", "unknown")]
    if not bad:
        return last
    best = max(bad, key=lambda d: d.verdict != "unknown")
    if last.verdict == "healthy":
        best.verdict = "degraded"
        best.cause = f"The server runs again after a restart; before, it failed: {best.cause}"
    return best


def _of_run(scan: Scan, run: Run) -> Diagnosis:
    live = [e for e in run.events if not _overcome(run, e)]
    fatal = [e for e in live if e.rule is not None and e.rule.fatal]
    # A request that fails for a reason that no rule knows does not end a server that is ready.
    known = [e for e in live if e.role != "unknown" or fatal or not run.ready]
    causes = [e for e in known if e.role in WEIGHTS]
    grave = [e.number for e in causes if WEIGHTS[e.role] > WEIGHTS["weak"]]
    if found := stall(scan, run, min(grave, default=0)):
        return _failure(scan, run, found, "hang") if isinstance(found, Event) else found
    if causes:
        best = min(causes, key=lambda e: (-_weight(scan, run, e), _doubt(e), e.number))
        if stood := waited_for(scan, run, best):
            return stood
        lost = best.role == "weak" and best.layer == "distributed"
        return (vanished(scan, run, fatal) if lost else None) or _failure(scan, run, best)
    if fatal:
        return vanished(scan, run, fatal) or _failure(scan, run, fatal[0])
    return _unfailed(scan, run)


def _overcome(run: Run, event: Event) -> bool:
    """The server went on after it, or it belongs to a shutdown that somebody asked for."""
    if run.shutdown and event.number > run.shutdown:
        return True
    if event.role in ("degraded", "hang"):
        return False
    # What happened while it started did not keep it from becoming ready; nor did a request that
    # failed keep it from answering the next.
    if event.number < run.ready:
        return True
    return run.fatal < event.number and max(run.progress, run.posts) > event.number


def _weight(scan: Scan, run: Run, event: Event) -> int:
    """How well it explains an end; little where the front end went on after it.

    That is so of threads for statistics, of plugins, of what Python ignores. A worker's error is
    followed by lines of others, which prove nothing; and what a rule knows without a process may
    be a worker's.
    """
    name = scan.process(event)[0]
    if name is None:
        may = event.role == "unknown"
    else:
        may = event.role in ("unknown", "late") and name.lower().startswith("apiserver")
    survived = may and event.number < max(run.advanced, run.progress, run.posts)
    return SURVIVED if survived else WEIGHTS[event.role]


def _doubt(event: Event) -> bool:
    """An error line without an exception that no rule knows says least."""
    return event.rule is None and not event.exception


def _failure(scan: Scan, run: Run, event: Event, verdict: str = "failed") -> Diagnosis:
    """The diagnosis that rests on an event."""
    blamed = verdict == "failed"
    rank, pid = _blamed(scan, run, event) if blamed else (None, None)
    result = Diagnosis(
        "failed",
        "serving" if event.stage == "ready" else event.stage or None,
        "",
        rank=rank,
        pid=pid,
        evidence=evidence(scan, event.line, event),
        symptoms=_symptoms(scan, run, event),
        confidence=CONFIDENCE.get(event.role, 0.1) if blamed else 0.8,
        weight=WEIGHTS.get(event.role, 5),
        time=event.line.time,
    )
    if event.rule is None or event.rule.role == "symptom":
        return _unknown(result, event)
    if verdict == "hang":
        result.verdict = "hang"
    elif verdict == "degraded":
        result.verdict, result.stage, result.weight = "degraded", "serving", 0
    groups = {**event.groups, "during": DURING.get(event.stage, "")}
    if reasons := BACKEND.findall(groups.get("reasons", "")):
        result.reasons = [(name, safe(why)) for name, why in reasons]
        groups["reasons"] = "; ".join(f"{name} ({why})" for name, why in reasons)
    rule = event.rule
    result.layer, result.rule, result.confirm = rule.layer, rule.id, rule.confirm
    result.cause, result.fix = filled(rule.cause, groups), filled(rule.fix, groups)
    return result


def _unknown(result: Diagnosis, event: Event) -> Diagnosis:
    """No rule says why: the evidence, and the layer where it was raised."""
    result.verdict, result.layer = "unknown", book().place(event.frames)
    what = "No rule knows this error"
    if event.rule is not None:
        what = "Only errors that follow from another are in the log"
    where = safe(event.frames.rsplit("\n", 1)[-1])
    raised = f", raised in {where}" if where else ""
    result.cause = f"{what}{raised}: {safe(event.line.text.strip())[:300]}"
    result.fix = "Read the log around the evidence; start again with VLLM_LOGGING_LEVEL=DEBUG."
    return result


def _blamed(scan: Scan, run: Run, event: Event) -> tuple[str | None, int | None]:
    """Whom an event is about; of a line without a process, the worker that says or dies of it."""
    rank, pid = scan.process(event)
    rule = event.rule
    if rank is not None or rule is None:
        return rank, pid
    for other in (e for e in run.events if e.number > event.number and e.rule is not None):
        rank, pid = scan.process(other)
        same = other.rule is rule or (other.exception and other.layer == rule.layer)
        if rank is not None and (same or other.groups.get("proc")):
            return rank, pid
    return None, None


def _symptoms(scan: Scan, run: Run, cause: Event) -> list[dict[str, Any]]:
    """Other errors of the run, each text once; not those with which the cause announced itself."""
    seen = {cause.line.text}
    found: list[dict[str, Any]] = []
    for event in run.events:
        same = event.line.name != "" and event.line.name == cause.line.name
        announced = event.number < cause.number and same
        repeated = event.line.text in seen
        if repeated or announced or event.role in ("degraded", "hang"):
            continue
        seen.add(event.line.text)
        rank, _ = scan.process(event)
        found.append({**evidence(scan, event.line, event), "rank": rank})
        if len(found) == MOST_SYMPTOMS:
            break
    return found


def _unfailed(scan: Scan, run: Run) -> Diagnosis:
    """Nothing failed: degraded, healthy, stuck while starting, or a log that ends too early."""
    served = [
        e
        for e in run.events
        if e.number > run.ready > 0 and e.role in ("root", "late") and not _client_s(run, e)
    ]
    if served and not run.shutdown:
        return _failure(scan, run, served[0], "degraded")
    for event in run.events:
        if event.role == "degraded" and not _client_s(run, event):
            return _failure(scan, run, event, "degraded")
    if run.ready and scan.sparse and scan.dense is not None:
        return Diagnosis(
            "degraded",
            "serving",
            "The model has sparse attention and a dense backend serves it: the indexer does"
            " nothing, so long contexts are slow or wrong.",
            layer="backend",
            evidence=evidence(scan, scan.dense),
            confidence=0.6,
            fix="Check that the config has index_topk, and name a sparse --attention-backend.",
        )
    if run.ready or run.shutdown:
        done = "It was stopped in order." if run.shutdown else "The server became ready."
        return Diagnosis(
            "healthy",
            "shutdown" if run.shutdown else "serving",
            f"{done} Nothing failed; warnings, if any, are harmless.",
            confidence=0.95,
            fix="Nothing to do.",
        )
    return unfinished(scan, run)


def _client_s(run: Run, event: Event) -> bool:
    """A request that was turned away (no key, no valid message) while others succeed."""
    if event.layer != "server":
        return False
    if event.key == "unauthorized":
        return run.posts > 0
    return event.role != "degraded" and run.posts > event.number

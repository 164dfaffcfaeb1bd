"""Logs in which nothing fails and nothing goes on."""

import re

from glm5lab.serving.doctor.events import Event, Run, Scan
from glm5lab.serving.doctor.lines import Line, parse
from glm5lab.serving.doctor.rules import Silence, book
from glm5lab.serving.doctor.verdict import Diagnosis
from glm5lab.serving.doctor.wording import DURING, evidence

STALLED = 3  # reports in a row without a token for running requests: 30 seconds
TOLD = 3  # lines such as `no new lines`
HANG_WEIGHT = 25


def stall(scan: Scan, run: Run, failed: int) -> Event | Diagnosis | None:
    """A server that has requests and makes no token.

    Args:
        scan: the log.
        run: the start in question.
        failed: number of the first failure that is more than a sign, 0 without.

    Returns:
        The line that says it, or a diagnosis of silence; None where tokens are made, where it only
        has nothing to do, or where it stalls because something failed before.
    """
    silent = [line for count, line, _ in run.stalls.values() if count >= STALLED]
    notices = [e for e in run.events if e.role == "hang" and e.number > run.progress]
    first = min([line.number for line in silent] + [e.number for e in notices], default=0)
    if not first or 0 < failed < first:
        return None
    if notices and run.running is not False and len(notices) + len(silent) > 1:
        return notices[0]
    return None if failed or not silent else _livelock(scan, run, silent)


def _livelock(scan: Scan, run: Run, silent: list[Line]) -> Diagnosis:
    line = min(silent, key=lambda one: one.number)
    using = run.marks.get("loading")
    backend = re.search(r"Using (\w+) attention backend", using.text) if using else None
    kernel = f"the attention backend in use is {backend[1]}" if backend else "a kernel spins"
    return Diagnosis(
        "hang",
        "serving",
        f"Requests are running and no token is made: a step of the model never ends ({kernel});"
        " nothing is raised, and /health still answers.",
        layer="kernel",
        evidence=evidence(scan, line),
        confidence=0.8,
        weight=HANG_WEIGHT,
        time=line.time,
        fix="Find rank and kernel with py-spy dump; use another attention backend for this GPU"
        " (TRITON_MLA_SPARSE of glm5lab on sm_12x) or a version with the fix; a restart clears it"
        " only for a while.",
        confirm="py-spy dump --pid PID; nvidia-smi (100 % at little power: a kernel spins)",
        rule="no-tokens",
    )


def unfinished(scan: Scan, run: Run) -> Diagnosis:
    """A start that neither failed nor ended: a hang where time passed, else the log is cut."""
    last = _last(scan)
    mark, silence = run.marks.get(run.stage), book().silences.get(run.stage)
    if mark is not None and silence is not None:
        since = [line for line in run.waits if line.number > mark.number]
        told = sum("block found" not in line.text for line in since)
        passed = max(_minutes(mark.time, last.time if last is not None else ""), len(since) - told)
        quiet = told >= TOLD or passed >= silence.minutes
        if quiet or silence.bare:
            return _silent(scan, mark, silence, 0.8 if quiet else 0.5)
    if run.rank < 0:
        cause = "This log has none of vLLM's usual lines, and no error that a rule knows."
    else:
        cause = f"The log ends {DURING[run.stage]}; nothing has failed so far."
    return Diagnosis(
        "unknown",
        run.stage if run.rank >= 0 else None,
        cause,
        evidence=evidence(scan, last) if last is not None else None,
        confidence=0.3,
        fix="Give the whole log, or wait for it with --follow.",
    )


def waited_for(scan: Scan, run: Run, event: Event) -> Diagnosis | None:
    """What the start stood at, where somebody lost patience with it; None where it only is slow."""
    mark, silence = run.marks.get(run.stage), book().silences.get(run.stage)
    seconds = event.groups.get("waited", "")
    if mark is None or silence is None or not seconds or int(seconds) < 60 * silence.minutes:
        return None
    found = _silent(scan, mark, silence, 0.8)
    found.symptoms = [{**evidence(scan, event.line, event), "rank": scan.process(event)[0]}]
    return found


def vanished(scan: Scan, run: Run, symptoms: list[Event]) -> Diagnosis | None:
    """A process that ended while weights were read and left no traceback: it was killed."""
    if run.stage != "loading" or not symptoms:
        return None
    absence, line = book().absence, symptoms[0].line
    return Diagnosis(
        "failed",
        run.stage,
        absence.cause,
        layer=absence.layer,
        fix=absence.fix,
        confirm=absence.confirm,
        evidence=evidence(scan, next((e.line for e in symptoms if e.exception), line)),
        confidence=0.5,
        weight=10,
        time=line.time,
        rule="vanished",
    )


def _silent(scan: Scan, mark: Line, silence: Silence, confidence: float) -> Diagnosis:
    return Diagnosis(
        "hang",
        silence.stage,
        silence.cause,
        layer=silence.layer,
        fix=silence.fix,
        confirm=silence.confirm,
        evidence=evidence(scan, mark),
        confidence=confidence,
        weight=HANG_WEIGHT,
        time=mark.time,
        rule=f"silence-{silence.stage}",
    )


def _last(scan: Scan) -> Line | None:
    """The last line that says something."""
    for back, raw in enumerate(reversed(scan.tail)):
        line = parse(scan.lines - back, raw)
        if line.text.strip():
            return line
    return None


def _minutes(first: str, last: str) -> float:
    """Minutes between two times of a log, `MM-DD HH:MM:SS`; 0 where one is missing."""
    if not first or not last:
        return 0.0
    days = (int(last[:2]) * 31 + int(last[3:5])) - (int(first[:2]) * 31 + int(first[3:5]))
    of_day = [int(t[6:8]) * 60 + int(t[9:11]) + int(t[12:14]) / 60 for t in (first, last)]
    return max(0.0, days * 1440 + of_day[1] - of_day[0])

"""The doctor's verdict as text, and the loop behind `glm5lab doctor`."""

from collections.abc import Callable

from glm5lab.errors import counted
from glm5lab.json_output import json_text
from glm5lab.serving.doctor import Diagnosis, examine
from glm5lab.serving.doctor.follow import follow
from glm5lab.serving.doctor.wording import DURING
from glm5lab.views.text import terminal_width, wrapped

LABEL = 12  # columns of the names on the left
SHOWN_SYMPTOMS = 6


def run_doctor(
    logs: list[str], as_json: bool, keep_reading: bool, echo: Callable[[str], None]
) -> int:
    """Show the verdict on logs; the exit code: 0 healthy, 1 anything else.

    Raises:
        InputError: a log is missing, not readable or empty (exit code 2).
    """
    if not keep_reading:
        return _show(examine(logs), as_json, echo)
    code = 1
    for diagnosis in follow(logs):
        code = _show(diagnosis, as_json, echo)
    return code


def _show(diagnosis: Diagnosis, as_json: bool, echo: Callable[[str], None]) -> int:
    echo(json_text(diagnosis.as_json()) if as_json else doctor_text(diagnosis))
    return 0 if diagnosis.verdict == "healthy" else 1


def doctor_text(diagnosis: Diagnosis, width: int | None = None) -> str:
    """A verdict as lines that fit the terminal."""
    width = width or terminal_width()
    d = diagnosis
    cause = f"{d.cause.split(':')[0]}:" if d.reasons else d.cause
    lines = [_headline(d), *_wrapped("", cause, width)]
    for name, why in d.reasons:
        lines += _wrapped("", f"- {name}: {why}", width)
    if d.rank is not None:
        pid = f" (pid {d.pid})" if d.pid is not None and f"pid={d.pid}" not in d.rank else ""
        lines += _wrapped("process", d.rank + pid, width)
    if d.evidence is not None:
        lines += _wrapped("evidence", f"{d.evidence['file']}:{d.evidence['line']}", width)
        lines += _wrapped("", d.evidence["text"], width)
    lines += _wrapped("fix", d.fix, width) if d.fix else []
    lines += _wrapped("confirm", d.confirm, width) if d.confirm else []
    if d.symptoms:
        lines += _wrapped(
            "symptoms", f"{counted(len(d.symptoms), 'error')} that only follow:", width
        )
        for symptom in d.symptoms[:SHOWN_SYMPTOMS]:
            lines.append(_cut(" " * LABEL + f"line {symptom['line']}: {symptom['text']}", width))
        if len(d.symptoms) > SHOWN_SYMPTOMS:
            lines.append(" " * LABEL + "... (--json has all)")
    if d.verdict != "healthy":
        lines += _wrapped("confidence", f"{d.confidence:.0%}", width)
    return "\n".join(lines)


def _headline(d: Diagnosis) -> str:
    parts = [d.verdict.upper()]
    if d.stage is not None and d.verdict != "healthy":
        parts.append(DURING.get(d.stage, d.stage))
    head = " ".join(parts)
    return f"{head}, layer: {d.layer}" if d.layer is not None else head


def _wrapped(label: str, text: str, width: int) -> list[str]:
    lines = wrapped(text, max(20, width - LABEL))
    first = [label.ljust(LABEL) + lines[0]]
    return first + [" " * LABEL + line for line in lines[1:]]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 4] + " ..."

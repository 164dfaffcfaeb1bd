"""How the doctor words what it found; nothing leaves it with secrets or escape sequences."""

import re
from typing import Any

from glm5lab.errors import printable
from glm5lab.serving.doctor.events import Event, Scan
from glm5lab.serving.doctor.lines import Line
from glm5lab.serving.doctor.secrets import masked

DURING = {
    "start": "while the server started",
    "config": "while the configuration was read",
    "engine": "while the engine started",
    "distributed": "while the ranks found each other",
    "loading": "while weights were loaded",
    "profiling": "while memory was profiled",
    "compiling": "while the model was compiled",
    "cache": "while the KV cache was made",
    "capturing": "while CUDA graphs were captured",
    "ready": "while serving",
    "serving": "while serving",
    "shutdown": "while shutting down",
}
LONGEST = 600  # characters of evidence
SEARCHED = 4000  # characters in which it is looked for
LONGEST_VALUE = 1500  # characters of what a pattern found


def safe(text: str) -> str:
    """Text from a log as one line that no terminal obeys, without secrets."""
    return printable(masked(text[:SEARCHED]))


def filled(template: str, groups: dict[str, str]) -> str:
    """A sentence with what the pattern found, without the traces of what it did not find."""
    text = re.sub(r"\[([^\[\]]*)\]", lambda part: _optional(part[1], groups), template)
    for name, value in groups.items():
        value = value.strip()
        text = text.replace(
            "{" + name + "}",
            value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]} ...",
        )
    text = re.sub(r"\{\w+\}", "", text)
    text = re.sub(r"\(\s*[:,]?\s*\)", "", text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"\s+([.,;:)])", r"\1", re.sub(r"\(\s+", "(", text))
    text = re.sub(r"[:,;]\s*\.", ".", text).strip().rstrip(":;, ")
    if text and text[-1] not in ".!?":
        text += "."
    return safe(re.sub(r"(?<!\.)\.\.$", ".", text))


def _optional(part: str, groups: dict[str, str]) -> str:
    """A part of a template in brackets: left out where the pattern found nothing for it."""
    return part if any(groups.get(name) for name in re.findall(r"\{(\w+)\}", part)) else ""


def evidence(scan: Scan, line: Line, event: Event | None = None) -> dict[str, Any]:
    """File, number and text of a line, as it stands but for secrets and escape sequences."""
    text = line.whole.strip()
    if len(text) > SEARCHED:  # masking takes its time; a secret at the cut goes with the rest
        at = text.find(line.text[:80])
        text = text[max(0, at) :][:SEARCHED].rpartition(" ")[0] or text[:SEARCHED]
    text = masked(text)
    if len(text) > LONGEST:
        begin = 0
        if event is not None and event.rule is not None and (m := event.rule.pattern.search(text)):
            begin = max(0, m.start() - 60) if m.start() > LONGEST // 2 else 0
        text = ("... " if begin else "") + text[begin : begin + LONGEST] + " ..."
    return {"file": printable(scan.file), "line": line.number, "text": printable(text)}

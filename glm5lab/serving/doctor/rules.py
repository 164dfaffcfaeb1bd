"""The rules in rules.toml, compiled."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from glm5lab.serving.doctor.literals import literals

FILE = Path(__file__).with_name("rules.toml")
LAYERS = (
    "gguf", "loader", "kernel", "backend", "engine", "distributed", "memory", "environment",
    "server",
)  # fmt: skip
ROLES = ("root", "late", "weak", "symptom", "degraded", "hang")
# Every byte that is no letter, digit or _ becomes a blank, and letters become small.
FOLD = bytes(
    ord(chr(c).lower()) if chr(c).isalnum() or c == ord("_") else ord(" ") for c in range(128)
) + bytes([ord(" ")] * 128)

# Words that the scanner itself looks for, with the text that must be there.
EXTRA = {
    "above": "the above exception",
    "during": "during handling of",
    "new": "no new ",
    "output": "no output ",
    "still": "still ",
    "waiting": "waiting for ",
}
EXTRA_QUIET = {
    "shutdown": "shutdown triggered",
    "shutting": "shutting down",
    "signal": "trigger received signal",
    "sigterm": "received sigterm",
    "sigint": "received sigint",
    "keyboardinterrupt": "keyboardinterrupt",
    "stopping": "stopping ",
    "deactivated": "deactivated",
    "waiting": "waiting for ",
}


@dataclass(frozen=True)
class Rule:
    """One cause or symptom; the fields are described in rules.toml."""

    id: str
    role: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    order: int
    literals: tuple[str, ...]
    layer: str | None = None
    frames: re.Pattern[str] | None = None
    stages: tuple[str, ...] = ()
    quiet: bool = False
    fatal: bool = False
    whom: str = ""
    cause: str = ""
    fix: str = ""
    confirm: str = ""
    example: str = ""


@dataclass(frozen=True)
class Stage:
    """A step of a start, recognized by a line, or by the functions of a traceback."""

    name: str
    rank: int
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    literals: tuple[str, ...]
    frames: re.Pattern[str] | None


Entry = TypeVar("Entry", Rule, Stage)


@dataclass(frozen=True)
class Silence:
    """What it means that a start stops at a stage for some minutes.

    `bare`: even where the log merely ends there.
    """

    stage: str
    layer: str
    cause: str
    fix: str
    confirm: str
    minutes: int = 0
    bare: bool = False


@dataclass(frozen=True)
class Book:
    """All rules.

    Attributes:
        by_word: rules and stages by the words that a line must have for them, in their order.
        keys: the words that make a line worth a look; `quiet_keys` for lines below ERROR.
        probes: for each of these words the strings of which a line must have one; `quiet_probes`
            for lines below ERROR.
    """

    rules: tuple[Rule, ...]
    places: tuple[tuple[re.Pattern[str], str], ...]
    stages: tuple[Stage, ...]
    silences: dict[str, Silence]
    absence: Silence
    rules_by_word: dict[bytes, tuple[Rule, ...]]
    stages_by_word: dict[bytes, tuple[Stage, ...]]
    keys: frozenset[bytes]
    quiet_keys: frozenset[bytes]
    probes: dict[bytes, tuple[bytes, ...]]
    quiet_probes: dict[bytes, tuple[bytes, ...]]

    def place(self, frames: str) -> str | None:
        """The layer of the innermost frame that a place knows."""
        for frame in reversed(frames.split("\n")):
            for pattern, layer in self.places:
                if pattern.search(frame):
                    return layer
        return None

    def stage_of(self, frames: str) -> str | None:
        """The latest stage of which a traceback has a function."""
        found = [s.name for s in self.stages if s.frames is not None and s.frames.search(frames)]
        return found[-1] if found else None


@cache
def book() -> Book:
    """The rules of rules.toml.

    Raises:
        ValueError: a rule is wrong; the message names it.
    """
    return parse(tomllib.loads(FILE.read_text(encoding="utf-8")))


def parse(content: dict[str, Any]) -> Book:
    """Compile what the file says; ValueError names a rule that is wrong."""
    rules = tuple(_rule(entry, order) for order, entry in enumerate(content["rule"]))
    stages = tuple(
        Stage(
            name=e["name"],
            rank=rank,
            words=tuple(e["words"]),
            pattern=re.compile(e["pattern"]),
            literals=literals(e["pattern"]),
            frames=_frames(e),
        )
        for rank, e in enumerate(content["stage"])
    )
    quiet: list[Rule | Stage] = [*(rule for rule in rules if rule.quiet), *stages]
    return Book(
        rules=rules,
        places=tuple((re.compile(e["frames"]), e["layer"]) for e in content["place"]),
        stages=stages,
        silences={e["stage"]: Silence(**e) for e in content["silence"]},
        absence=Silence(**content["absence"]),
        rules_by_word=_index(rules),
        stages_by_word=_index(stages),
        keys=_words([*rules, *stages]) | _encoded([*EXTRA, *EXTRA_QUIET]),
        quiet_keys=_words(quiet) | _encoded(EXTRA_QUIET),
        probes=_probes([*rules, *stages], {**EXTRA, **EXTRA_QUIET}),
        quiet_probes=_probes(quiet, EXTRA_QUIET),
    )


def _rule(entry: dict[str, Any], order: int) -> Rule:
    name = entry.get("id", f"rule {order}")
    try:
        fields = {**entry, "words": tuple(entry["words"]), "stages": tuple(entry.get("stages", ()))}
        fields |= {"pattern": re.compile(entry["pattern"]), "frames": _frames(entry)}
        fields |= {"literals": literals(entry["pattern"])}
        rule = Rule(order=order, **fields)
    except (KeyError, TypeError, re.error) as error:
        raise ValueError(f"{FILE.name}: rule {name}: {error}") from error
    if rule.role not in ROLES or (rule.layer not in LAYERS) != (rule.role == "symptom"):
        raise ValueError(f"{FILE.name}: rule {name}: role {rule.role}, layer {rule.layer}")
    return rule


def _frames(entry: dict[str, Any]) -> re.Pattern[str] | None:
    return re.compile(entry["frames"], re.DOTALL) if "frames" in entry else None


def _words(entries: Iterable[Rule | Stage]) -> frozenset[bytes]:
    return _encoded(word for entry in entries for word in entry.words)


def _encoded(words: Iterable[str]) -> frozenset[bytes]:
    return frozenset(word.encode() for word in words)


def _probes(
    entries: Iterable[Rule | Stage], extra: dict[str, str]
) -> dict[bytes, tuple[bytes, ...]]:
    """By word, the literals of all entries with it; one empty string where an entry has none."""
    found: dict[str, set[str]] = {}
    for entry in entries:
        for word in entry.words:
            found.setdefault(word, set()).update(entry.literals or ("",))
    for word, text in extra.items():
        found.setdefault(word, set()).add(text)
    return {w.encode(): tuple(t.encode() for t in sorted(some)) for w, some in found.items()}


def _index(entries: Iterable[Entry]) -> dict[bytes, tuple[Entry, ...]]:
    found: dict[bytes, list[Entry]] = {}
    for entry in entries:
        for word in entry.words:
            found.setdefault(word.encode(), []).append(entry)
    return {word: tuple(some) for word, some in found.items()}

"""Read environment.yml and environment-cpu.yml with the standard library alone.

Set-up runs before anything is installed, so there is no YAML package to lean on. The two files use
one narrow form (a list of conda packages that ends in a `pip:` list); anything else is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HASH = re.compile(r"\s--hash=(sha256:[0-9a-f]{64})(?=\s|$)")
NAME = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?\s*(.*)$")
EXACT = re.compile(r"^==\s*([^\s,;*]+)$")


class EnvironmentFileError(ValueError):
    """An environment file that does not have the form described above; says file, line and fix."""

    def __init__(self, path: Path, line: int, cause: str, fix: str) -> None:
        where = f"{path.name}, line {line}" if line else path.name  # 0: the file as a whole
        super().__init__(f"{where}: {cause}; {fix}")


@dataclass(frozen=True)
class Requirement:
    """One line of a pip section.

    Attributes:
        name: normalized name (lower case, single dashes).
        version: the pinned version, or None when the line pins none.
        hashes: the accepted digests, each `sha256:` and 64 hex digits.
        text: the line as pip reads it, hashes included.
        line: its line number in the file, from 1.
    """

    name: str
    version: str | None
    hashes: tuple[str, ...]
    text: str
    line: int


@dataclass(frozen=True)
class EnvironmentFile:
    """An environment file: Python's version (such as "3.12") and its pip section."""

    path: Path
    python: str
    requirements: tuple[Requirement, ...]

    def __getitem__(self, name: str) -> Requirement:
        """The requirement of that name; KeyError when there is none."""
        for requirement in self.requirements:
            if requirement.name == normalize(name):
                return requirement
        raise KeyError(name)


def normalize(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_requirement(text: str, path: Path, line: int) -> Requirement:
    """One requirement line; raises EnvironmentFileError when it is none."""
    hashes = tuple(HASH.findall(text))
    bare = HASH.sub("", text).strip()
    if "--hash" in bare:
        raise EnvironmentFileError(
            path, line, f"unreadable hash in {text!r}", "write --hash=sha256:<64 hex digits>"
        )
    match = NAME.match(bare)
    if match is None:
        raise EnvironmentFileError(path, line, f"{text!r} is no requirement", "write name==version")
    exact = EXACT.match(match.group(3))
    version = exact.group(1) if exact else None
    return Requirement(normalize(match.group(1)), version, hashes, text, line)


def read(path: Path) -> EnvironmentFile:
    """Parse an environment file.

    Raises:
        EnvironmentFileError: the file is missing, has no python line or pip section, names a
            package twice, or holds a line that is no requirement.
    """
    if not path.is_file():
        raise EnvironmentFileError(path, 0, "no such file", "run from the repository's root")
    python = ""
    requirements: list[Requirement] = []
    in_pip = False
    for number, raw in enumerate(path.read_text().splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line == "- pip:":
            in_pip = True
        elif in_pip:
            requirements += _pip_line(line, path, number)
        elif line.startswith("- python="):
            python = line.partition("=")[2].lstrip("=")
    if not python:
        raise EnvironmentFileError(path, 0, "no Python version", "add `- python=3.12`")
    if not requirements:
        raise EnvironmentFileError(path, 0, "no pip section", "add `- pip:` and its requirements")
    _refuse_duplicates(path, requirements)
    return EnvironmentFile(path, python, tuple(requirements))


def _pip_line(line: str, path: Path, number: int) -> list[Requirement]:
    if not line.startswith("- "):
        raise EnvironmentFileError(
            path, number, f"{line!r} is no list item", "write `- name==version`"
        )
    text = line[2:].split(" #")[0].strip()
    # glm5lab itself; set-up installs it last, on its own
    return [] if text == "-e ." else [parse_requirement(text, path, number)]


def _refuse_duplicates(path: Path, requirements: list[Requirement]) -> None:
    seen: dict[str, int] = {}
    for requirement in requirements:
        if requirement.name in seen:
            raise EnvironmentFileError(
                path,
                requirement.line,
                f"{requirement.name} stands on line {seen[requirement.name]} already",
                "keep one of them",
            )
        seen[requirement.name] = requirement.line

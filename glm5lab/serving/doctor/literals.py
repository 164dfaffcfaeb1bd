"""Text that a regular expression cannot match without: a test that is cheaper than the pattern."""

import re

SHORTEST = 3
# One element of a pattern: an escape, a class, a plain character.
ELEMENT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[]", re.DOTALL)
QUANTIFIER = re.compile(r"[*+?]\??|\{\d*,?\d*\}\??")
OPENING = re.compile(r"\?(?:P<\w+>|:)|\?[=!<i]")
PLAIN_ESCAPES = frozenset(".()[]{}*+?|^$/'\"-` ")

Elements = list[str]


def literals(pattern: str) -> tuple[str, ...]:
    """Strings in small letters, one of which is in every text that the pattern matches.

    Empty where a way to match has no plain text of some length: then nothing can be said.
    """
    return _needed(ELEMENT.findall(pattern))


def _needed(elements: Elements) -> tuple[str, ...]:
    """One string for each alternative, of which its match has at least one."""
    found: list[str] = []
    for alternative in _alternatives(elements):
        options = _options(alternative)
        best = max(options, key=lambda option: min(map(len, option)), default=("",))
        if min(map(len, best)) < SHORTEST:
            return ()
        found += best
    return tuple(dict.fromkeys(text.lower() for text in found))


def _alternatives(elements: Elements) -> list[Elements]:
    """The pattern cut at each | that stands outside of groups."""
    parts: list[Elements] = [[]]
    depth = 0
    for element in elements:
        if element == "|" and depth == 0:
            parts.append([])
            continue
        depth += (element == "(") - (element == ")")
        parts[-1].append(element)
    return parts


def _options(elements: Elements) -> list[tuple[str, ...]]:
    """Sets of strings, of each of which every match has one: runs of characters, and groups."""
    options: list[tuple[str, ...]] = []
    run, at = "", 0
    while at < len(elements):
        element, at = elements[at], at + 1
        group: Elements = []
        if element == "(":
            end = _closing(elements, at)
            group, at = elements[at:end], end + 1
        quantifier = QUANTIFIER.match("".join(elements[at : at + 8]))
        once = quantifier is None or quantifier[0][0] == "+"
        at += len(quantifier[0]) if quantifier else 0
        if group and once and (inner := _content(group)):
            options.append(inner)
        plain = _plain(element) if once else ""
        run += plain
        if not plain or quantifier is not None:
            options.append((run,))
            run = ""
    return [option for option in [*options, (run,)] if option[0]]


def _closing(elements: Elements, at: int) -> int:
    """Index of the parenthesis that closes the one before `at`."""
    depth = 1
    for end in range(at, len(elements)):
        depth += (elements[end] == "(") - (elements[end] == ")")
        if depth == 0:
            return end
    return len(elements)


def _content(group: Elements) -> tuple[str, ...]:
    """What a group needs; nothing for those that look ahead or set flags."""
    text = "".join(group[:80])
    opening = OPENING.match(text)
    if opening is None:
        return _needed(group)
    if opening[0][-1] not in ":>":
        return ()
    return _needed(group[len(opening[0]) :])


def _plain(element: str) -> str:
    """The character that an element stands for, "" where it is none or many."""
    if element[0] == "\\":
        return element[1] if element[1] in PLAIN_ESCAPES else ""
    return "" if element[0] == "[" or element in "()^$.|*+?" else element

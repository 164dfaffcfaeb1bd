"""Lines that fit a terminal: prose is wrapped, and a table's long cells take several lines."""

import re
import shutil
import textwrap
from collections.abc import Collection, Sequence

NO_TERMINAL = 100  # columns where there is none: a pipe, a file
NARROWEST = 20
GAP = 2  # blanks between two columns of a table
# A cell is broken between words and items, behind the dots of a name, never within a number.
PIECES = re.compile(r"(?<=[ ,])(?=\S)|(?<=[/.])(?=[A-Za-z])")

Row = tuple[str, ...]


def terminal_width() -> int:
    """Columns of the terminal (COLUMNS where that is set)."""
    return max(NARROWEST, shutil.get_terminal_size((NO_TERMINAL, 40)).columns)


def wrapped(line: str, width: int) -> list[str]:
    """A line of prose as several that fit, the later ones indented; longer words stay whole."""
    return textwrap.wrap(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ) or [""]


def command_lines(words: Sequence[str], width: int) -> list[str]:
    """A command as lines that fit and that a shell takes as one."""
    lines = wrapped("  " + " ".join(words), width - GAP)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def table_lines(
    rows: Sequence[Row],
    width: int | None = None,
    whole: Collection[str] = (),
    right: Collection[str] = (),
) -> list[str]:
    """Rows as lines of aligned columns.

    Where they are too wide, the widest columns get cells of several lines; where even that does
    not fit, each row becomes a paragraph that names the columns.

    Args:
        rows: cells, the headings first.
        width: columns there are; None for as many as it takes.
        whole: headings of columns whose cells must not be broken (numbers).
        right: headings of columns that are aligned on the right.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is not None and _total(widths) > width:
        least = [
            full if column[0] in whole else max(len(p) for c in column for p in fold(c, 0))
            for full, column in zip(widths, columns, strict=True)
        ]
        if _total(least) > width:
            return _paragraphs(rows, width)
        pairs = list(zip(least, widths, strict=True))
        levels = ([max(low, min(full, n)) for low, full in pairs] for n in range(width, -1, -1))
        widths = next(level for level in levels if _total(level) <= width)
    adjust = [str.rjust if heading in right else str.ljust for heading in rows[0]]
    lines = []
    for row in rows:
        cells = [[c] if len(c) <= n else fold(c, n) for c, n in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            placed = (fill(p, n) for fill, p, n in zip(adjust, parts, widths, strict=True))
            lines.append((" " * GAP).join(placed).rstrip())
    return lines


def fold(cell: str, width: int) -> list[str]:
    """A cell as lines of at most `width` characters where its pieces are as short as that."""
    lines = [""]
    for piece in PIECES.split(cell):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _paragraphs(rows: Sequence[Row], width: int) -> list[str]:
    """Each row's first cell, and below it the others with their headings."""
    lines = []
    for name, *cells in rows[1:]:
        lines.append(name)
        pairs = zip(rows[0][1:], cells, strict=True)
        text = "; ".join(f"{heading} {cell}".strip() for heading, cell in pairs if cell)
        lines += wrapped(f"  {text}", width) if text else []
    return lines

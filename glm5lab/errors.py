"""Errors that the command line reports in one line instead of a traceback."""

from pathlib import PurePath

# Causes quote what a file says, and a damaged file may say it at any length.
LONGEST = 4000


class Glm5labError(Exception):
    """Base of every error that a user can act upon.

    Attributes:
        exit_code: what the command line exits with.
    """

    exit_code = 1


class CheckError(Glm5labError):
    """A proof failed: a layer's figures disagree with the referee's (exit code 1)."""


class InputError(Glm5labError, ValueError):
    """The input cannot be used (exit code 2).

    Args:
        file: the file or folder in question.
        cause: what was found, and what was expected; may quote the file as it is.
        fix: what the user can do.
    """

    exit_code = 2

    def __init__(self, file: str | PurePath, cause: str, fix: str) -> None:
        if len(cause) > LONGEST:
            cause = f"{cause[:LONGEST]} ... ({len(cause)} characters)"
        cause = printable(cause)
        fix = printable(fix)
        super().__init__(f"{printable(str(file))}: {cause}; {fix}")
        self.file, self.cause, self.fix = str(file), cause, fix

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.file, self.cause, self.fix)


def printable(text: str) -> str:
    """Text that a file or a user gave, as one line that no terminal obeys.

    Line breaks, escape sequences, marks that reverse the direction of writing and halves of
    surrogate pairs are written out, as Python's repr does.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def brief(value: object) -> str:
    """A value from a file as one short line: its repr, cut in the middle of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}"


def counted(count: int, noun: str) -> str:
    """1 and "tensor" -> "1 tensor"; 2 -> "2 tensors"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"

"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer


def not_empty(file: str | None) -> str | None:
    """An empty name, as of a variable that is not set, would mean the folder one is in."""
    if file == "":
        raise typer.BadParameter("the name is empty; `.` is the current folder")
    return file


def counts(text: str, example: str, rule: str) -> tuple[int, ...]:
    """Parse "8,16,40"; typer reports the error.

    Args:
        text: numbers by commas.
        example: what to write, for whoever wrote no numbers.
        rule: that each is at least 1, in the option's own words.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write {example}") from None
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: {rule}")
    return numbers


# Text, not paths: a path would make https:/ of https://.
GgufFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A GGUF file, any shard of a set, or its folder.",
        callback=not_empty,
    ),
]
GgufName = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A GGUF file, any shard of a set, its folder, or its URL (https://, hf://OWNER/REPO).",
        callback=not_empty,
    ),
]
TensorRanks = Annotated[int | None, typer.Option(help="Tensor-parallel ranks.", min=1)]
Stages = Annotated[int | None, typer.Option(help="Pipeline stages.", min=1)]
ContextRanks = Annotated[int | None, typer.Option(help="Context-parallel ranks.", min=1)]
Context = Annotated[
    int | None, typer.Option(metavar="TOKENS", help="Length of one request.", min=1)
]
JsonOut = Annotated[
    Path | None, typer.Option("--json", metavar="OUT", help="Write the figures there too.")
]

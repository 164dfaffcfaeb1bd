"""Progress of a check: one line a step on stderr, so that stdout holds the table alone."""

import sys


def say(text: str) -> None:
    """Prints one line of progress."""
    print(f"check: {text}", file=sys.stderr, flush=True)

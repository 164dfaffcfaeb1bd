"""Keep an engine's output out of a notebook, and in a file where it can be read."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def quiet(log: str | Path) -> Iterator[None]:
    """Append what this process and its children print to a log file while the context is open.

    Python's streams, the file descriptors 1 and 2 (C++ code and child processes) and progress
    bars that are shown as widgets are all caught. Exceptions pass through.

    Args:
        log: file; made when it is not there.
    """
    # Never closed: loggers that are set up inside keep the stream and write to it later.
    file = Path(log).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(file))
        stack.enter_context(contextlib.redirect_stderr(file))
        stack.enter_context(_displays_dropped())
        for descriptor in (1, 2):
            stack.enter_context(_descriptor(descriptor, file.fileno()))
        yield
        file.flush()


@contextlib.contextmanager
def _descriptor(descriptor: int, target: int) -> Iterator[None]:
    """Let a file descriptor point to where `target` points."""
    before = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        os.dup2(before, descriptor)
        os.close(before)


def _displays_dropped() -> contextlib.AbstractContextManager[object]:
    """In IPython a context that swallows displayed objects, elsewhere one that does nothing."""
    if "IPython" not in sys.modules:
        return contextlib.nullcontext()
    from IPython.utils.capture import capture_output

    return capture_output(stdout=False, stderr=False, display=True)

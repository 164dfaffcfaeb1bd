"""Where a GGUF file's bytes come from: a local file here, a server in `remote.py`.

The header is read with plain reads, never through a memory map: a file that shrinks while it is
being read would end the process with SIGBUS instead of an error.
"""

import os
import stat
from pathlib import Path, PurePath, PurePosixPath
from typing import Protocol, Self

from glm5lab.errors import InputError

# Far above any header in use: a vocabulary of 154,880 with merges takes some 10 MiB. Text may take
# four times its bytes as Python strings, so a hostile header of this size needs about 400 MB.
LOCAL_LIMIT_MIB = 64
# The first read of a header, so that a remote one takes few requests. Later shards hold no
# tokenizer, and there may be a thousand of them.
FIRST_READ, LATER_READ = 1 << 18, 1 << 14
LEAST_LIMIT_MIB, MOST_LIMIT_MIB = 0.001, 1 << 20


class Source(Protocol):
    """Random access to the bytes of one GGUF file.

    Attributes:
        name: path or URL, for messages.
        size: bytes of the whole file.
        header_limit: how many bytes the header may have.
        first_read: how many of them are read at once; each further read doubles what is there.
    """

    name: str
    size: int
    header_limit: int
    first_read: int

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`; fewer only where the file ends. InputError when it fails."""

    def close(self) -> None:
        """Give back what reading needed; allowed more than once."""


class Closing:
    """`with` for what has a `close`."""

    def close(self) -> None:
        """Give back what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def header_limit(default_mib: int) -> int:
    """Bytes a header may have: GLM5LAB_HEADER_LIMIT, in MiB, or the default."""
    text = os.environ.get("GLM5LAB_HEADER_LIMIT", "").strip() or str(default_mib)
    try:
        limit = float(text) * (1 << 20)
        if not LEAST_LIMIT_MIB <= limit / (1 << 20) <= MOST_LIMIT_MIB:
            raise ValueError("out of range")
    except ValueError as error:
        cause = f"{text!r} is no number of MiB from {LEAST_LIMIT_MIB:g} to {MOST_LIMIT_MIB}"
        raise InputError("GLM5LAB_HEADER_LIMIT", cause, "unset it, or use 48") from error
    return int(limit)


class UrlPath(PurePosixPath):
    """A URL with a path's `name`, `stem` and `parent`; as text it keeps the two slashes."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def location(name: str) -> PurePath:
    """A source's name as a path: a real `Path` for local files only."""
    return UrlPath(name) if "://" in name else Path(name)


class FileSource(Closing):
    """A regular local file.

    Args:
        path: the file.
        first_read: as in `Source`.

    Raises:
        InputError: not there, not readable, or a pipe, device or folder.
    """

    def __init__(self, path: str | Path, first_read: int = FIRST_READ) -> None:
        self.name, self.first_read, self._descriptor = str(path), first_read, -1
        self.header_limit = header_limit(LOCAL_LIMIT_MIB)
        try:
            # Without O_NONBLOCK, opening a pipe waits for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(self._descriptor)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            self.close()
            raise self._fail(error) from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise InputError(
                path, "not a regular file (a pipe, device or folder)", "save it as a file first"
            )
        self.size = status.st_size

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`; fewer only where the file ends."""
        parts: list[bytes] = []
        while count > 0:
            try:
                part = os.pread(self._descriptor, count, offset)
            except (OSError, OverflowError) as error:
                raise self._fail(error) from error
            if not part:
                break
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _fail(self, error: Exception) -> InputError:
        why = getattr(error, "strerror", None) or error
        return InputError(self.name, f"cannot be read: {why}", "check the path and permissions")

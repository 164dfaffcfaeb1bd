"""Bytes of parts of tensors, read so that a file that changes meanwhile is an error and no crash.

Whole rows are read with pread. Parts of rows are gathered out of a memory map, which touches only
what is kept; the kernel does the copying (pwritev into memory), because a page that a truncated
file no longer has is an error code to it, and SIGBUS to a program that reads the map itself.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from glm5lab.errors import InputError
from glm5lab.gguf.byte_order import little_endian
from glm5lab.gguf.not_gguf import DOWNLOAD_AGAIN
from glm5lab.gguf.parts import Part, block_of
from glm5lab.gguf.reader import values_of
from glm5lab.gguf.source import Closing
from glm5lab.gguf.tensors import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

# Files held open at once; a set may have a thousand.
MAX_FILES = 64
# Segments that one call of the kernel takes (IOV_MAX on Linux).
SEGMENTS = 1024
PUT_BACK = "let the files stay as they are while the model loads, or load again"


class PartReader(Closing):
    """Reads parts; several threads may share one.

    Attributes:
        nbytes: bytes of the files that were read so far.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()
        # A thread's file in memory for parts of rows, kept: its pages need not be made anew.
        self._own = threading.local()
        self._sinks: list[int] = []

    def read(self, part: Part, out: Bytes | None = None) -> Bytes:
        """A part's bytes, little-endian, uint8 [matrices, rows, bytes of a row's blocks].

        Args:
            part: what to read.
            out: where to put them, uint8 of at least so many bytes; None for fresh memory.

        Raises:
            InputError: the file is gone, was truncated, or cannot be read.
        """
        flat = np.empty(part.nbytes, np.uint8) if out is None else out[: part.nbytes]
        if part.nbytes:
            with self._open(part.tensor) as file:
                if part.whole_rows:
                    at = 0
                    for start, count in part.runs():
                        file.read(part.tensor, start, flat[at : at + count])
                        at += count
                else:
                    file.gather(part, flat, self._sink())
        with self._lock:
            self.nbytes += part.nbytes
        blocks = flat.reshape(part.byte_shape)
        return little_endian(blocks, part.tensor) if part.tensor.big_endian else blocks

    def values(self, part: Part, blocks: Bytes | None = None) -> Floats:
        """A part's numbers, float32 [matrices, rows, columns].

        Args:
            part: what to read.
            blocks: what `read` gave for it; None to read now.

        Raises:
            InputError: as for `read`, or a type that the gguf package cannot dequantize.
        """
        if not part.elements:
            return np.empty(part.shape, np.float32)
        found = values_of(self.read(part) if blocks is None else blocks, part.tensor)
        first = part.columns.start - part.blocks.start * block_of(part.tensor)[0]
        return np.asarray(found[..., first : first + len(part.columns)], np.float32)

    @contextmanager
    def _open(self, tensor: Tensor) -> Iterator["_File"]:
        """The tensor's file, kept open for the next time."""
        path = Path(tensor.path)
        with self._lock:
            file = self._files.pop(path, None) or _File(path, tensor)
            self._files[path] = file  # the last used one comes last
            file.users += 1
            idle = [p for p, f in self._files.items() if not f.users]
            for old in idle[: max(0, len(self._files) - MAX_FILES)]:
                self._files.pop(old).close()
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def _sink(self) -> int:
        """The descriptor of this thread's file in memory."""
        if not hasattr(self._own, "sink"):
            self._own.sink = os.memfd_create("glm5lab-part", os.MFD_CLOEXEC)
            with self._lock:
                self._sinks.append(self._own.sink)
        return int(self._own.sink)

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()
        while self._sinks:
            os.close(self._sinks.pop())
        self._own = threading.local()


class _File:
    """One open file, mapped when parts of rows are first asked for."""

    def __init__(self, path: Path, tensor: Tensor) -> None:
        self.path, self.users = path, 0
        self._map: mmap | None = None
        self._base = 0
        self._lock = threading.Lock()
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(
                path, f"cannot be opened at tensor {tensor.name!r}: {error.strerror}", PUT_BACK
            ) from error

    def read(self, tensor: Tensor, start: int, out: Bytes) -> None:
        """Fill `out` from the file's byte `start` on."""
        view, done = out.data, 0
        while done < len(view):
            try:
                count = os.preadv(self.descriptor, [view[done:]], start + done)
            except OSError as error:
                raise InputError(
                    self.path,
                    f"cannot be read in tensor {tensor.name!r}: {error.strerror}",
                    PUT_BACK,
                ) from error
            if count == 0:
                raise self._short(tensor)
            done += count

    def gather(self, part: Part, out: Bytes, sink: int) -> None:
        """Fill `out` with the kept blocks of every row, by way of a file in memory."""
        base, width = self._address(part.tensor), part.byte_shape[2]
        at = 0
        for starts in part.row_starts():
            segments = np.empty((len(starts), 2), np.uint64)
            segments[:, 0] = np.arange(starts.start, starts.stop, starts.step) + base
            segments[:, 1] = width
            for first in range(0, len(segments), SEGMENTS):
                some = segments[first : first + SEGMENTS]
                wanted = len(some) * width
                if _pwritev()(sink, some.ctypes.data, len(some), at) != wanted:
                    self._address(part.tensor)  # says so where the file ends too early by now
                    error = ctypes.get_errno()
                    cause = f"{os.strerror(error)} while rows of {part.tensor.name!r} were gathered"
                    raise InputError(self.path, cause, "see that there is memory, and load again")
                at += wanted
        view, done = out.data, 0
        while done < len(view):
            count = os.preadv(sink, [view[done:]], done)
            if count == 0:
                raise self._short(part.tensor)
            done += count

    def _address(self, tensor: Tensor) -> int:
        """Where the file's map begins in memory; the file must still hold the whole tensor."""
        with self._lock:
            if os.fstat(self.descriptor).st_size < tensor.offset + tensor.nbytes:
                raise self._short(tensor)
            if self._map is None:
                self._map = mmap(self.descriptor, 0, access=ACCESS_READ)
                self._base = np.frombuffer(self._map, np.uint8).ctypes.data
            return self._base

    def _short(self, tensor: Tensor) -> InputError:
        size = os.fstat(self.descriptor).st_size
        cause = f"ends inside tensor {tensor.name!r}, now {size} bytes"
        return InputError(self.path, cause, f"{PUT_BACK}; or {DOWNLOAD_AGAIN}")

    def close(self) -> None:
        # The map goes with its last user; arrays over it are not kept.
        self._map = None
        os.close(self.descriptor)


@cache
def _pwritev() -> Any:
    """The C library's pwritev, which takes addresses; Python's takes buffers, one object a row."""
    function = ctypes.CDLL(None, use_errno=True).pwritev
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    return function

"""Reads a GGUF header front to back, in the file's byte order.

A header is untrusted input: every length is checked against the file before it is used, and
whatever would pass the end is an InputError that says where.
"""

import struct
from typing import Any

import numpy as np

from glm5lab.errors import InputError
from glm5lab.gguf.not_gguf import DOWNLOAD_AGAIN
from glm5lab.gguf.source import Source

# Far above any tokenizer or template in use; a damaged length does not eat the machine's memory.
MAX_STRING_BYTES = 1 << 24
# The specification's limit for keys; tensor names end at 64 bytes in llama.cpp.
MAX_NAME_BYTES = (1 << 16) - 1
MAX_ARRAY_ITEMS, MAX_ALL_ITEMS = 1 << 21, 3 << 20
MAX_ARRAY_DEPTH, MAX_NESTED_ARRAYS = 4, 1 << 16

TYPE_BOOL, TYPE_STRING, TYPE_ARRAY = 7, 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("u2"),
    3: np.dtype("i2"),
    4: np.dtype("u4"),
    5: np.dtype("i4"),
    6: np.dtype("f4"),
    TYPE_BOOL: np.dtype("u1"),
    10: np.dtype("u8"),
    11: np.dtype("i8"),
    12: np.dtype("f8"),
}


class Cursor:
    """A position in a header, and the bytes read so far.

    Attributes:
        where: what is being read, for messages ("key 'general.name'").
        order: "<" little or ">" big endian.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.size = source, source.size
        self.buffer, self.pos, self.where = b"", 0, "the header"
        self._items = self._nested = 0
        self.set_order("<")

    def set_order(self, order: str) -> None:
        """Read numbers in this byte order from here on."""
        self.order = order
        self._u32, self._u64 = struct.Struct(f"{order}I"), struct.Struct(f"{order}Q")

    def fail(self, cause: str, fix: str = DOWNLOAD_AGAIN) -> InputError:
        """An error about this file, to be raised."""
        return InputError(self.source.name, cause, fix)

    def need(self, count: int) -> int:
        """Step over `count` bytes, which are then in `buffer`; returns where they start."""
        start, end = self.pos, self.pos + count
        if end > len(self.buffer):
            self._grow(end)
        self.pos = end
        return start

    def _grow(self, end: int) -> None:
        """Read on, at least up to `end`."""
        if end > self.size:
            raise self.fail(
                f"the file ends inside {self.where}: {end - self.pos} bytes needed at offset "
                f"{self.pos}, {self.size - self.pos} there (truncated or damaged)"
            )
        limit = self.source.header_limit
        if end > limit:
            raise self.fail(
                f"its header is longer than {limit / (1 << 20):g} MiB (at {self.where}), the limit",
                "set GLM5LAB_HEADER_LIMIT (in MiB) higher if the file is to be trusted",
            )
        have = len(self.buffer)
        want = min(self.size, limit, max(end, 2 * have, self.source.first_read))
        self.buffer += self.source.read(have, want - have)
        if len(self.buffer) < end:
            raise self.fail(f"the file has shrunk while it was read (at {self.where})")

    def u32(self) -> int:
        """The next u32."""
        start = self.need(4)
        return int(self._u32.unpack_from(self.buffer, start)[0])

    def u64(self) -> int:
        """The next u64."""
        start = self.need(8)
        return int(self._u64.unpack_from(self.buffer, start)[0])

    def check_count(self, what: str, n: int, smallest: int, limit: int | None = None) -> int:
        """`n`, when the rest of the file can hold that many items of at least `smallest` bytes."""
        left = self.size - self.pos
        if n > left // smallest:
            raise self.fail(
                f"{self.where} announces {n} {what}, more than the {left} bytes that follow "
                "can hold (truncated or damaged)"
            )
        if limit is not None and n > limit:
            raise self.fail(f"{self.where} announces {n} {what}, above the limit of {limit}")
        return n

    def name(self) -> str:
        """The next string, which is to be a key or a tensor's name."""
        return self.string(MAX_NAME_BYTES)

    def string(self, longest: int = MAX_STRING_BYTES) -> str:
        """The next string: u64 length, then UTF-8."""
        n = self.u64()
        if longest < n <= self.size - self.pos:
            raise self.fail(f"{self.where} holds a string of {n} bytes (damaged)")
        start = self.need(n)
        return _text(self.buffer[start : start + n])

    def strings(self, n: int) -> list[str]:
        """`n` strings; a plain loop, since tokenizers hold half a million of them."""
        buffer, pos, have = self.buffer, self.pos, len(self.buffer)
        length = self._u64.unpack_from
        out: list[str] = []
        for _ in range(n):
            start = pos + 8
            end = start + length(buffer, pos)[0] if start <= have else have + 1
            if end > have:
                self.pos = pos
                out.append(self.string())  # reads on, or raises with the place
                buffer, pos, have = self.buffer, self.pos, len(self.buffer)
                continue
            out.append(_text(buffer[start:end]))
            pos = end
        self.pos = pos
        return out

    def value(self, kind: int, depth: int = 0) -> tuple[Any, tuple[int, ...]]:
        """A value of GGUF type `kind` as a Python object, and its type (array, item, ...)."""
        if kind == TYPE_STRING:
            return self.string(), (kind,)
        if kind == TYPE_ARRAY:
            return self.array(depth)
        if kind not in SCALARS:
            raise self.fail(f"{self.where} has the unknown value type {kind} (damaged, or newer)")
        return self.scalars(kind, 1)[0], (kind,)

    def scalars(self, kind: int, n: int) -> list[Any]:
        """`n` numbers of GGUF type `kind`."""
        dtype = SCALARS[kind].newbyteorder("<" if self.order == "<" else ">")
        start = self.need(n * dtype.itemsize)
        items = np.frombuffer(self.buffer, dtype, n, start)
        return (items != 0).tolist() if kind == TYPE_BOOL else items.tolist()

    def _spend(self, n: int, nested: bool) -> None:
        """Count array items; a few million of them are more than any model has."""
        self._items += n
        self._nested += n * nested
        for what, count, limit in (
            ("items", n, MAX_ARRAY_ITEMS),
            ("array items so far", self._items, MAX_ALL_ITEMS),
            ("arrays in arrays so far", self._nested, MAX_NESTED_ARRAYS),
        ):
            if count > limit:
                raise self.fail(f"{self.where} has {count} {what}, above the limit of {limit}")

    def array(self, depth: int) -> tuple[list[Any], tuple[int, ...]]:
        """An array, at most MAX_ARRAY_DEPTH deep, and its type."""
        if depth >= MAX_ARRAY_DEPTH:
            raise self.fail(f"{self.where} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind = self.u32()
        smallest = {TYPE_STRING: 8, TYPE_ARRAY: 12}.get(kind)
        if smallest is None and kind not in SCALARS:
            raise self.fail(f"{self.where} is an array of unknown type {kind} (damaged, or newer)")
        n = self.check_count("array items", self.u64(), smallest or SCALARS[kind].itemsize)
        self._spend(n, nested=kind == TYPE_ARRAY)
        if kind == TYPE_STRING:
            return self.strings(n), (TYPE_ARRAY, kind)
        if kind != TYPE_ARRAY:
            return self.scalars(kind, n), (TYPE_ARRAY, kind)
        pairs = [self.array(depth + 1) for _ in range(n)]
        return [p[0] for p in pairs], (TYPE_ARRAY, *(pairs[0][1] if pairs else (TYPE_ARRAY,)))


def _text(raw: bytes) -> str:
    # Not UTF-8 is rare and harmless in a description; escapes keep two odd tokens distinct.
    return str(raw, "utf-8", "backslashreplace")

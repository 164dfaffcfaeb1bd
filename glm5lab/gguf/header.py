"""The binary header of one GGUF file: every key, every tensor's place, nothing of the weights.

Layout (little endian), https://github.com/ggml-org/ggml/blob/master/docs/gguf.md:
    magic "GGUF" | version u32 | tensor count u64 | key count u64
    keys:    name string | type u32 | value           (string = length u64 + UTF-8 bytes)
    tensors: name string | dimensions u32 | ne u64[] | type u32 | offset u64
    padding to general.alignment, then the data; offsets count from there.

A header is untrusted input: every length is checked against the file before it is used.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm5lab.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Far above any tokenizer or template in use; a damaged length does not eat the machine's memory.
MAX_STRING_BYTES = 1 << 26
MAX_ARRAY_ITEMS = 1 << 24
MAX_ARRAY_DEPTH = 4

TYPE_BOOL, TYPE_STRING, TYPE_ARRAY = 7, 8, 9
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    TYPE_BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
DOWNLOAD_AGAIN = "download the file again and compare its size or checksum with the source's"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it.

    Attributes:
        name: GGUF name.
        shape: torch order, [out, in] (the reverse of GGUF's `ne`).
        type_id: GGML type number, possibly one that no library here knows.
        offset: bytes from the start of the file's data section.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class Header:
    """A parsed header; `data_start` is an offset in bytes from the start of the file."""

    version: int
    metadata: dict[str, Any]
    metadata_types: dict[str, tuple[int, ...]]
    tensors: list[TensorInfo]
    alignment: int
    data_start: int


class _Cursor:
    """Reads a buffer front to back; whatever would pass its end is an InputError."""

    def __init__(self, buffer: Any, path: Path) -> None:
        self.buffer, self.path = buffer, path
        self.size, self.pos, self.where = len(buffer), 0, "the header"

    def fail(self, cause: str, fix: str = DOWNLOAD_AGAIN) -> InputError:
        return InputError(self.path, cause, fix)

    def need(self, count: int) -> int:
        """Step over `count` bytes and return where they start."""
        start = self.pos
        if count > self.size - start:
            raise self.fail(
                f"the file ends inside {self.where}: {count} bytes needed at offset {start}, "
                f"{self.size - start} there (truncated or damaged)"
            )
        self.pos = start + count
        return start

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.buffer, self.need(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.buffer, self.need(8))[0])

    def count(self, what: str, smallest: int) -> int:
        """A u64 count of items of at least `smallest` bytes each, checked against the file."""
        n = self.u64()
        if n > (self.size - self.pos) // smallest:
            raise self.fail(
                f"{self.where} announces {n} {what}, more than the {self.size - self.pos} "
                "bytes that follow can hold (truncated or damaged)"
            )
        return n

    def string(self) -> str:
        n = self.u64()
        if n > MAX_STRING_BYTES and n <= self.size - self.pos:
            raise self.fail(f"{self.where} holds a string of {n} bytes (damaged)")
        start = self.need(n)
        return _text(self.buffer[start : start + n])

    def strings(self, n: int) -> list[str]:
        """`n` strings; a plain loop, since tokenizers hold half a million of them."""
        buffer, size, pos = self.buffer, self.size, self.pos
        length: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(n):
            end = pos + 8
            if end <= size:
                end += length(buffer, pos)[0]
            if end > size:
                self.pos = pos
                out.append(self.string())  # raises, with the place
            out.append(_text(buffer[pos + 8 : end]))
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
        dtype = SCALARS[kind]
        items = np.frombuffer(self.buffer, dtype, n, self.need(n * dtype.itemsize))
        return (items != 0).tolist() if kind == TYPE_BOOL else items.tolist()

    def array(self, depth: int) -> tuple[list[Any], tuple[int, ...]]:
        if depth >= MAX_ARRAY_DEPTH:
            raise self.fail(f"{self.where} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind = self.u32()
        smallest = {TYPE_STRING: 8, TYPE_ARRAY: 12}.get(kind)
        if smallest is None and kind not in SCALARS:
            raise self.fail(f"{self.where} is an array of unknown type {kind} (damaged, or newer)")
        n = self.count("array items", smallest or SCALARS[kind].itemsize)
        if n > MAX_ARRAY_ITEMS:
            raise self.fail(f"{self.where} has {n} items, above the limit of {MAX_ARRAY_ITEMS}")
        if kind == TYPE_STRING:
            return self.strings(n), (TYPE_ARRAY, kind)
        if kind != TYPE_ARRAY:
            return self.scalars(kind, n), (TYPE_ARRAY, kind)
        pairs = [self.array(depth + 1) for _ in range(n)]
        return [p[0] for p in pairs], (TYPE_ARRAY, *(pairs[0][1] if pairs else (TYPE_ARRAY,)))


def _text(raw: bytes) -> str:
    # Not UTF-8 is rare and harmless in a description; escapes keep two odd tokens distinct.
    return str(raw, "utf-8", "backslashreplace")


def parse_header(buffer: Any, path: Path) -> Header:
    """Parse a whole GGUF header.

    Args:
        buffer: the file, or at least its header (mmap or bytes; slices give bytes).
        path: what error messages call it.

    Raises:
        InputError: not GGUF, an unsupported version, or a damaged header.
    """
    cursor = _Cursor(buffer, path)
    version = _check_start(cursor)
    cursor.pos = 8
    cursor.where = "the header"
    n_tensors = cursor.u64()
    n_keys = cursor.count("keys", 13)
    metadata: dict[str, Any] = {}
    types: dict[str, tuple[int, ...]] = {}
    for i in range(n_keys):
        cursor.where = f"the name of key {i}"
        key = cursor.string()
        cursor.where = f"key {key!r}"
        if key in metadata:
            raise cursor.fail(f"key {key!r} occurs twice", "get a copy from another publisher")
        metadata[key], types[key] = cursor.value(cursor.u32())
    if n_tensors > (cursor.size - cursor.pos) // 24:
        raise cursor.fail(
            f"the header announces {n_tensors} tensors, more than the {cursor.size - cursor.pos} "
            "bytes that follow can hold (truncated or damaged)"
        )
    tensors = [_tensor_info(cursor, i) for i in range(n_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.pos // alignment) * alignment
    return Header(version, metadata, types, tensors, alignment, start)


def _tensor_info(cursor: _Cursor, index: int) -> TensorInfo:
    cursor.where = f"the description of tensor {index}"
    name = cursor.string()
    if not name:
        raise cursor.fail(f"tensor {index} has no name (damaged)")
    cursor.where = f"the description of tensor {name!r}"
    n_dims = cursor.u32()
    if n_dims > MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions, GGUF allows {MAX_DIMENSIONS}")
    ne = [cursor.u64() for _ in range(n_dims)]
    elements = 1
    for n in ne:
        elements *= n
    if elements >= 1 << 63 or any(n >= 1 << 63 for n in ne):
        raise cursor.fail(f"tensor {name!r} has the impossible dimensions {ne} (damaged)")
    type_id, offset = cursor.u32(), cursor.u64()
    return TensorInfo(name, tuple(reversed(ne)) or (1,), type_id, offset)


def _check_start(cursor: _Cursor) -> int:
    """Magic and version, or a message that says what the file is instead."""
    head = bytes(cursor.buffer[:512])
    if head[:4] != MAGIC:
        cause, fix = _what_is_it(head)
        raise cursor.fail(cause, fix)
    cursor.pos = 4
    version = cursor.u32()
    if version & 0xFFFF == 0 and version:
        raise cursor.fail(
            "the file is big-endian (made for s390x or similar); little-endian is supported",
            "convert it with gguf-convert-endian from the gguf package, or get another copy",
        )
    if version not in VERSIONS:
        raise cursor.fail(
            f"GGUF version {version}; supported are {', '.join(map(str, VERSIONS))}",
            "convert the model again with a current llama.cpp, or update glm5lab",
        )
    return version


def _what_is_it(head: bytes) -> tuple[str, str]:
    """Cause and fix for a file that does not start with the GGUF magic."""
    text = head.lstrip().lower()
    get = "get the real file (huggingface-cli download, or the download button of the page)"
    if not head:
        return "the file is empty", DOWNLOAD_AGAIN
    if text.startswith(b"version https://git-lfs"):
        return (
            "this is a git-lfs pointer, not the model itself",
            "run `git lfs pull` in that repository, or download the file itself",
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page (HTML), not a GGUF file", get
    if head[:4] in (b"tjgg", b"lmgg", b"fmgg", b"algg"):
        return "this is llama.cpp's old format from before GGUF", "get a GGUF file of the model"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return (
            "this is a safetensors file, not GGUF",
            "vLLM reads the safetensors folder as it is; glm5lab is for GGUF files",
        )
    if head[:2] == b"PK":
        return "this is a ZIP archive (PyTorch checkpoint?), not GGUF", "name a .gguf file"
    if head[:512].isascii() and b"\0" not in head:
        return "this is a text file, not GGUF (it does not start with 'GGUF')", "name a .gguf file"
    return "not a GGUF file: it does not start with 'GGUF'", "name a .gguf file"

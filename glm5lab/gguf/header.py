"""The binary header of one GGUF file: every key, every tensor's place, nothing of the weights.

Layout, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md:
    magic "GGUF" | version u32 | tensor count u64 | key count u64
    keys:    name string | type u32 | value           (string = length u64 + UTF-8 bytes)
    tensors: name string | dimensions u32 | ne u64[] | type u32 | offset u64
    padding to general.alignment, then the data; offsets count from there.
Numbers are little endian, or big endian throughout: the version tells, since it is small.
"""

from dataclasses import dataclass
from typing import Any, Literal

from glm5lab.errors import brief
from glm5lab.gguf.cursor import Cursor
from glm5lab.gguf.not_gguf import what_is_it
from glm5lab.gguf.source import Source

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# GLM-5 has some 60 keys and 1,800 tensors; each costs time and memory before its name is known.
MAX_KEYS = MAX_TENSORS = 1 << 16


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
    byte_order: Literal["little", "big"]
    metadata: dict[str, Any]
    metadata_types: dict[str, tuple[int, ...]]
    tensors: list[TensorInfo]
    alignment: int
    data_start: int


def parse_header(source: Source) -> Header:
    """Parse a whole GGUF header, reading not much more than the header.

    Raises:
        InputError: not GGUF, an unsupported version, or a damaged header.
    """
    cursor = Cursor(source)
    version = _check_start(cursor)
    n_tensors = cursor.u64()
    n_keys = cursor.check_count("keys", cursor.u64(), 13, MAX_KEYS)
    metadata: dict[str, Any] = {}
    types: dict[str, tuple[int, ...]] = {}
    for i in range(n_keys):
        cursor.where = f"the name of key {i}"
        key = cursor.name()
        cursor.where = f"key {key!r}"
        if key in metadata:
            raise cursor.fail(f"key {key!r} occurs twice", "get a copy from another publisher")
        metadata[key], types[key] = cursor.value(cursor.u32())
    cursor.where = "the header"
    cursor.check_count("tensors", n_tensors, 24, MAX_TENSORS)
    tensors = [_tensor_info(cursor, i) for i in range(n_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # llama.cpp demands a power of two, though the specification says a multiple of 8.
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {brief(alignment)}, not a power of two as in ggml")
    start = -(-cursor.pos // alignment) * alignment
    order: Literal["little", "big"] = "little" if cursor.order == "<" else "big"
    return Header(version, order, metadata, types, tensors, alignment, start)


def _tensor_info(cursor: Cursor, index: int) -> TensorInfo:
    cursor.where = f"the description of tensor {index}"
    name = cursor.name()
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


def _check_start(cursor: Cursor) -> int:
    """Magic and version, in the file's byte order, or a message that says what the file is."""
    head = cursor.source.read(0, min(512, cursor.size))
    if head[:4] != MAGIC:
        cause, fix = what_is_it(head)
        raise cursor.fail(cause, fix)
    cursor.pos = 4
    version = cursor.u32()
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS and swapped in range(1, 1 << 16):
        cursor.set_order(">")
        version = swapped
    if version not in VERSIONS:
        raise cursor.fail(
            f"GGUF version {version}; supported are {', '.join(map(str, VERSIONS))}",
            "convert the model again with a current llama.cpp, or update glm5lab",
        )
    return version

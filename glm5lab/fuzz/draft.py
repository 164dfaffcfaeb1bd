"""A GGUF file taken apart so that mutations can change its pieces, and put together again."""

import os
import struct
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from glm5lab.architecture import Glm5Architecture
from glm5lab.gguf.cursor import TYPE_ARRAY, TYPE_STRING, Cursor
from glm5lab.gguf.header import DEFAULT_ALIGNMENT
from glm5lab.gguf.large_sample import write_sparse
from glm5lab.gguf.sample_tokenizer import sample_vocabulary
from glm5lab.gguf.shards import find_shards
from glm5lab.gguf.source import FileSource


@dataclass
class Key:
    """One metadata entry; `value` as it lies in the file."""

    name: bytes
    kind: int
    value: bytes


@dataclass
class Info:
    """One tensor's description; `ne` in the file's order."""

    name: bytes
    ne: list[int]
    type_id: int
    offset: int


@dataclass
class Draft:
    """One file: what its header says, and how many bytes of (zero) weights follow.

    Attributes:
        n_keys, n_tensors: what the header announces; None is the truth.
        size: cut or extend the file to so many bytes; None leaves it.
        lengths: of the last `encode`: offsets of its u64 lengths and counts.
    """

    name: str
    keys: list[Key]
    tensors: list[Info]
    data: int
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    size: int | None = None
    order: str = "<"
    lengths: list[int] = field(default_factory=list)

    def find(self, name: bytes) -> Key | None:
        """The key of that name."""
        return next((k for k in self.keys if k.name == name), None)

    def encode(self) -> bytearray:
        """The header's bytes, without padding; notes where lengths lie."""
        out = bytearray(b"GGUF")
        counts = [
            len(self.tensors) if self.n_tensors is None else self.n_tensors,
            len(self.keys) if self.n_keys is None else self.n_keys,
        ]
        self.lengths = [8, 16]
        out += struct.pack(f"{self.order}IQQ", self.version, *(c % (1 << 64) for c in counts))
        for key in self.keys:
            self._string(out, key.name)
            out += struct.pack(f"{self.order}I", key.kind)
            if key.kind == TYPE_STRING:
                self.lengths.append(len(out))
            elif key.kind == TYPE_ARRAY and len(key.value) >= 12:
                self.lengths.append(len(out) + 4)
                if key.value[:4] == struct.pack(f"{self.order}I", TYPE_STRING):
                    self.lengths.append(len(out) + 12)
            out += key.value
        for info in self.tensors:
            self._string(out, info.name)
            ne = [n % (1 << 64) for n in info.ne]
            out += struct.pack(f"{self.order}I{len(ne)}Q", len(ne), *ne)
            out += struct.pack(f"{self.order}IQ", info.type_id % (1 << 32), info.offset % (1 << 64))
            self.lengths.append(len(out) - 8)
        return out

    def _string(self, out: bytearray, text: bytes) -> None:
        self.lengths.append(len(out))
        out += struct.pack(f"{self.order}Q", len(text)) + text


def write_bytes(path: Path, head: bytes | bytearray, data: int, size: int | None) -> None:
    """Header, padding and a hole of `data` bytes, cut or extended to `size`."""
    path.write_bytes(head)
    whole = -(-len(head) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT + data
    os.truncate(path, whole if size is None else size)


def take_apart(path: Path) -> Draft:
    """The draft of a sound little-endian file."""
    with FileSource(path) as source:
        c = Cursor(source)
        c.pos = 8
        n_tensors, n_keys = c.u64(), c.u64()
        keys, tensors = [], []
        for _ in range(n_keys):
            name, kind = c.string().encode(), c.u32()
            start = c.pos
            c.value(kind)
            keys.append(Key(name, kind, c.buffer[start : c.pos]))
        for _ in range(n_tensors):
            name, n_dims = c.string().encode(), c.u32()
            tensors.append(Info(name, [c.u64() for _ in range(n_dims)], c.u32(), c.u64()))
        data = source.size - -(-c.pos // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return Draft(path.name, keys, tensors, data)


def base_sets(folder: Path) -> list[list[Draft]]:
    """Sound tiny models to start from: full, IndexShare, MTP; one file and three shards."""
    sets = []
    for kind, shards in (("full", 1), ("share", 1), ("mtp", 3)):
        arch = Glm5Architecture.tiny(kind)
        vocabulary = sample_vocabulary(arch.vocab_size)
        first = write_sparse(folder / kind, arch, vocabulary, kind, shards)
        sets.append([take_apart(path) for path in find_shards(first)])
    return sets


def copy(drafts: list[Draft]) -> list[Draft]:
    """An independent copy to be mutated."""
    return deepcopy(drafts)

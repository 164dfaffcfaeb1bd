"""Mistakes in the header of a whole file, none of which changes its size."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MATRIX = "blk.1.attn_q_b.weight"
OTHER = "blk.1.attn_q_x.weight"
FOREIGN = 133  # a type that only a fork of llama.cpp knows


class Mistake(NamedTuple):
    """A change to what the header says about MATRIX, and what an error has to say then."""

    change: Callable[[bytearray, int], None]
    says: tuple[str, ...]


def _rename(data: bytearray, at: int) -> None:
    data[at - len(MATRIX) : at] = OTHER.encode()


def _swap(data: bytearray, at: int) -> None:
    rows, columns = struct.unpack_from("<QQ", data, at + 4)
    struct.pack_into("<QQ", data, at + 4, columns, rows)


def _retype(data: bytearray, at: int) -> None:
    struct.pack_into("<I", data, at + 4 + 16, FOREIGN)


MISTAKES = {
    "missing": Mistake(_rename, (f"{MATRIX}: missing, expected shape [",)),
    "extra": Mistake(_rename, (f"{OTHER}: GLM-5 has no such tensor",)),
    "shape": Mistake(_swap, (f"{MATRIX}: expected shape [", "], found [")),
    "type": Mistake(_retype, (f"{MATRIX}: type unknown({FOREIGN}) cannot be dequantized here",)),
}


def make(path: Path, mistake: str) -> None:
    """Change the header of a one-file model in place."""
    data = bytearray(path.read_bytes())
    name = struct.pack("<Q", len(MATRIX)) + MATRIX.encode()
    MISTAKES[mistake].change(data, data.index(name) + len(name))
    path.write_bytes(data)

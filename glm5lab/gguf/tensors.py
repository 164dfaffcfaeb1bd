"""Where each tensor of a shard lies, checked against the file's size and its neighbours."""

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import PurePath

from glm5lab.errors import InputError
from glm5lab.gguf.header import Header, TensorInfo
from glm5lab.gguf.not_gguf import DOWNLOAD_AGAIN

# Block and role. Names are untrusted: "blk.².x" has a digit that is no number, "blk.01.x" is not
# what anybody writes; nine digits at most, so that the number fits every integer type.
BLOCK_NAME = re.compile(r"\Ablk\.(0|[1-9][0-9]{0,8})\.(.+)\Z")


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies.

    Attributes:
        name: GGUF name.
        shape: torch order, [out, in].
        type_id: GGML type number.
        type: its name ("Q4_K"), or "unknown(142)" when the gguf package does not know it.
        nbytes: bytes in the file; for an unknown type the gap up to the next tensor.
        shard: index of the shard, from 0.
        path: the shard's file; a `Path` when it is a local one.
        offset: bytes from the start of that file.
        big_endian: the file holds its numbers in that order.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type: str
    nbytes: int
    shard: int
    path: PurePath
    offset: int
    big_endian: bool = False

    @property
    def layer(self) -> int | None:
        """Block number, or None for tensors outside the blocks."""
        match = BLOCK_NAME.match(self.name)
        return int(match[1]) if match else None

    @property
    def role(self) -> str:
        """The name without its block: `ffn_gate_exps.weight`."""
        match = BLOCK_NAME.match(self.name)
        return match[2] if match else self.name


def locate(
    header: Header, size: int, path: PurePath, shard: int
) -> tuple[list[Tensor], InputError | None]:
    """Absolute places of a shard's tensors, in the order of its header.

    Args:
        header: the parsed header.
        size: bytes of the file.
        path: the file, for messages.
        shard: its index in the set, from 0.

    Returns:
        The tensors, and an error that names the first tensor that the file does not hold whole.

    Raises:
        InputError: tensors that overlap, are not aligned, or have rows that no block fits.
    """
    types = type_sizes()
    order = sorted(range(len(header.tensors)), key=lambda i: header.tensors[i].offset)
    ends = {a: header.tensors[b].offset for a, b in pairwise(order)}
    found: list[Tensor | None] = [None] * len(order)
    cut: InputError | None = None
    for i in order:
        t = header.tensors[i]
        if t.offset % header.alignment:
            raise InputError(
                path,
                f"tensor {t.name!r} starts at {t.offset}, not at a multiple of the alignment "
                f"{header.alignment} (damaged)",
                DOWNLOAD_AGAIN,
            )
        start = header.data_start + t.offset
        room = ends[i] - t.offset if i in ends else None
        known = types.get(t.type_id)
        name, nbytes = f"unknown({t.type_id})", max(0, size - start) if room is None else room
        if known:
            name, nbytes = known[0], _size(t, *known, path)
        if cut is None and (start + nbytes > size or (start == size and not known)):
            cut = _truncated(header, size, path, t, start, nbytes)
        if room is not None and nbytes > room:
            raise InputError(
                path,
                f"tensor {t.name!r} ({name}, {nbytes} bytes) overlaps the next one, "
                f"{room} bytes behind its start (damaged)",
                DOWNLOAD_AGAIN,
            )
        big = header.byte_order == "big"
        found[i] = Tensor(t.name, t.shape, t.type_id, name, nbytes, shard, path, start, big)
    return [t for t in found if t is not None], cut


@cache
def type_sizes() -> dict[int, tuple[str, int, int]]:
    """GGML type number -> name, elements and bytes a block, for types the gguf package knows."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}


def _size(t: TensorInfo, name: str, block: int, block_bytes: int, path: PurePath) -> int:
    if t.shape[-1] % block:
        raise InputError(
            path,
            f"tensor {t.name!r} of type {name} has rows of {t.shape[-1]}, not a multiple of the "
            f"type's block of {block} (damaged)",
            DOWNLOAD_AGAIN,
        )
    elements = 1
    for n in t.shape:
        elements *= n
    return elements // block * block_bytes


def _truncated(
    header: Header, size: int, path: PurePath, t: TensorInfo, start: int, nbytes: int
) -> InputError:
    """The error for the first tensor, in order of offsets, that the file does not hold whole."""
    missing = start + nbytes - size if start < size else nbytes
    amount = f"{missing} of its {nbytes} bytes are missing" if nbytes else "all of it is missing"
    last = max(header.tensors, key=lambda other: other.offset)
    more = "" if last is t else f", and everything behind it up to {last.name!r}"
    return InputError(
        path,
        f"truncated at {size} bytes: the first tensor that is cut is {t.name!r}, {amount}{more}",
        DOWNLOAD_AGAIN,
    )

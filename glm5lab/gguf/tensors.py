"""Where each tensor of a shard lies, checked against the file's size and its neighbours."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from glm5lab.errors import InputError
from glm5lab.gguf.header import DOWNLOAD_AGAIN, Header, TensorInfo


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
        path: the shard's file.
        offset: bytes from the start of that file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type: str
    nbytes: int
    shard: int
    path: Path
    offset: int

    @property
    def layer(self) -> int | None:
        """Block number, or None for tensors outside the blocks."""
        parts = self.name.split(".")
        return (
            int(parts[1]) if parts[0] == "blk" and len(parts) > 2 and parts[1].isdigit() else None
        )

    @property
    def role(self) -> str:
        """The name without its block: `ffn_gate_exps.weight`."""
        return self.name if self.layer is None else self.name.split(".", 2)[2]


def locate(header: Header, size: int, path: Path, shard: int) -> list[Tensor]:
    """Absolute places of a shard's tensors, in file order; truncated or overlapping is an error."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    order = sorted(range(len(header.tensors)), key=lambda i: header.tensors[i].offset)
    ends = {a: header.tensors[b].offset for a, b in pairwise(order)}
    found: list[tuple[TensorInfo, str, int]] = [(t, "", 0) for t in header.tensors]
    for i in order:
        t = header.tensors[i]
        room = ends.get(i, max(size - header.data_start, t.offset)) - t.offset
        if t.offset % header.alignment:
            raise InputError(
                path,
                f"tensor {t.name!r} starts at {t.offset}, not at a multiple of the alignment "
                f"{header.alignment} (damaged)",
                DOWNLOAD_AGAIN,
            )
        name, nbytes = f"unknown({t.type_id})", room
        if t.type_id in known:
            name, block, block_bytes = known[t.type_id]
            nbytes = _size(t, name, block, block_bytes, path)
        start = header.data_start + t.offset
        if start + nbytes > size:
            raise _truncated(header, size, path, t, start, nbytes)
        if nbytes > room:
            raise InputError(
                path,
                f"tensor {t.name!r} ({name}, {nbytes} bytes) overlaps the next one, "
                f"{room} bytes behind its start (damaged)",
                DOWNLOAD_AGAIN,
            )
        found[i] = (t, name, nbytes)
    start = header.data_start
    return [
        Tensor(t.name, t.shape, t.type_id, n, b, shard, path, start + t.offset) for t, n, b in found
    ]


def _size(t: TensorInfo, name: str, block: int, block_bytes: int, path: Path) -> int:
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
    header: Header, size: int, path: Path, t: TensorInfo, start: int, nbytes: int
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

"""Files of a layout's shape: complete headers, and holes in place of the weights.

    first = write_layout(read_layouts()["glm-5-q4_k_m"], "build/glm-5")

A set of 455 GB takes some megabytes on disk. What reads headers only (inspect, map, plan) works on
it as on the real files; the weights read as zeros.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glm5lab.errors import InputError
from glm5lab.gguf.layouts import Layout
from glm5lab.gguf.sample import add_tokenizer
from glm5lab.gguf.sample_tokenizer import published_vocabulary
from glm5lab.gguf.writing import SparseTensor, divide, write_sparse_files

if TYPE_CHECKING:
    from gguf import GGUFWriter


def write_layout(
    layout: Layout, folder: str | Path, shards: int | None = None, vocabulary: bool = True
) -> Path:
    """Write header-only files of a layout.

    Args:
        layout: what to write.
        folder: where; made when it is not there.
        shards: number of files, all with tensors; default as published, a metadata-only first
            shard included.
        vocabulary: also the tokenizer's keys: the sample's tokens, as many and with GLM-5's
            numbers for special tokens.

    Returns:
        The first shard's path.

    Raises:
        InputError: the folder cannot be written or does not hold files of this size.
    """

    def add_keys(writer: "GGUFWriter") -> None:
        _add_metadata(writer, layout)
        if vocabulary:
            add_tokenizer(writer, published_vocabulary(layout.architecture.vocab_size))

    return write_sparse_files(
        Path(folder).expanduser(), layout.name, _parts(layout, shards), add_keys
    )


def _parts(layout: Layout, shards: int | None) -> list[Sequence[SparseTensor]]:
    """The tensors of each file: as published, or about the same number in each."""
    tensors = [SparseTensor(t.name, t.shape, t.type_id, t.nbytes) for t in layout.tensors]
    if shards is None:
        rest = iter(tensors)
        return [[next(rest) for _ in range(count)] for count in layout.shard_tensors]
    if not 1 <= shards <= len(tensors):
        raise InputError(
            layout.name, f"shards: {shards} is out of range", f"use 1 to {len(tensors)}"
        )
    return divide(tensors, shards)


def _add_metadata(writer: "GGUFWriter", layout: Layout) -> None:
    """The layout's keys, of the type that follows from the value; whole numbers are U32."""
    from gguf import GGUFValueType

    for key, value in layout.metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":  # the writer has that one
            kind = GGUFValueType.get_type(value)
            whole = kind == GGUFValueType.INT32
            writer.add_key_value(key, value, GGUFValueType.UINT32 if whole else kind)

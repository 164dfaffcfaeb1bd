"""Sets of GGUF files through gguf-py's writer, with weights or with holes in their place."""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from glm5lab.errors import InputError
from glm5lab.gguf.shapes import Shape
from glm5lab.gguf.shards import shard_name

if TYPE_CHECKING:
    from gguf import GGUFWriter

T = TypeVar("T")
AddKeys = Callable[["GGUFWriter"], None]


class SparseTensor(NamedTuple):
    """A tensor without values: name, shape in torch order, GGML type number, bytes in the file."""

    name: str
    shape: Shape
    type_id: int
    nbytes: int


def file_names(base: str, count: int) -> list[str]:
    """Names of a model's files, numbered where there are several."""
    return [shard_name(base, i, count) for i in range(count)] if count > 1 else [f"{base}.gguf"]


def divide(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` runs of about the same length."""
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


def shard_writer(
    path: Path, index: int, count: int, tensors: int, add_keys: AddKeys
) -> "GGUFWriter":
    """A GGUFWriter with the keys of one shard.

    Args:
        path: the file to be written.
        index: of the shard, from 0; only the first has the model's keys, as llama-gguf-split
            writes them.
        count: shards of the set.
        tensors: tensors of the set.
        add_keys: adds the model's keys to the writer, which has `general.architecture`.
    """
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, "glm-dsa")
    if index == 0:
        add_keys(writer)
    else:
        writer.kv_data[0].clear()
    if count > 1:
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_key_value("split.tensors.count", tensors, GGUFValueType.INT32)
    return writer


def write_sparse_files(
    folder: Path, base: str, parts: Sequence[Sequence[SparseTensor]], add_keys: AddKeys
) -> Path:
    """Write files with complete headers whose weights are holes, which read as zeros.

    Args:
        folder: made when it is not there.
        base: name of the files, without number and ending.
        parts: the tensors of each file.
        add_keys: as in `shard_writer`.

    Returns:
        The first file.

    Raises:
        InputError: the folder cannot be written, or holds files only of limited size.
    """
    names, total = file_names(base, len(parts)), sum(len(part) for part in parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index, (name, part) in enumerate(zip(names, parts, strict=True)):
            temporary = folder / f".{name}.part"
            try:
                writer = shard_writer(temporary, index, len(parts), total, add_keys)
                _write_header_and_hole(writer, temporary, part)
                os.replace(temporary, folder / name)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            folder,
            f"cannot be written: {error.strerror or error}",
            "name a folder on a file system that holds sparse files of 100 GB",
        ) from error
    return folder / names[0]


def _write_header_and_hole(
    writer: "GGUFWriter", path: Path, tensors: Sequence[SparseTensor]
) -> None:
    import numpy as np

    # The numpy type is asked for and not used where a GGML type is given; that one may be of a
    # fork and unknown to gguf-py, which writes the number as it is.
    unused: Any = np.dtype(np.float32)
    hole = 0
    for t in tensors:
        type_id: Any = t.type_id
        writer.add_tensor_info(t.name, t.shape, unused, t.nbytes, raw_dtype=type_id)
        hole += writer.ggml_pad(t.nbytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, writer.ggml_pad(path.stat().st_size, writer.data_alignment) + hole)

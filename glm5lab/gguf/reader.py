"""All shards of a GGUF model as one tensor table, and access to the weights.

    model = open_gguf("GLM-5-Q4_K_M-00001-of-00010.gguf")   # any shard, or the folder
    model.metadata["glm-dsa.block_count"]
    model.dequantize("blk.3.ffn_gate_exps.weight", rows=slice(0, 1))  # one expert

Headers are parsed at once; data stay on disk (memory maps, read-only).
"""

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5lab.errors import InputError
from glm5lab.gguf.header import DOWNLOAD_AGAIN, Header, parse_header
from glm5lab.gguf.shards import find_shards
from glm5lab.gguf.tensors import Tensor, locate

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ARCHITECTURE", "GgufModel", "Tensor", "open_gguf", "require_glm5"]

ARCHITECTURE = "glm-dsa"
# Types that are plain numbers: GGML type number -> numpy dtype (BF16 has no numpy dtype).
PLAIN = {0: "<f4", 1: "<f2", 24: "<i1", 25: "<i2", 26: "<i4", 27: "<i8", 28: "<f8"}


@dataclass(eq=False)
class GgufModel:
    """A GGUF model: metadata of the first shard, tensors of all shards.

    Attributes:
        path: the first shard.
        shards: all shards, in order.
        metadata: Python values; arrays as lists.
        metadata_types: GGUF value types of each key, (4,) for u32, (9, 8) for a string array.
        tensors: by name, in file order.
    """

    path: Path
    shards: tuple[Path, ...]
    metadata: dict[str, Any]
    metadata_types: dict[str, tuple[int, ...]]
    tensors: dict[str, Tensor]
    _maps: dict[Path, np.ndarray[Any, Any]] = field(default_factory=dict, repr=False)

    @property
    def architecture(self) -> str:
        """`general.architecture` ("glm-dsa"), or "" when the file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def tensor(self, name: str) -> Tensor:
        """The entry of one tensor; InputError when the file lacks it."""
        if name not in self.tensors:
            raise InputError(
                self.path,
                f"no tensor {name!r} among its {len(self.tensors)}",
                "`glm5lab inspect` lists the names that are there",
            )
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as it lies in the file: uint8 [nbytes], memory mapped, read-only."""
        t = self.tensor(name)
        if t.nbytes == 0:
            return np.empty(0, np.uint8)
        if t.path not in self._maps:
            try:
                self._maps[t.path] = np.memmap(t.path, np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise InputError(t.path, f"cannot be mapped: {error}", "open it again") from error
        out = self._maps[t.path][t.offset : t.offset + t.nbytes]
        if out.nbytes != t.nbytes:
            raise InputError(t.path, f"has shrunk since it was opened (at {name})", DOWNLOAD_AGAIN)
        return out

    def dequantize(self, name: str, rows: slice | None = None) -> np.ndarray[Any, Any]:
        """A tensor's values.

        Args:
            name: GGUF name.
            rows: part of the first axis (experts of a stack, rows of a matrix); only that part
                is read and computed.

        Returns:
            float32 in torch order, a fresh array that the caller may change.

        Raises:
            InputError: no such tensor, or a type that the gguf package cannot dequantize.
        """
        t = self.tensor(name)
        data = self.raw(name)
        if t.type_id in PLAIN:
            values = data.view(PLAIN[t.type_id]).reshape(t.shape)
            return np.array(values if rows is None else values[rows], dtype=np.float32, order="C")
        from gguf import GGMLQuantizationType, quants

        row_bytes = t.nbytes // max(1, int(np.prod(t.shape[:-1], dtype=np.int64)))
        data = data.reshape(*t.shape[:-1], row_bytes)
        if rows is not None and len(t.shape) > 1:
            data, rows = data[rows], None
        if data.size == 0:
            return np.empty((*data.shape[:-1], t.shape[-1]), np.float32)
        try:
            values = quants.dequantize(data, GGMLQuantizationType(t.type_id))
        except (NotImplementedError, ValueError) as error:
            raise InputError(
                t.path,
                f"tensor {name!r} has type {t.type}, which the gguf package cannot dequantize",
                "use a file made by llama.cpp itself, with one of its own types",
            ) from error
        values = values if rows is None else values[rows]
        return np.array(values, dtype=np.float32, order="C")

    def table(self) -> "pd.DataFrame":
        """All tensors, one a row: name, layer, role, shape, type, nbytes, shard, offset."""
        import pandas as pd

        columns = ["name", "layer", "role", "shape", "type", "nbytes", "shard", "offset"]
        rows = [[getattr(t, c) for c in columns] for t in self.tensors.values()]
        return pd.DataFrame(rows, columns=columns).astype({"layer": "Int64"})


def open_gguf(path: str | Path) -> GgufModel:
    """Open a GGUF model.

    Args:
        path: any shard of a set, a single file, or a folder that holds one set.

    Raises:
        InputError: not there, not readable, not GGUF, damaged, truncated, shards missing.
    """
    shards = find_shards(Path(path))
    headers = [_read_header(shard) for shard in shards]
    _check_split(shards, headers)
    tensors: dict[str, Tensor] = {}
    for index, (shard, (header, size)) in enumerate(zip(shards, headers, strict=True)):
        for t in locate(header, size, shard, index):
            if t.name in tensors:
                other = tensors[t.name].path.name
                place = (
                    f"twice in {other}" if other == shard.name else f"in {other} and {shard.name}"
                )
                raise InputError(shard, f"tensor {t.name!r} occurs {place}", DOWNLOAD_AGAIN)
            tensors[t.name] = t
    first = headers[0][0]
    _check_tensor_count(shards, first, tensors)
    return GgufModel(shards[0], shards, first.metadata, first.metadata_types, tensors)


def require_glm5(model: GgufModel) -> None:
    """InputError when the model is no GLM-5 (architecture `glm-dsa`)."""
    if model.architecture != ARCHITECTURE:
        found = model.architecture or "none named in the metadata"
        fix = "name a GGUF file of GLM-5, GLM-5.1 or GLM-5.2"
        if model.architecture == "clip":
            fix = "this is a vision projector (mmproj); " + fix
        raise InputError(
            model.path, f"architecture {found!r}; glm5lab runs {ARCHITECTURE!r} (GLM-5)", fix
        )


def _read_header(path: Path) -> tuple[Header, int]:
    """Header of one shard and the file's size in bytes."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                return parse_header(b"", path), 0
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return parse_header(view, path), size
    except OSError as error:
        raise InputError(
            path, f"cannot be read: {error.strerror or error}", "check the path and permissions"
        ) from error


def _check_split(shards: tuple[Path, ...], headers: list[tuple[Header, int]]) -> None:
    """split.count and split.no (which counts from 0) must agree with the file names (from 1)."""
    for index, (path, (header, _)) in enumerate(zip(shards, headers, strict=True)):
        count = header.metadata.get("split.count", len(shards))
        number = header.metadata.get("split.no", index)
        if count not in (len(shards), 0):
            raise InputError(
                path,
                f"its metadata says it is shard {number + 1} of {count}, "
                f"its file name says {index + 1} of {len(shards)}",
                f"name the shards NAME-00001-of-{count:05d}.gguf and so on, all in one folder",
            )
        if number != index:
            raise InputError(
                path,
                f"its metadata says shard {number + 1} (split.no {number}, counted from 0), "
                f"its file name says {index + 1} of {len(shards)}",
                "the shard is renamed or swapped: download it again under its own name",
            )


def _check_tensor_count(
    shards: tuple[Path, ...], first: Header, tensors: dict[str, Tensor]
) -> None:
    announced = first.metadata.get("split.tensors.count")
    if isinstance(announced, int) and len(shards) > 1 and announced != len(tensors):
        raise InputError(
            shards[0],
            f"the set announces {announced} tensors (split.tensors.count), "
            f"its {len(shards)} shards hold {len(tensors)}",
            "the shards belong to different versions of the model: download all of them again",
        )

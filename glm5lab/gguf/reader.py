"""All shards of a GGUF model as one tensor table, and access to the weights.

    model = open_gguf("GLM-5-Q4_K_M-00001-of-00010.gguf")   # any shard, or the folder
    model.metadata["glm-dsa.block_count"]
    model.dequantize("blk.3.ffn_gate_exps.weight", rows=slice(0, 1))  # one expert

Headers are parsed at once; data stay on disk (memory maps, read-only).
"""

import math
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from glm5lab.errors import InputError
from glm5lab.gguf.byte_order import little_endian
from glm5lab.gguf.header import parse_header
from glm5lab.gguf.not_gguf import DOWNLOAD_AGAIN
from glm5lab.gguf.remote import remote_sources
from glm5lab.gguf.shards import find_shards
from glm5lab.gguf.source import FIRST_READ, LATER_READ, FileSource, Source, location
from glm5lab.gguf.split import check_numbers, check_total, merge
from glm5lab.gguf.tensors import Tensor, locate
from glm5lab.gguf.url import is_url

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ARCHITECTURE", "GgufModel", "Tensor", "open_gguf", "open_sources", "require_glm5"]

ARCHITECTURE = "glm-dsa"
DOWNLOAD_FIRST = "download it first, all shards into one folder, and name that"
# Each map holds a file open while anything of it is in use; sets may have a thousand files.
MAX_MAPS = 64
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
        warnings: what is odd about the files and harmless, a sentence each.
        byte_order: "little", or "big" for files made for s390x.
        header_only: the weights are not there, or not asked for; `raw` refuses.
    """

    path: PurePath
    shards: tuple[PurePath, ...]
    metadata: dict[str, Any]
    metadata_types: dict[str, tuple[int, ...]]
    tensors: dict[str, Tensor]
    warnings: list[str] = field(default_factory=list)
    byte_order: Literal["little", "big"] = "little"
    header_only: bool = False
    _maps: dict[PurePath, np.ndarray[Any, Any]] = field(default_factory=dict, repr=False)

    @property
    def architecture(self) -> str:
        """`general.architecture` ("glm-dsa"), or "" when the file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def files(self) -> tuple[Path, ...]:
        """All shards as local files, the first one first; InputError when they are remote."""
        local = tuple(p for p in self.shards if isinstance(p, Path))
        if len(local) < len(self.shards):
            raise InputError(self.path, "a remote file, only its header is read", DOWNLOAD_FIRST)
        return local

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
        """A tensor's bytes, uint8 [nbytes]: memory mapped and read-only.

        Of a big-endian file it is a copy, in the little-endian order that kernels expect.

        Raises:
            InputError: no such tensor, or its bytes are not here (header only, truncated, remote).
        """
        t, data = self.tensor(name), self._mapped(name)
        return little_endian(data, t) if t.big_endian else data

    def _mapped(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's bytes as they lie in the file."""
        t = self.tensor(name)
        if self.header_only or not isinstance(t.path, Path):
            raise InputError(
                t.path, f"only its header is read, not the weights (at {name})", DOWNLOAD_FIRST
            )
        if t.nbytes == 0:
            return np.empty(0, np.uint8)
        if t.path not in self._maps:
            if len(self._maps) >= MAX_MAPS:
                del self._maps[next(iter(self._maps))]
            try:
                self._maps[t.path] = np.memmap(t.path, np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise InputError(t.path, f"cannot be mapped: {error}", "open it again") from error
        out = self._maps[t.path][t.offset : t.offset + t.nbytes]
        if out.nbytes != t.nbytes:
            raise InputError(t.path, f"ends inside tensor {name!r}", DOWNLOAD_AGAIN)
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
            InputError: as for `raw`, or a type that the gguf package cannot dequantize.
        """
        t, data = self.tensor(name), self._mapped(name)
        row_bytes = t.nbytes // max(1, math.prod(t.shape[:-1]))
        data = data.reshape(*t.shape[:-1], row_bytes)
        if rows is not None and len(t.shape) > 1:
            data, rows = data[rows], None
        shape = (*data.shape[:-1], t.shape[-1])
        if data.size == 0:
            values = np.empty(shape, np.float32)
        else:
            values = values_of(little_endian(data, t) if t.big_endian else data, t)
        return np.array(values if rows is None else values[rows], dtype=np.float32, order="C")

    def table(self) -> "pd.DataFrame":
        """All tensors, one a row: name, layer, role, shape, type, nbytes, shard, offset.

        `shard` counts from 1, as file names do.
        """
        import pandas as pd

        columns = ["name", "layer", "role", "shape", "type", "nbytes", "shard", "offset"]
        rows = [[getattr(t, c) for c in columns] for t in self.tensors.values()]
        table = pd.DataFrame(rows, columns=columns).astype({"layer": "Int64"})
        table["shard"] += 1
        return table


def open_gguf(
    path: str | Path, *, header_only: bool = False, allow_truncated: bool = False
) -> GgufModel:
    """Open a GGUF model.

    Args:
        path: any shard of a set, a single file, or a folder that holds one set; or the URL of a
            file (https://..., hf://owner/repo/path) or Hub folder, of which only headers are read.
        header_only: do not ask for the weights: files may end behind their header.
        allow_truncated: list a file that ends inside its weights too, with a warning.

    Raises:
        InputError: not there, not readable, not GGUF, damaged, truncated, shards missing.
    """
    if is_url(path):
        with remote_sources(path) as remote:
            model = open_sources(remote, header_only=header_only, allow_truncated=allow_truncated)
        model.header_only = True
        return model
    sources = (
        FileSource(shard, LATER_READ if number else FIRST_READ)
        for number, shard in enumerate(find_shards(Path(path)))
    )
    return open_sources(sources, header_only=header_only, allow_truncated=allow_truncated)


def open_sources(
    sources: Iterable[Source], *, header_only: bool = False, allow_truncated: bool = False
) -> GgufModel:
    """The model whose shards, in order, are `sources`.

    Args:
        sources: all shards, the first one first; each is closed before the next one is asked for,
            since a set may have more files than a process may hold open.
        header_only: as for `open_gguf`; remote files too, whose weights stay where they are.
        allow_truncated: as for `open_gguf`.

    Raises:
        InputError: not GGUF, damaged, truncated, or shards that do not belong together.
    """
    names, sizes, headers = [], [], []
    for source in sources:
        with closing(source):
            headers.append(parse_header(source))
            names.append(source.name)
            sizes.append(source.size)
    shards = tuple(map(location, names))
    warnings = check_numbers(shards, headers)
    located: list[list[Tensor]] = []
    bare = header_only
    for index, (size, header) in enumerate(zip(sizes, headers, strict=True)):
        tensors, cut = locate(header, size, shards[index], index)
        located.append(tensors)
        if cut and not header_only:
            if not allow_truncated:
                raise cut
            bare = bare or size <= header.data_start
            warnings.append(f"{shards[index].name}: {cut.cause}")
    table = merge(shards, located)
    warnings += check_total(shards, headers, len(table))
    first = headers[0]
    return GgufModel(
        shards[0],
        shards,
        first.metadata,
        first.metadata_types,
        table,
        warnings,
        first.byte_order,
        bare,
    )


def is_adapter(model: GgufModel) -> bool:
    """Whether a file says that it holds an adapter for a model, such as LoRA's matrices."""
    return model.metadata.get("general.type") == "adapter"


def require_glm5(model: GgufModel) -> None:
    """InputError when the model is no GLM-5 (architecture `glm-dsa`)."""
    if is_adapter(model):
        fix = "name the model itself; glm5lab serves no adapters"
        raise InputError(model.path, "a LoRA adapter (general.type), not a model", fix)
    if model.architecture != ARCHITECTURE:
        found = model.architecture or "none named in the metadata"
        fix = "name a GGUF file of GLM-5, GLM-5.1 or GLM-5.2"
        if model.architecture == "clip":
            fix = "this is a vision projector (mmproj); " + fix
        raise InputError(
            model.path, f"architecture {found!r}; glm5lab runs {ARCHITECTURE!r} (GLM-5)", fix
        )


def values_of(data: np.ndarray[Any, Any], t: Tensor) -> np.ndarray[Any, Any]:
    """Values of little-endian bytes, uint8 [..., whole blocks]; InputError for a type unknown."""
    if t.type_id in PLAIN:
        return data.view(PLAIN[t.type_id])
    from gguf import GGMLQuantizationType, quants

    try:
        return np.asarray(quants.dequantize(data, GGMLQuantizationType(t.type_id)))
    except (NotImplementedError, ValueError) as error:
        raise InputError(
            t.path,
            f"tensor {t.name!r} has type {t.type}, which the gguf package cannot dequantize",
            "use a file made by llama.cpp itself, with one of its own types",
        ) from error

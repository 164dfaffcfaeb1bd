"""The tensor layouts of public GLM-5 files, as data/metadata/ records them.

    layouts = read_layouts()
    layouts["glm-5-q4_k_m"].nbytes

One JSON file each: where the facts were read, the metadata, and the type of every tensor role in
every block. No weights: `layout_files.write_layout` makes files of the right shape from it.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from glm5lab.architecture import Glm5Architecture
from glm5lab.errors import InputError
from glm5lab.gguf.shapes import role_shapes

FOLDER = Path(__file__).resolve().parents[2] / "data" / "metadata"
# Types of the ik_llama.cpp fork, which gguf-py does not know: number, weights a block, bytes a
# block, bytes before each row. From its ggml.h and ggml-common.h.
FORK_TYPES = {"Q6_0": (133, 32, 26, 0), "IQ2_KT": (153, 256, 68, 4)}
FIX = "compare it with the other files there"


@dataclass(frozen=True)
class LayoutTensor:
    """One tensor of a layout: GGUF name, shape in torch order, type's name, bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    type_id: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A public file's dimensions and types.

    Attributes:
        name: of the JSON file, without its ending.
        model: HF repository of the model.
        file: repository and path of the GGUF file.
        sources: what was read: {"url", "read" (date), "says"}.
        derived: why the types are a derivation and not read from the file, or "".
        published: what the source says of the whole, for checks ("bytes", "gib", "shard_bytes").
        metadata: GGUF keys and values, without the tokenizer.
        tensors: in file order.
        shard_tensors: tensors in each published shard; 0 for a metadata-only one.
    """

    name: str
    model: str
    file: str
    sources: tuple[dict[str, str], ...]
    derived: str
    published: dict[str, Any]
    metadata: dict[str, Any]
    tensors: tuple[LayoutTensor, ...]
    shard_tensors: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def architecture(self) -> Glm5Architecture:
        """Its dimensions."""
        return Glm5Architecture.from_metadata(self.metadata)


def read_layouts(folder: Path = FOLDER) -> dict[str, Layout]:
    """All layouts of a folder, by name.

    Raises:
        InputError: no such folder (an installed package has no data/), or a file is wrong.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError(folder, "holds no layouts", "run from a checkout of the repository")
    return {path.stem: read_layout(path) for path in files}


def read_layout(path: Path) -> Layout:
    """One layout.

    Raises:
        InputError: not readable, a field missing, or types that do not fit the shapes.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        arch = Glm5Architecture.from_metadata(data["metadata"])
        tensors = _tensors(arch, data["types"])
        counts = tuple(data["shard_tensors"])
        layout = Layout(
            path.stem, data["model"], data["file"], tuple(data["sources"]), data["derived"],
            data["published"], data["metadata"], tensors, counts,
        )  # fmt: skip
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror or error}", FIX) from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(path, f"is no layout: {type(error).__name__} {error}", FIX) from error
    if sum(counts) != len(tensors):
        raise InputError(path, f"shards hold {sum(counts)} tensors, types name {len(tensors)}", FIX)
    return layout


def layers_of(text: str) -> list[int]:
    """Block numbers of "0-2,6,10-12"."""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def type_size(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """GGML number of a type, and the bytes of a tensor of it.

    Raises:
        ValueError: unknown type, or rows that hold no whole blocks.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if name in FORK_TYPES:
        number, block, block_bytes, row_bytes = FORK_TYPES[name]
    elif name in GGMLQuantizationType.__members__:
        kind = GGMLQuantizationType[name]
        number, row_bytes = int(kind), 0
        block, block_bytes = GGML_QUANT_SIZES[kind]
    else:
        raise ValueError(f"type {name!r} is unknown")
    if shape[-1] % block:
        raise ValueError(f"rows of {shape[-1]} hold no whole {name} blocks of {block}")
    return number, prod(shape[:-1]) * (shape[-1] // block * block_bytes + row_bytes)


def _tensors(
    arch: Glm5Architecture, types: dict[str, str | dict[str, str]]
) -> tuple[LayoutTensor, ...]:
    """Tensors in the order of the published sets: outside the blocks first, then by block."""
    shapes = role_shapes(arch)
    found: dict[tuple[int, str], LayoutTensor] = {}
    for role, value in types.items():
        # Outside the blocks a type; inside them the blocks of each type.
        spread = {value: "-1"} if isinstance(value, str) else value
        for type_name, blocks in spread.items():
            type_id, nbytes = type_size(type_name, shapes[role])
            for block in [-1] if isinstance(value, str) else layers_of(blocks):
                name = role if block < 0 else f"blk.{block}.{role}"
                if (block, role) in found:
                    raise ValueError(f"{name} has two types")
                found[block, role] = LayoutTensor(name, shapes[role], type_name, type_id, nbytes)
    return tuple(found[key] for key in sorted(found))

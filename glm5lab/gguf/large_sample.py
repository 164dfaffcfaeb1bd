"""A GGUF set of GLM-5's full size that takes no room: real names, shapes and types, no weights.

The files are sparse: headers are there, the weights are holes that read as zeros. For measuring the
reader, and for trying `inspect`, `map` and `plan` at full size.
"""

import os
from itertools import pairwise, product
from pathlib import Path

from glm5lab.architecture import Glm5Architecture
from glm5lab.errors import InputError
from glm5lab.gguf.byte_level import byte_characters
from glm5lab.gguf.quantize_rules import quantized_type
from glm5lab.gguf.sample import add_metadata
from glm5lab.gguf.sample_tokenizer import (
    CONTROL,
    NORMAL,
    SPECIAL,
    TEXT_TOKENS,
    USER_DEFINED,
    SampleVocabulary,
)
from glm5lab.gguf.shapes import Shape, tensor_shapes
from glm5lab.gguf.shards import shard_name
from glm5lab.gguf.tensors import type_sizes

NAME = "GLM-5-sized-Q4_K_M"
TYPES = "q4_k_m"
ALIGNMENT = 32


def write_large_sample(folder: Path, shards: int = 12) -> Path:
    """Write the set: 79 blocks, 1,811 tensors, a vocabulary of 154,880 with its merges.

    Args:
        folder: made when it is not there.
        shards: number of files.

    Returns:
        The first shard. The set claims 456 GB and takes 7 MB on the disk.

    Raises:
        InputError: the folder cannot be written, or holds files only of limited size.
    """
    arch = Glm5Architecture.glm5()
    return write_sparse(folder, arch, large_vocabulary(arch.vocab_size), NAME, shards)


def write_sparse(
    folder: Path, arch: Glm5Architecture, vocabulary: SampleVocabulary, base: str, shards: int
) -> Path:
    """Write a set with llama-quantize's Q4_K_M types and no weights; see `write_large_sample`."""
    from gguf import GGUFValueType, GGUFWriter

    tensors = list(tensor_shapes(arch).items())
    bounds = [len(tensors) * i // shards for i in range(shards + 1)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index, (a, b) in enumerate(pairwise(bounds)):
            path = folder / _file_name(base, index, shards)
            writer = GGUFWriter(path, "glm-dsa")
            if index == 0:
                add_metadata(writer, arch, TYPES, vocabulary)
            else:
                writer.kv_data[0].clear()  # as llama-gguf-split: only the first has the metadata
            if shards > 1:
                writer.add_uint16("split.no", index)
                writer.add_uint16("split.count", shards)
                writer.add_key_value("split.tensors.count", len(tensors), GGUFValueType.INT32)
            nbytes = _add_tensors(writer, tensors[a:b], arch.block_count)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            start = -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT
            os.truncate(path, start + nbytes)
    except OSError as error:
        raise InputError(
            folder,
            f"cannot be written: {error.strerror or error}",
            "name a folder on a file system that holds sparse files of 100 GB",
        ) from error
    return folder / _file_name(base, 0, shards)


def _file_name(base: str, index: int, shards: int) -> str:
    return shard_name(base, index, shards) if shards > 1 else f"{base}.gguf"


def _add_tensors(writer: "object", tensors: list[tuple[str, Shape]], blocks: int) -> int:
    """Describe tensors to a GGUFWriter; returns the bytes of their data."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    assert isinstance(writer, GGUFWriter)
    total = 0
    for name, shape in tensors:
        kind = GGMLQuantizationType(quantized_type(name, shape, blocks, TYPES))
        _, block, block_bytes = type_sizes()[kind]
        nbytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return total


def large_vocabulary(size: int) -> SampleVocabulary:
    """A byte-level vocabulary as large as GLM-5's: syllables, pairs and triples of them.

    A triple can be merged from either side, so there are about two merges a token, as in GLM-5.
    """
    syllables = ["".join(s) for s in product("bcdfghjklmnprstvz", "aeiou")]
    tokens = [*byte_characters().values(), *syllables]
    merges = [" ".join(s) for s in syllables]
    for a, b in product(syllables, repeat=2):
        tokens.append(a + b)
        merges.append(f"{a} {b}")
    triples = size - len(tokens) - len(SPECIAL) - len(TEXT_TOKENS)
    for (a, b, c), _ in zip(product(syllables, repeat=3), range(triples), strict=False):
        tokens.append(a + b + c)
        merges += [f"{a + b} {c}", f"{a} {b + c}"]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(TEXT_TOKENS)
    return SampleVocabulary([*tokens, *SPECIAL, *TEXT_TOKENS], types, merges)

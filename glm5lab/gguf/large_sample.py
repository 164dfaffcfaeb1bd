"""A GGUF set of GLM-5's full size that takes no room: real names, shapes and types, no weights.

The files are sparse: headers are there, the weights are holes that read as zeros. For measuring the
reader, and for trying `inspect`, `map` and `plan` at full size.
"""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from glm5lab.architecture import Glm5Architecture
from glm5lab.gguf.byte_level import byte_characters
from glm5lab.gguf.layouts import type_size
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
from glm5lab.gguf.shapes import tensor_shapes
from glm5lab.gguf.tensors import type_sizes
from glm5lab.gguf.writing import SparseTensor, divide, write_sparse_files

if TYPE_CHECKING:
    from gguf import GGUFWriter

NAME = "GLM-5-sized-Q4_K_M"
TYPES = "q4_k_m"


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
    tensors = []
    for name, shape in tensor_shapes(arch).items():
        kind = quantized_type(name, shape, arch.block_count, TYPES)
        tensors.append(SparseTensor(name, shape, *type_size(type_sizes()[kind][0], shape)))

    def add_keys(writer: "GGUFWriter") -> None:
        add_metadata(writer, arch, TYPES, vocabulary)

    return write_sparse_files(folder, base, divide(tensors, shards), add_keys)


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

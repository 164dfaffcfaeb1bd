"""A GGUF file again, with every tensor as float32: what llama.cpp needs to act as a referee.

llama.cpp multiplies F16, BF16 and quantized weights with activations rounded to fewer bits, which
moves log-probabilities and flips top-k choices. On float32 weights it computes in float32.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from glm5lab.check.progress import say
from glm5lab.errors import InputError

HEADER_ROOM = 64 << 20  # bytes; metadata and tokenizer


def is_float32(shards: Sequence[Path]) -> bool:
    """Whether every tensor of the shards is F32 already."""
    import gguf

    f32 = gguf.GGMLQuantizationType.F32
    return all(t.tensor_type == f32 for shard in shards for t in gguf.GGUFReader(shard).tensors)


def write_float32(shards: Sequence[Path], out: Path) -> None:
    """Writes all shards as one float32 file, a tensor at a time.

    Raises:
        InputError: the disk that holds `out` has too little room.
    """
    import gguf

    readers = [gguf.GGUFReader(shard) for shard in shards]
    tensors = [t for reader in readers for t in reader.tensors]
    need = sum(4 * int(t.n_elements) for t in tensors) + HEADER_ROOM
    free = shutil.disk_usage(out.parent).free
    if free < need:
        raise InputError(
            out.parent,
            f"has {free / 1e9:.1f} GB free, llama.cpp's float32 copy takes {need / 1e9:.1f} GB",
            "set TMPDIR to a larger disk, or check against hf only",
        )
    writer = gguf.GGUFWriter(out, str(readers[0].fields["general.architecture"].contents()))
    copy_metadata(readers[0], writer)
    for t in tensors:
        shape = [int(n) for n in reversed(t.shape)]
        writer.add_tensor_info(t.name, shape, np.dtype(np.float32), 4 * int(t.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, t in enumerate(tensors):
        values = gguf.quants.dequantize(t.data, t.tensor_type)
        writer.write_tensor_data(np.ascontiguousarray(values, np.float32))
        if number % 100 == 0 and need > 1 << 30:
            say(f"float32 copy for llama.cpp, tensor {number} of {len(tensors)}")
    writer.close()


def copy_metadata(reader: object, writer: object) -> None:
    """Copies every key with its type, except what describes the old shards."""
    import gguf

    for key, field in reader.fields.items():  # type: ignore[attr-defined]
        if key.startswith(("GGUF.", "split.")) or key == "general.architecture":
            continue
        value, kind = field.contents(), field.types[0]
        if key == "general.file_type":
            value = int(gguf.LlamaFileType.ALL_F32)
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub)  # type: ignore[attr-defined]

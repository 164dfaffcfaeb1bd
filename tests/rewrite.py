"""Copies of GGUF files with other tensors: renamed, fused, left out or added."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, tuple[np.ndarray, int]]  # name -> values or packed rows, GGML type number


def rewrite(first: Path, out: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Write a one-file copy of a model through gguf-py, its tensors changed.

    Args:
        first: a GGUF file (one shard).
        out: the copy.
        change: from the file's tensors to the copy's.
    """
    import gguf

    from glm5lab.check.f32_gguf import copy_metadata

    reader: Any = gguf.GGUFReader(first)
    writer = gguf.GGUFWriter(out, "glm-dsa")
    copy_metadata(reader, writer)
    tensors = {t.name: (np.array(t.data), int(t.tensor_type)) for t in reader.tensors}
    for name, (data, kind) in change(tensors).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def fuse_experts(tensors: Tensors) -> Tensors:
    """Gate and up stacks joined as convert_hf_to_gguf.py --fuse-gate-up-exps does: along rows."""
    fused = dict(tensors)
    for name in tensors:
        if name.endswith("ffn_gate_exps.weight"):
            gate, kind = fused.pop(name)
            up, other = fused.pop(name.replace("gate", "up"))
            assert kind == other
            joined = np.concatenate([gate, up], axis=1)
            fused[name.replace("gate", "gate_up")] = joined, kind
    return fused

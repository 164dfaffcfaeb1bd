"""GGUF tensors as the parameters of transformers' GLM-5: the referee's own way, not the loader's.

A check that reused glm5lab.loading would share its mistakes. Here names come from gguf-py's name
map, bytes from gguf-py's reader, values from gguf-py's dequantization.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5lab.errors import InputError

if TYPE_CHECKING:
    import torch


class ReferenceTensors:
    """All tensors of a set of shards, read and dequantized by gguf-py.

    Args:
        shards: every file of the set.
        block_count: blocks in the file, the MTP block included.
    """

    def __init__(self, shards: Iterable[Path], block_count: int) -> None:
        import gguf

        self.path = next(iter(shards))
        self._tensors: dict[str, Any] = {}
        for shard in shards:
            try:
                reader = gguf.GGUFReader(shard)
            except ValueError as error:
                raise InputError(
                    shard, f"gguf-py cannot read it ({error})", "use a file of known types"
                ) from error
            self._tensors.update({t.name: t for t in reader.tensors})
        self._names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM_DSA, block_count)

    def gguf_name(self, hf_name: str) -> str | None:
        """The GGUF name that gguf-py knows for a parameter of the HF checkpoint."""
        # gguf-py registers the bias without the underscore that HF's buffer has.
        name = hf_name.replace("e_score_correction_bias", "e_score_correction.bias")
        found: str | None = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return found

    def has(self, hf_name: str) -> bool:
        """Whether the file holds this parameter."""
        return self.gguf_name(hf_name) in self._tensors

    def get(self, hf_name: str) -> np.ndarray:
        """float32 values in torch order; InputError where the file lacks the tensor."""
        import gguf

        name = self.gguf_name(hf_name)
        if name is None or name not in self._tensors:
            raise InputError(
                self.path,
                f"holds no tensor {name} for {hf_name}",
                "use a complete GLM-5 file",
            )
        tensor = self._tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        # Plain types come as views of the read-only file, others as fresh arrays.
        return np.array(values, np.float32, copy=not values.flags.writeable or None).reshape(shape)


def kv_b(tensors: ReferenceTensors, hf_name: str) -> np.ndarray:
    """[heads * (nope + v), kv_lora] from k_b [heads, kv_lora, nope] and v_b [heads, v, kv_lora].

    A head's rows are its nope rows, then its value rows.
    """
    if tensors.has(hf_name):
        return tensors.get(hf_name)
    k_b = tensors.get(hf_name.replace("kv_b_proj", "k_b_proj"))
    v_b = tensors.get(hf_name.replace("kv_b_proj", "v_b_proj"))
    heads, rank, nope = k_b.shape
    joined = np.empty((heads, nope + v_b.shape[1], rank), np.float32)
    for head in range(heads):
        joined[head, :nope] = k_b[head].T
        joined[head, nope:] = v_b[head]
    return joined.reshape(-1, rank)


def gate_up(tensors: ReferenceTensors, hf_name: str) -> np.ndarray:
    """[experts, 2 * intermediate, hidden]: the gate's rows, then the up projection's."""
    fused = f"{hf_name}.weight"
    if tensors.has(fused):
        return tensors.get(fused)
    gate = tensors.get(hf_name.replace("gate_up_proj", "gate_proj.weight"))
    up = tensors.get(hf_name.replace("gate_up_proj", "up_proj.weight"))
    return np.concatenate([gate, up], axis=1)


def lm_head(tensors: ReferenceTensors, hf_name: str) -> np.ndarray:
    """The output projection; a file without one ties it to the embedding."""
    return tensors.get(hf_name if tensors.has(hf_name) else "model.embed_tokens.weight")


BUILDERS: dict[str, Callable[[ReferenceTensors, str], np.ndarray]] = {
    "kv_b_proj.weight": kv_b,
    "experts.gate_up_proj": gate_up,
    "experts.down_proj": lambda tensors, name: tensors.get(f"{name}.weight"),
    "lm_head.weight": lm_head,
}


def parameters(
    tensors: ReferenceTensors, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every parameter named in `shapes`, one at a time so that weights are held once.

    Args:
        tensors: the file.
        shapes: HF parameter name to the shape that the model has for it.

    Raises:
        InputError: a tensor is missing or has another shape.
    """
    import torch

    for name, shape in shapes.items():
        build = next((b for end, b in BUILDERS.items() if name.endswith(end)), None)
        values = build(tensors, name) if build else tensors.get(name)
        if values.shape != shape:
            raise InputError(
                tensors.path,
                f"{name} has shape {values.shape}, the metadata asks for {shape}",
                "use a file whose metadata fits its tensors",
            )
        yield name, torch.from_numpy(values)

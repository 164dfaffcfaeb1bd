"""Changes to values between the file and Hugging Face's names: join kv_b, unstack experts.

The loader joins kv_b by `join_kv_b`; `hf_weights` gives whole tensors, as a checkpoint holds them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.names import NameMapping, hf_names

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[np.float32]]


def join_kv_b(k_b: Array, v_b: Array) -> Array:
    """HF's kv_b_proj from the two tensors that GGUF splits it into.

    Args:
        k_b: [heads, kv_lora, nope], each head transposed as llama.cpp stores it.
        v_b: [heads, v, kv_lora].

    Returns:
        [heads * (nope + v), kv_lora]; within a head the key rows come first.

    Raises:
        ValueError: the two do not belong together.
    """
    if k_b.ndim != 3 or v_b.ndim != 3 or k_b.shape[:2] != (v_b.shape[0], v_b.shape[2]):
        raise ValueError(
            f"attn_k_b {k_b.shape} and attn_v_b {v_b.shape}: expected [heads, kv_lora, nope] and "
            "[heads, v, kv_lora] of the same heads and kv_lora"
        )
    joined = np.concatenate([k_b.transpose(0, 2, 1), v_b], axis=1)
    return joined.reshape(-1, joined.shape[-1])


def weights(model: GgufModel, mapping: NameMapping) -> Iterator[tuple[str, Array]]:
    """The Hugging Face tensors, float32, that one stacked or plain tensor of the file holds.

    Stacks are read expert by expert, so that no more than one expert is in memory at a time. In a
    stack of gate and up projections each expert's first half of the rows is the gate's
    (llama.cpp: convert_hf_to_gguf.py, --fuse-gate-up-exps; read back in llama-graph.cpp).
    """
    if "{e}" not in mapping.hf:
        yield mapping.hf, model.dequantize(mapping.gguf)
        return
    experts = model.tensors[mapping.gguf].shape[0]
    names = hf_names(mapping, experts)
    halves = len(names) // experts
    for number in range(experts):
        values = model.dequantize(mapping.gguf, rows=slice(number, number + 1))[0]
        for half, part in enumerate(np.split(values, halves)):
            yield names[number * halves + half], part


def hf_weights(
    model: GgufModel, mappings: Sequence[NameMapping]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every tensor that is loaded, under its Hugging Face name, float32, in file order.

    Args:
        model: the opened file.
        mappings: from `names.mappings`; dropped ones are passed over.
    """
    import torch

    sources: dict[str, dict[str, NameMapping]] = defaultdict(dict)
    for mapping in mappings:
        if mapping.hf:
            sources[mapping.hf][mapping.gguf.split(".")[-2]] = mapping
    for hf, by_role in sources.items():
        if "attn_k_b" in by_role:
            parts = [model.dequantize(by_role[role].gguf) for role in ("attn_k_b", "attn_v_b")]
            yield hf, torch.from_numpy(join_kv_b(*parts))
            continue
        for name, values in weights(model, *by_role.values()):
            yield name, torch.from_numpy(values)

"""The block of multi-token prediction, which vLLM loads as a model of its own (deepseek_mtp.py)."""

from collections.abc import Iterator, Mapping
from typing import Any

from glm5lab.architecture import Glm5Architecture
from glm5lab.errors import InputError
from glm5lab.gguf.kernels import can_dequantize
from glm5lab.gguf.reader import GgufModel
from glm5lab.gguf.shapes import Shape, block_shapes, outside_shapes
from glm5lab.loading.names import BLOCK, CHANGES, NameMapping, vllm_parameter

# Roles of the block that no decoder layer has -> name behind the layer.
NEXTN = {
    "nextn.eh_proj.weight": "eh_proj.weight",
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.embed_tokens.weight": "embed_tokens.weight",
    "nextn.shared_head_head.weight": "shared_head.head.weight",
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
}
# Copies of the model's own that published files leave out.
OWN = {
    "nextn.embed_tokens.weight": "token_embd.weight",
    "nextn.shared_head_head.weight": "output.weight",
}
NOT_MTP = "a decoder layer's, not used by multi-token prediction"


def mtp_mappings(model: GgufModel, config: Mapping[str, Any]) -> list[NameMapping]:
    """The mapping of every tensor for vLLM's MTP model; decoder layers are dropped.

    Args:
        model: the opened file.
        config: from `gguf.config.hf_config`.

    Raises:
        InputError: the file holds no MTP block, or not all of it.
    """
    arch = Glm5Architecture.from_metadata(model.metadata)
    if not arch.num_nextn_predict_layers or not config.get("num_nextn_predict_layers"):
        raise InputError(
            model.path,
            "holds no block of multi-token prediction (nextn_predict_layers)",
            "use a file that keeps it, or leave speculative decoding out",
        )
    found: dict[str, NameMapping] = {}
    problems: list[str] = []
    for layer in range(arch.num_hidden_layers, arch.block_count):
        for mapping, shape in _block(model, arch, layer):
            tensor = model.tensors.get(mapping.gguf)
            if tensor is None:
                problems.append(f"{mapping.gguf}: missing, expected shape {list(shape)}")
            elif tensor.shape != shape:
                problems.append(
                    f"{tensor.name}: expected shape {list(shape)}, found {list(tensor.shape)}"
                )
            elif not can_dequantize(tensor.type):
                problems.append(f"{tensor.name}: type {tensor.type} cannot be dequantized here")
            found[mapping.gguf] = mapping
    if problems:
        cause = f"multi-token prediction is incomplete: {'; '.join(problems[:10])}"
        raise InputError(model.path, cause, "use a complete file, or no speculative decoding")
    return [found.get(name) or NameMapping(name, dropped=NOT_MTP) for name in model.tensors]


def _block(
    model: GgufModel, arch: Glm5Architecture, layer: int
) -> Iterator[tuple[NameMapping, Shape]]:
    """What fills one MTP layer, with the shapes expected."""
    prefix = f"model.layers.{layer}."
    for role, shape in block_shapes(arch, layer).items():
        name = f"blk.{layer}.{role}"
        if role in NEXTN:
            if name not in model.tensors and role in OWN:
                name, shape = OWN[role], outside_shapes(arch)[OWN[role]]
            hf = prefix + NEXTN[role]
            vllm = "model.embed_tokens.weight" if "embed_tokens" in role else hf
            yield NameMapping(name, hf, vllm), shape
            continue
        vllm, part = vllm_parameter(f"{prefix}mtp_block.{BLOCK[role]}")
        change = CHANGES.get(role, "")
        yield NameMapping(name, prefix + BLOCK[role], vllm, part, change), shape


def is_mtp(parameters: Mapping[str, Any]) -> bool:
    """Whether parameters are those of vLLM's MTP model."""
    return any(".mtp_block." in name for name in parameters)

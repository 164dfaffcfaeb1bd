"""GGUF name <-> Hugging Face name <-> vLLM parameter, as one table.

Names are matched whole and renamed by whole components, never by substrings: a rename of
`weight` must not touch `weights_proj`. Sources: llama.cpp's gguf-py tensor names (architecture
glm-dsa), transformers' GlmMoeDsaForCausalLM, vLLM's DeepseekV2ForCausalLM.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Inside blk.N and model.layers.N. {e} stands for the expert number.
BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_k_b.weight": "self_attn.kv_b_proj.weight",
    "attn_v_b.weight": "self_attn.kv_b_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps.weight": "mlp.experts.{e}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{e}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{e}.down_proj.weight",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
CHANGES = {
    "attn_k_b.weight": "transposed a head, joined with v",
    "attn_v_b.weight": "joined after k, a head",
    "ffn_gate_exps.weight": "unstacked",
    "ffn_up_exps.weight": "unstacked",
    "ffn_down_exps.weight": "unstacked",
}
# Components that vLLM fuses: old component -> (new component, part of the fused parameter).
FUSED: Mapping[str, tuple[str, int]] = {
    "q_a_proj": ("fused_qkv_a_proj", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "wk": ("wk_weights_proj", 0),
    "weights_proj": ("wk_weights_proj", 1),
}
# vLLM stacks the experts again: HF projection -> (parameter, part).
EXPERTS = {
    "gate_proj": ("w13_weight", "w1"),
    "up_proj": ("w13_weight", "w3"),
    "down_proj": ("w2_weight", "w2"),
}
BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class NameMapping:
    """Where one tensor of the file goes.

    Attributes:
        gguf: name in the file.
        hf: Hugging Face name; `{e}` where the tensor is a stack of experts; "" when dropped.
        vllm: vLLM parameter; "" when dropped.
        part: which part of a fused parameter, or None for a whole one.
        change: what happens to the values besides dequantization; "" for nothing.
        dropped: why the tensor is not loaded; "" when it is.
    """

    gguf: str
    hf: str = ""
    vllm: str = ""
    part: int | str | None = None
    change: str = ""
    dropped: str = ""


def rename_component(name: str, old: str, new: str) -> str:
    """Replace the dot-separated component `old` by `new`; other components stay as they are."""
    return ".".join(new if component == old else component for component in name.split("."))


def vllm_parameter(hf: str) -> tuple[str, int | str | None]:
    """The vLLM parameter of a Hugging Face name, and the part of it when it is fused."""
    components = hf.split(".")
    if "experts" in components:
        at = components.index("experts")
        parameter, part = EXPERTS[components[at + 2]]
        return ".".join([*components[: at + 1], "routed_experts", parameter]), part
    for old, (new, number) in FUSED.items():
        if old in components:
            return rename_component(hf, old, new), number
    return hf, None


def map_name(gguf: str, config: Mapping[str, Any]) -> NameMapping | None:
    """The mapping of one tensor, or None for a name that GLM-5 does not have.

    Args:
        gguf: tensor name in the file.
        config: the model's HF configuration (`gguf.config.hf_config`).
    """
    if gguf in OUTSIDE:
        hf = OUTSIDE[gguf]
        return NameMapping(gguf, hf, hf)
    if gguf == "rope_freqs.weight":
        return NameMapping(gguf, dropped="rotary frequencies are computed from rope.freq_base")
    match = BLOCK_NAME.fullmatch(gguf)
    if match is None:
        return None
    layer, role = int(match[1]), match[2]
    if role not in BLOCK and not role.startswith("nextn."):
        return None
    layers = config["num_hidden_layers"]
    if layer >= layers + (config.get("num_nextn_predict_layers") or 0):
        return None
    if layer >= layers:
        return NameMapping(gguf, dropped="multi-token-prediction block, not used without MTP")
    if role.startswith("nextn."):
        return None
    if role.startswith("indexer.") and not has_indexer(layer, config):
        return NameMapping(gguf, dropped="the layer shares the top-k of an earlier layer")
    hf = f"model.layers.{layer}.{BLOCK[role]}"
    vllm, part = vllm_parameter(hf)
    return NameMapping(gguf, hf, vllm, part, CHANGES.get(role, ""))


def has_indexer(layer: int, config: Mapping[str, Any]) -> bool:
    """Whether a layer chooses its own top-k (IndexShare: some layers reuse an earlier choice)."""
    types = config.get("indexer_types")
    return types is None or types[layer] == "full"


def map_names(
    names: Iterable[str], config: Mapping[str, Any]
) -> tuple[list[NameMapping], list[str]]:
    """Mappings of all tensors, and the names that GLM-5 does not have."""
    mappings, unknown = [], []
    for name in names:
        mapping = map_name(name, config)
        if mapping is None:
            unknown.append(name)
        else:
            mappings.append(mapping)
    return mappings, unknown

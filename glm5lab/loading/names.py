"""GGUF name <-> Hugging Face name <-> vLLM parameter, as one table.

Names are matched whole and renamed by whole components, never by substrings: a rename of
`weight` must not touch `weights_proj`. Sources: llama.cpp's gguf-py tensor names (architecture
glm-dsa), transformers' GlmMoeDsaForCausalLM, vLLM's DeepseekV2ForCausalLM.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from glm5lab.architecture import has_indexer
from glm5lab.gguf.tensors import BLOCK_NAME

if TYPE_CHECKING:
    import pandas as pd

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Inside blk.N and model.layers.N. {e} stands for the expert number, {gate,up} for both in turn.
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
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
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
    "ffn_gate_up_exps.weight": "mlp.experts.{e}.{gate,up}_proj.weight",
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
    "ffn_gate_up_exps.weight": "unstacked, gate rows first",
    "ffn_down_exps.weight": "unstacked",
}
# What one tensor may hold in place of two. llama.cpp's converter writes the fused experts with
# --fuse-gate-up-exps, gate rows first; attn_kv_b is the matrix before it was split.
INSTEAD_OF = {
    "ffn_gate_up_exps.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "attn_kv_b.weight": ("attn_k_b.weight", "attn_v_b.weight"),
}
# Components that vLLM fuses: old component -> (new component, part of the fused parameter).
FUSED: Mapping[str, tuple[str, str]] = {
    "q_a_proj": ("fused_qkv_a_proj", "0"),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", "1"),
    "gate_proj": ("gate_up_proj", "0"),
    "up_proj": ("gate_up_proj", "1"),
    "wk": ("wk_weights_proj", "0"),
    "weights_proj": ("wk_weights_proj", "1"),
}
# vLLM stacks the experts again: HF projection -> (parameter, part).
EXPERTS = {
    "gate_proj": ("w13_weight", "w1"),
    "up_proj": ("w13_weight", "w3"),
    "{gate,up}_proj": ("w13_weight", "w1+w3"),
    "down_proj": ("w2_weight", "w2"),
}
ROPE_FREQS = "rotary frequencies are computed from rope.freq_base"
MTP = "multi-token-prediction block, not used without MTP"
SHARED_INDEXER = "the layer shares the top-k of an earlier layer"


@dataclass(frozen=True)
class NameMapping:
    """Where one tensor of the file goes.

    Attributes:
        gguf: name in the file.
        hf: Hugging Face name; `{e}` where the tensor is a stack of experts, `{gate,up}` where it
            holds both; "" when dropped.
        vllm: vLLM parameter; "" when dropped.
        part: which part of a fused parameter ("0", "w1"); "" for a whole one.
        change: what happens to the values besides dequantization; "" for nothing.
        dropped: why the tensor is not loaded; "" when it is.
    """

    gguf: str
    hf: str = ""
    vllm: str = ""
    part: str = ""
    change: str = ""
    dropped: str = ""


def rename_component(name: str, old: str, new: str) -> str:
    """Replace the dot-separated component `old` by `new`; other components stay as they are."""
    return ".".join(new if component == old else component for component in name.split("."))


def vllm_parameter(hf: str) -> tuple[str, str]:
    """The vLLM parameter of a Hugging Face name, and the part of it when it is fused."""
    components = hf.split(".")
    if "experts" in components:
        at = components.index("experts")
        parameter, part = EXPERTS[components[at + 2]]
        return ".".join([*components[: at + 1], "routed_experts", parameter]), part
    for old, (new, number) in FUSED.items():
        if old in components:
            return rename_component(hf, old, new), number
    return hf, ""


@cache
def role_frame() -> "pd.DataFrame":
    """The table of roles: role, inside (a block), hf and vllm (behind the layer), part, change."""
    import pandas as pd

    rows = []
    for inside, roles in ((False, OUTSIDE), (True, BLOCK)):
        for role, hf in roles.items():
            vllm, part = vllm_parameter(hf)
            rows.append((role, inside, hf, vllm, part, CHANGES.get(role, "")))
    columns = ["role", "inside", "hf", "vllm", "part", "change"]
    return pd.DataFrame(rows, columns=columns, dtype=object).astype({"inside": bool})


def split_names(names: Iterable[str]) -> "pd.DataFrame":
    """Columns name, layer (Int64, none outside the blocks), role (the name without its block)."""
    import pandas as pd

    name = pd.Series(list(names), dtype=object, name="name")
    parts = name.str.extract(BLOCK_NAME)
    layer = pd.to_numeric(parts[0]).astype("Int64")
    return pd.DataFrame({"name": name, "layer": layer, "role": parts[1].fillna(name)})


def name_frame(names: Iterable[str], config: Mapping[str, Any]) -> "pd.DataFrame":
    """The mapping of every name, one a row, in the order given.

    Args:
        names: tensor names in the file.
        config: the model's HF configuration (`gguf.config.hf_config`).

    Returns:
        Columns name, layer, role, hf, vllm, part, change, dropped (the reason or "") and known
        (False for a name that GLM-5 does not have).
    """
    import numpy as np

    frame = split_names(names)
    frame["inside"] = frame["layer"].notna()
    frame = frame.merge(role_frame(), on=["role", "inside"], how="left")
    layers = config["num_hidden_layers"]
    blocks = layers + (config.get("num_nextn_predict_layers") or 0)
    number = frame["layer"].fillna(-1).astype("int64")
    listed, nextn = frame["hf"].notna(), frame["role"].str.startswith("nextn.") & frame["inside"]
    mtp = (number >= layers) & (number < blocks) & (listed | nextn)
    rope = (frame["role"] == "rope_freqs.weight") & ~frame["inside"]
    without = [i for i in range(layers) if not has_indexer(config, i)]
    shared = listed & frame["role"].str.startswith("indexer.") & number.isin(without)
    frame["dropped"] = np.select([rope, mtp, shared], [ROPE_FREQS, MTP, SHARED_INDEXER], "")
    frame["known"] = rope | mtp | (listed & (number < layers))
    mapped = frame["known"] & (frame["dropped"] == "")
    prefix = ("model.layers." + number.astype(str) + ".").where(frame["inside"], "")
    for column in ("hf", "vllm"):
        frame[column] = (prefix + frame[column].fillna("").astype(str)).where(mapped, "")
    for column in ("part", "change"):
        frame[column] = frame[column].where(mapped, "")
    return frame.drop(columns="inside")


def mappings(frame: "pd.DataFrame") -> list[NameMapping]:
    """The rows of a `name_frame` that GLM-5 has, as objects."""
    columns = ["name", "hf", "vllm", "part", "change", "dropped"]
    return [NameMapping(*row) for row in frame.loc[frame["known"], columns].to_numpy().tolist()]


def map_name(gguf: str, config: Mapping[str, Any]) -> NameMapping | None:
    """The mapping of one tensor, or None for a name that GLM-5 does not have."""
    return next(iter(mappings(name_frame([gguf], config))), None)


def hf_names(mapping: NameMapping, experts: int) -> list[str]:
    """The Hugging Face names that a tensor holds: one, or those of its experts, in order.

    Args:
        mapping: of a tensor that is loaded.
        experts: how many a stack holds (its first axis).
    """
    if "{e}" not in mapping.hf:
        return [mapping.hf]
    halves = ("gate", "up") if "{gate,up}" in mapping.hf else ("",)
    return [
        mapping.hf.replace("{e}", str(number)).replace("{gate,up}", half)
        for number in range(experts)
        for half in halves
    ]

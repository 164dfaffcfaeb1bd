"""Random but non-degenerate weights of a tiny GLM-5, in HF terms, and their GGUF form.

The HF tensors come first and the GGUF ones are derived from them, so that the HF twin does not
depend on the code that turns GGUF back into HF names (loading/).
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from glm5lab.architecture import Glm5Architecture

Array = npt.NDArray[np.float32]

# HF component -> GGUF component inside a block; whole components, never substrings.
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def hf_shapes(arch: Glm5Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes [out, in] of the HF checkpoint, MTP layers included."""
    wide = (arch.vocab_size, arch.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": wide}
    for layer in range(arch.block_count):
        shapes |= {f"model.layers.{layer}.{k}": v for k, v in _layer_shapes(arch, layer).items()}
    return shapes | {"model.norm.weight": (arch.hidden_size,), "lm_head.weight": wide}


def _layer_shapes(a: Glm5Architecture, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, heads = a.hidden_size, a.num_attention_heads
    kv_b = heads * (a.qk_nope_head_dim + a.v_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (a.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (a.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * a.qk_head_dim, a.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (a.latent_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (a.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (kv_b, a.kv_lora_rank),
        "self_attn.o_proj.weight": (hidden, heads * a.v_head_dim),
    }
    if a.has_indexer(layer):
        shapes |= {
            "self_attn.indexer.wq_b.weight": (a.index_n_heads * a.index_head_dim, a.q_lora_rank),
            "self_attn.indexer.wk.weight": (a.index_head_dim, hidden),
            "self_attn.indexer.k_norm.weight": (a.index_head_dim,),
            "self_attn.indexer.k_norm.bias": (a.index_head_dim,),
            "self_attn.indexer.weights_proj.weight": (a.index_n_heads, hidden),
        }
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if layer < a.first_k_dense_replace:
        return shapes | _mlp_shapes("mlp", hidden, a.intermediate_size)
    shapes["mlp.gate.weight"] = (a.n_routed_experts, hidden)
    shapes[CORRECTION_BIAS] = (a.n_routed_experts,)
    for expert in range(a.n_routed_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, a.moe_intermediate_size)
    shared = a.moe_intermediate_size * a.n_shared_experts
    shapes |= _mlp_shapes("mlp.shared_experts", hidden, shared)
    if layer >= a.num_hidden_layers:
        shapes |= {
            "eh_proj.weight": (hidden, 2 * hidden),
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "embed_tokens.weight": (a.vocab_size, hidden),
            "shared_head.head.weight": (a.vocab_size, hidden),
            "shared_head.norm.weight": (hidden,),
        }
    return shapes


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def random_weights(arch: Glm5Architecture, seed: int) -> dict[str, Array]:
    """Random HF weights, float32; logits come out with a standard deviation of about 1.

    Norms are 1 + 0.2 n, the indexer's k_norm bias 0.3 n, the routing correction 0.1 n: a loader
    that drops one of them, or takes another's, changes the result visibly.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, shape in hf_shapes(arch).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        weights[name] = values * scale(name, shape) + centre(name)
    # Published checkpoints repeat the model's own embedding and head in each MTP layer.
    for layer in range(arch.num_hidden_layers, arch.block_count):
        weights[f"model.layers.{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        weights[f"model.layers.{layer}.shared_head.head.weight"] = weights["lm_head.weight"]
    return weights


def centre(name: str) -> np.float32:
    """The mean of a tensor's values: 1 for norms, else 0."""
    return np.float32("norm" in name and name.endswith(".weight"))


def scale(name: str, shape: tuple[int, ...]) -> np.float32:
    """The standard deviation of a tensor's values; see `random_weights`."""
    if name.endswith(CORRECTION_BIAS):
        return np.float32(0.1)
    if name.endswith("k_norm.bias"):
        return np.float32(0.3)
    if "norm" in name:
        return np.float32(0.2)
    if name.endswith("embed_tokens.weight"):
        return np.float32(1.0)
    gain = 1.0 if name == "lm_head.weight" else 1.3
    return np.float32(gain * shape[-1] ** -0.5)


def to_gguf(arch: Glm5Architecture, weights: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """GGUF names and values, float32 in torch order, block by block."""
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        yield TOP_NAMES[name], weights[name]
    for layer in range(arch.block_count):
        prefix = f"model.layers.{layer}."
        local = {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}
        for name, values in _block_to_gguf(arch, local):
            yield f"blk.{layer}.{name}", values


def _block_to_gguf(a: Glm5Architecture, local: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    for name, values in local.items():
        if EXPERT.fullmatch(name):
            continue
        if name == "self_attn.kv_b_proj.weight":
            nope = a.qk_nope_head_dim
            heads = values.reshape(a.num_attention_heads, nope + a.v_head_dim, a.kv_lora_rank)
            # llama.cpp multiplies the query by k_b before attention: one transpose a head.
            yield "attn_k_b.weight", np.ascontiguousarray(heads[:, :nope].transpose(0, 2, 1))
            yield "attn_v_b.weight", np.ascontiguousarray(heads[:, nope:])
        elif name == CORRECTION_BIAS:
            yield "exp_probs_b.bias", values
        else:
            module, _, kind = name.rpartition(".")
            yield f"{BLOCK_NAMES[module]}.{kind}", values
    experts = range(a.n_routed_experts if "mlp.gate.weight" in local else 0)
    for part in ("gate", "up", "down"):
        stack = [local[f"mlp.experts.{e}.{part}_proj.weight"] for e in experts]
        if stack:
            yield f"ffn_{part}_exps.weight", np.stack(stack)


def from_gguf_values(weights: dict[str, Array], rounded: dict[str, Array]) -> dict[str, Array]:
    """HF weights whose values are the rounded ones of a quantized file.

    Args:
        weights: the unrounded HF weights; decide names and shapes.
        rounded: dequantized GGUF tensors, by GGUF name.
    """
    out: dict[str, Array] = {}
    for name, values in weights.items():
        if name in TOP_NAMES:
            out[name] = rounded[TOP_NAMES[name]]
            continue
        _, _, layer, local = name.split(".", 3)
        block = f"blk.{layer}."
        if match := EXPERT.fullmatch(local):
            out[name] = rounded[f"{block}ffn_{match[2]}_exps.weight"][int(match[1])]
        elif local == "self_attn.kv_b_proj.weight":
            k_b = rounded[f"{block}attn_k_b.weight"].transpose(0, 2, 1)
            v_b = rounded[f"{block}attn_v_b.weight"]
            out[name] = np.concatenate([k_b, v_b], axis=1).reshape(values.shape)
        elif local == CORRECTION_BIAS:
            out[name] = rounded[f"{block}exp_probs_b.bias"]
        else:
            module, _, kind = local.rpartition(".")
            out[name] = rounded[f"{block}{BLOCK_NAMES[module]}.{kind}"]
    return out

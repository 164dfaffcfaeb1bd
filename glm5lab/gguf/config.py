"""HF's config.json from a GLM-5 GGUF's header: every field that HF and vLLM read."""

import dataclasses
from math import isfinite
from typing import Any

from glm5lab.architecture import FULL, Glm5Architecture
from glm5lab.errors import InputError, brief
from glm5lab.gguf.chat import KEY, template_of, template_problem
from glm5lab.gguf.index_share import describe, index_share
from glm5lab.gguf.reader import GgufModel, require_glm5
from glm5lab.gguf.tokenizer import special_ids

SIGMOID = 2  # llama.cpp's enum for expert_gating_func
ALL_F32 = 0  # llama.cpp's general.file_type
CONVERT_AGAIN = "use a file converted by a current llama.cpp (b10200 or later)"


def read_architecture(model: GgufModel) -> Glm5Architecture:
    """The model's dimensions.

    Raises:
        InputError: another architecture, a key missing or contradictory.
    """
    arch = _stated_architecture(model)
    return dataclasses.replace(arch, indexer_types=index_share(model, arch).types)


def config_notes(model: GgufModel) -> list[str]:
    """What a reader of a report should know about the file's configuration; a sentence each.

    Raises:
        InputError: as `read_architecture`.
    """
    arch = _stated_architecture(model)
    notes = describe(index_share(model, arch))
    if _mtp_layers(model, arch) < arch.num_nextn_predict_layers:
        notes.append(
            f"nextn_predict_layers is {arch.num_nextn_predict_layers}, but the file holds no "
            f"block {arch.num_hidden_layers}: no multi-token prediction"
        )
    template = template_of(model)
    if template is not None and (problem := template_problem(template)):
        notes.append(f"{KEY}: {problem}; `prepare` and `serve` refuse it")
    return notes


def config_conflicts(model: GgufModel) -> tuple[str, ...]:
    """Where the file's statements about its indexers disagree; a sentence each."""
    return index_share(model, _stated_architecture(model)).conflicts


def _stated_architecture(model: GgufModel) -> Glm5Architecture:
    require_glm5(model)
    metadata = _with_vocab_size(model)
    try:
        return Glm5Architecture.from_metadata(metadata)
    except KeyError as error:
        raise InputError(
            model.path, f"metadata key {error.args[0]!r} is missing", CONVERT_AGAIN
        ) from error
    except ValueError as error:
        raise InputError(
            model.path, f"metadata contradict themselves: {error}", CONVERT_AGAIN
        ) from error


def hf_config(model: GgufModel) -> dict[str, Any]:
    """The complete config.json of GlmMoeDsaForCausalLM.

    Args:
        model: an open GLM-5 GGUF; its header decides everything.

    Returns:
        HF's fields, and those that vLLM reads but neither GGUF nor HF's class carries:
        topk_method, scoring_func, indexer_rope_interleave, index_topk_pattern and
        num_nextn_predict_layers.

    Raises:
        InputError: another architecture, a key missing or contradictory.
    """
    a = read_architecture(model)
    gating = model.metadata.get("glm-dsa.expert_gating_func", SIGMOID)
    if gating != SIGMOID:
        raise InputError(
            model.path,
            f"glm-dsa.expert_gating_func is {brief(gating)}; GLM-5 routes by sigmoid ({SIGMOID})",
            CONVERT_AGAIN,
        )
    ids = special_ids(model)
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": _dtype(model),
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "hidden_act": "silu",
        "num_hidden_layers": a.num_hidden_layers,
        "num_nextn_predict_layers": _mtp_layers(model, a),
        "max_position_embeddings": a.max_position_embeddings,
        "rms_norm_eps": a.rms_norm_eps,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        # Attention: a key-value latent shared by all heads; HF counts the expanded heads.
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_attention_heads,
        "q_lora_rank": a.q_lora_rank,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_rope_head_dim": a.qk_rope_head_dim,
        "qk_nope_head_dim": a.qk_nope_head_dim,
        "v_head_dim": a.v_head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_interleave": True,
        "rope_parameters": _rope(model, a),
        # Lightning indexer.
        "index_n_heads": a.index_n_heads,
        "index_head_dim": a.index_head_dim,
        "index_topk": a.index_topk,
        "indexer_types": list(a.indexer_types),
        "index_topk_pattern": "".join("F" if t == FULL else "S" for t in a.indexer_types),
        "indexer_rope_interleave": True,
        # Experts.
        "intermediate_size": a.intermediate_size,
        "first_k_dense_replace": a.first_k_dense_replace,
        "moe_layer_freq": 1,
        "moe_intermediate_size": a.moe_intermediate_size,
        "n_routed_experts": a.n_routed_experts,
        "n_shared_experts": a.n_shared_experts,
        "num_experts_per_tok": a.num_experts_per_tok,
        "n_group": max(1, a.n_group),
        "topk_group": max(1, a.topk_group),
        "norm_topk_prob": a.norm_topk_prob,
        "routed_scaling_factor": a.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "bos_token_id": ids.bos,
        "eos_token_id": list(ids.eos) or None,
        "pad_token_id": ids.pad,
    }


def generation_config(model: GgufModel) -> dict[str, Any]:
    """HF's generation_config.json: where generation ends, and the file's sampling advice."""
    ids = special_ids(model)
    config: dict[str, Any] = {"bos_token_id": ids.bos, "eos_token_id": list(ids.eos)}
    config["pad_token_id"] = ids.pad
    advice = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    for name, key in advice.items():
        value = model.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            config[name] = float(f"{value:.7g}") if isinstance(value, float) else value
    return {k: v for k, v in config.items() if v not in (None, [])}


def _with_vocab_size(model: GgufModel) -> dict[str, Any]:
    """Metadata whose vocab_size is the embedding's rows where the key is absent."""
    key, embedding = "glm-dsa.vocab_size", model.tensors.get("token_embd.weight")
    if embedding is None:
        return model.metadata
    stated = model.metadata.get(key, embedding.shape[0])
    if stated != embedding.shape[0]:
        raise InputError(
            model.path,
            f"{key} is {brief(stated)}, token_embd.weight has {embedding.shape[0]} rows",
            CONVERT_AGAIN,
        )
    return {**model.metadata, key: stated}


def _mtp_layers(model: GgufModel, arch: Glm5Architecture) -> int:
    """MTP layers whose tensors are really there; some files keep the key and drop the block."""
    present = {t.layer for t in model.tensors.values()}
    return sum(i in present for i in range(arch.num_hidden_layers, arch.block_count))


def _dtype(model: GgufModel) -> str:
    """What vLLM computes in unless told otherwise: F32 files stay F32, GLM-5 is a BF16 model."""
    return "float32" if model.metadata.get("general.file_type") == ALL_F32 else "bfloat16"


def _rope(model: GgufModel, arch: Glm5Architecture) -> dict[str, Any]:
    """HF's rope_parameters; yarn as DeepSeek's converter writes it."""
    kind = model.metadata.get("glm-dsa.rope.scaling.type")
    rope: dict[str, Any] = {"rope_theta": arch.rope_theta, "rope_type": "default"}
    if kind in (None, "none"):
        return rope
    factor = _scaling(model, "factor")
    if kind not in ("linear", "yarn") or factor is None or factor < 1:
        raise InputError(
            model.path,
            f"glm-dsa.rope.scaling.type {brief(kind)} with factor {factor!r}; supported are "
            "none, linear and yarn, the last two with a factor of at least 1",
            CONVERT_AGAIN,
        )
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return rope
    original = _scaling(model, "original_context_length")
    if original is None:
        original = int(arch.max_position_embeddings / factor)
    rope["original_max_position_embeddings"] = original
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        stated = _scaling(model, f"yarn_{name}")
        rope[name] = default if stated is None else stated
    log_multiplier = _scaling(model, "yarn_log_multiplier")
    if log_multiplier:
        # The converter stores 0.1 * mscale_all_dim.
        rope["mscale"] = rope["mscale_all_dim"] = float(f"{10 * log_multiplier:.6g}")
    return rope


def _scaling(model: GgufModel, name: str) -> float | None:
    """A number under `rope.scaling`, None where the key is absent; anything else is an error."""
    key = f"glm-dsa.rope.scaling.{name}"
    value = model.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InputError(model.path, f"{key} is {brief(value)}, not a number", CONVERT_AGAIN)
    return float(f"{value:.7g}") if isinstance(value, float) else value

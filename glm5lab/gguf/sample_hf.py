"""The HF twin of a sample: the same values as a safetensors folder under HF's names.

Configuration comes from the architecture itself and not from the GGUF's metadata, so that a
comparison of the two also tests gguf/config.py.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from glm5lab.architecture import FULL, Glm5Architecture
from glm5lab.errors import InputError


def write_hf(
    folder: Path,
    arch: Glm5Architecture,
    weights: dict[str, npt.NDArray[np.float32]],
    gguf: Path,
) -> Path:
    """Write config.json, model.safetensors and the tokenizer.

    Args:
        folder: becomes the twin; an older twin there is replaced, anything else refused.
        arch: its dimensions.
        weights: HF names and values.
        gguf: the sample's first shard, for the tokenizer.
    """
    from safetensors.numpy import save_file

    from glm5lab.gguf.reader import open_gguf
    from glm5lab.gguf.tokenizer import write_tokenizer

    _check_replaceable(folder)
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        write_tokenizer(open_gguf(gguf), temporary)
        whole = {name: np.ascontiguousarray(values) for name, values in weights.items()}
        save_file(whole, temporary / "model.safetensors", metadata={"format": "pt"})
        config = json.dumps(twin_config(arch), indent=2) + "\n"
        (temporary / "config.json").write_text(config, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _check_replaceable(folder: Path) -> None:
    config = folder / "config.json"
    ours = config.is_file() and "glm_moe_dsa" in config.read_text(encoding="utf-8")
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(folder, "is there and is no GLM-5 twin", "move it, or name another folder")


def twin_config(a: Glm5Architecture) -> dict[str, Any]:
    """HF's config.json for these dimensions, as the published one is written."""
    from glm5lab.gguf.sample_tokenizer import sample_vocabulary

    vocabulary = sample_vocabulary(a.vocab_size)
    ends = [vocabulary.id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.id("[gMASK]"),
        "dtype": "float32",
        "eos_token_id": ends,
        "first_k_dense_replace": a.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": a.hidden_size,
        "index_head_dim": a.index_head_dim,
        "index_n_heads": a.index_n_heads,
        "index_topk": a.index_topk,
        "index_topk_pattern": "".join("F" if t == FULL else "S" for t in a.indexer_types),
        "indexer_rope_interleave": True,
        "indexer_types": list(a.indexer_types),
        "intermediate_size": a.intermediate_size,
        "kv_lora_rank": a.kv_lora_rank,
        "max_position_embeddings": a.max_position_embeddings,
        "moe_intermediate_size": a.moe_intermediate_size,
        "n_group": a.n_group,
        "n_routed_experts": a.n_routed_experts,
        "n_shared_experts": a.n_shared_experts,
        "norm_topk_prob": a.norm_topk_prob,
        "num_attention_heads": a.num_attention_heads,
        "num_experts_per_tok": a.num_experts_per_tok,
        "num_hidden_layers": a.num_hidden_layers,
        "num_key_value_heads": a.num_attention_heads,
        "num_nextn_predict_layers": a.num_nextn_predict_layers,
        "pad_token_id": vocabulary.id("<|endoftext|>"),
        "q_lora_rank": a.q_lora_rank,
        "qk_nope_head_dim": a.qk_nope_head_dim,
        "qk_rope_head_dim": a.qk_rope_head_dim,
        "rms_norm_eps": a.rms_norm_eps,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": a.rope_theta, "rope_type": "default"},
        "routed_scaling_factor": a.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": a.topk_group,
        "topk_method": "noaux_tc",
        "v_head_dim": a.v_head_dim,
        "vocab_size": a.vocab_size,
    }

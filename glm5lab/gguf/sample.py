"""Write a tiny GLM-5 as GGUF: real architecture, names and metadata, random weights.

write_sample("build/tiny", kind="share", types="mix", shards=3, hf=True)
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from glm5lab.architecture import FULL, KINDS, Glm5Architecture
from glm5lab.errors import InputError
from glm5lab.gguf.quantize import dequantize, quantize
from glm5lab.gguf.sample_tokenizer import CHAT_TEMPLATE, SampleVocabulary, sample_vocabulary
from glm5lab.gguf.sample_types import TYPES, tensor_type
from glm5lab.gguf.sample_weights import from_gguf_values, random_weights, to_gguf
from glm5lab.gguf.shards import SHARD
from glm5lab.gguf.writing import divide, file_names, shard_writer

if TYPE_CHECKING:
    from gguf import GGUFWriter

MAX_SHARDS = 99
FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q8_0": 7,
    "q4_k_m": 15,
    "mix": 15,
    "q2_k": 10,
    "iq4_xs": 30,
}  # llama.cpp's enum llama_ftype
Item = tuple[str, npt.NDArray[Any], int]


def write_sample(
    folder: str | Path,
    kind: str = "full",
    types: str = "f32",
    shards: int = 1,
    metadata_first_shard: bool = False,
    hf: bool = False,
    seed: int = 0,
) -> Path:
    """Write a tiny GLM-5 GGUF with random, non-degenerate weights.

    Args:
        folder: where the files go; made when it is not there.
        kind: "full" (an indexer on every layer), "share" (IndexShare) or "mtp" (with the
            multi-token prediction layer).
        types: "f32", "f16", "q8_0", "q4_k_m" (what llama-quantize makes of it), "mix" (types
            mixed further, as publishers do), "q2_k" or "iq4_xs" (nearly uniform).
        shards: number of files.
        metadata_first_shard: the first shard holds metadata only, as many published sets do.
        hf: also write the same values as an HF safetensors folder, `folder/hf`.
        seed: of the weights.

    Returns:
        Path of the first shard.

    Raises:
        InputError: the folder cannot be written, an argument is out of range, or the quantizer
            that "q4_k_m" and those behind it need is not installed.
    """
    folder = Path(folder).expanduser()
    _check_arguments(folder, kind, types, shards, metadata_first_shard)
    arch = Glm5Architecture.tiny(kind)
    weights = random_weights(arch, seed)
    items: list[Item] = []
    rounded: dict[str, npt.NDArray[np.float32]] = {}
    for name, values in to_gguf(arch, weights):
        type_id = tensor_type(name, values.shape, types, arch.block_count)
        data = quantize(values, type_id)
        items.append((name, data, type_id))
        if hf and types != "f32":
            rounded[name] = dequantize(data, type_id)
    base = f"tiny-glm5-{kind}-{types}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = _write_shards(
            folder, base, arch, types, _divide(items, shards, metadata_first_shard)
        )
        if hf:
            from glm5lab.gguf.sample_hf import write_hf

            twin = weights if types == "f32" else from_gguf_values(weights, rounded)
            write_hf(folder / "hf", arch, twin, paths[0])
    except OSError as error:
        raise InputError(
            folder, f"cannot be written: {error.strerror or error}", "choose another folder"
        ) from error
    return paths[0]


def _check_arguments(
    folder: Path, kind: str, types: str, shards: int, metadata_first: bool
) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(folder, "is a file, not a folder", "name a folder for the sample")
    for name, value, allowed in (("kind", kind, KINDS), ("types", types, TYPES)):
        if value not in allowed:
            raise InputError(folder, f"{name}: {value!r} is unknown", f"use {', '.join(allowed)}")
    least = 2 if metadata_first else 1
    if not least <= shards <= MAX_SHARDS:
        why = " with a metadata-only first shard" if metadata_first else ""
        raise InputError(
            folder, f"shards: {shards} is out of range", f"use {least} to {MAX_SHARDS}{why}"
        )


def _divide(items: Sequence[Item], shards: int, metadata_first: bool) -> list[Sequence[Item]]:
    """Tensors of each shard: about the same number each, none in a metadata-only first one."""
    parts = divide(items, shards - metadata_first)
    return [[], *parts] if metadata_first else parts


def _write_shards(
    folder: Path, base: str, arch: Glm5Architecture, types: str, parts: list[Sequence[Item]]
) -> list[Path]:
    """Write all shards under temporary names, then rename; older files of that name go."""

    def add_keys(writer: "GGUFWriter") -> None:
        add_metadata(writer, arch, types, sample_vocabulary(arch.vocab_size))

    total = sum(len(p) for p in parts)
    names = file_names(base, len(parts))
    temporary = [folder / f".{name}.part" for name in names]
    try:
        for index, (part, path) in enumerate(zip(parts, temporary, strict=True)):
            writer = shard_writer(path, index, len(parts), total, add_keys)
            for name, data, type_id in part:
                writer.add_tensor(name, data, raw_dtype=_gguf_type(type_id))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        for old in folder.glob(f"{base}*.gguf"):
            match = SHARD.fullmatch(old.name)
            if old.name == f"{base}.gguf" or (match and match["base"] == base):
                old.unlink()
        for path, name in zip(temporary, names, strict=True):
            os.replace(path, folder / name)
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):
                path.unlink()
    return [folder / name for name in names]


def _gguf_type(type_id: int) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(type_id)


def add_metadata(w: "GGUFWriter", a: Glm5Architecture, types: str, v: SampleVocabulary) -> None:
    """The keys that llama.cpp's own converter writes for GLM-5."""
    from gguf import ExpertGatingFuncType

    w.add_type("model")
    w.add_name("Tiny GLM-5")
    w.add_description("Random weights for tests; says nothing sensible")
    w.add_file_type(FILE_TYPES[types])
    w.add_quantization_version(2)
    w.add_block_count(a.block_count)
    w.add_context_length(a.max_position_embeddings)
    w.add_embedding_length(a.hidden_size)
    w.add_feed_forward_length(a.intermediate_size)
    w.add_head_count(a.num_attention_heads)
    w.add_head_count_kv(1)
    w.add_rope_freq_base(a.rope_theta)
    w.add_layer_norm_rms_eps(a.rms_norm_eps)
    w.add_expert_count(a.n_routed_experts)
    w.add_expert_used_count(a.num_experts_per_tok)
    w.add_expert_shared_count(a.n_shared_experts)
    w.add_expert_group_count(a.n_group)
    w.add_expert_group_used_count(a.topk_group)
    w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    w.add_expert_feed_forward_length(a.moe_intermediate_size)
    w.add_expert_weights_scale(a.routed_scaling_factor)
    if a.norm_topk_prob:
        w.add_expert_weights_norm(True)
    w.add_leading_dense_block_count(a.first_k_dense_replace)
    w.add_vocab_size(a.vocab_size)
    w.add_q_lora_rank(a.q_lora_rank)
    w.add_kv_lora_rank(a.kv_lora_rank)
    w.add_key_length(a.latent_dim)
    w.add_value_length(a.kv_lora_rank)
    w.add_key_length_mla(a.qk_head_dim)
    w.add_value_length_mla(a.v_head_dim)
    w.add_rope_dimension_count(a.qk_rope_head_dim)
    if a.num_nextn_predict_layers:
        w.add_nextn_predict_layers(a.num_nextn_predict_layers)
    w.add_indexer_head_count(a.index_n_heads)
    w.add_indexer_key_length(a.index_head_dim)
    w.add_indexer_top_k(a.index_topk)
    if set(a.indexer_types) != {FULL}:
        flags = [a.has_indexer(layer) for layer in range(a.block_count)]
        w.add_array("glm-dsa.attention.indexer.types", flags)
    add_tokenizer(w, v)


def add_tokenizer(w: "GGUFWriter", v: SampleVocabulary) -> None:
    """The tokenizer's keys."""
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("glm4")
    w.add_token_list(v.tokens)
    w.add_token_types(v.types)
    w.add_token_merges(v.merges)
    w.add_eos_token_id(v.id("<|endoftext|>"))
    w.add_eot_token_id(v.id("<|user|>"))
    w.add_eom_token_id(v.id("<|observation|>"))
    w.add_unk_token_id(v.id("<|endoftext|>"))
    w.add_pad_token_id(v.id("<|endoftext|>"))
    w.add_bos_token_id(v.id("[gMASK]"))
    w.add_chat_template(CHAT_TEMPLATE)

"""Configuration from metadata: against the HF twin's, HF's own class, and the rules of GGUF."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from glm5lab.architecture import Glm5Architecture, indexer_types
from glm5lab.errors import InputError
from glm5lab.gguf.config import generation_config, hf_config, read_architecture
from glm5lab.gguf.reader import GgufModel, Tensor, open_gguf


def changed(model: GgufModel, drop: str = "", **keys: Any) -> GgufModel:
    """The model with some metadata replaced (`__` stands for `.`) and one key dropped."""
    extra = {f"glm-dsa.{k.replace('__', '.')}": v for k, v in keys.items()}
    metadata = {k: v for k, v in model.metadata.items() if k != f"glm-dsa.{drop}"}
    return dataclasses.replace(model, metadata=metadata | extra)


def without(model: GgufModel, *names: str) -> GgufModel:
    tensors = {k: t for k, t in model.tensors.items() if not k.startswith(names)}
    return dataclasses.replace(model, tensors=tensors)


def resized(model: GgufModel, name: str, shape: tuple[int, ...]) -> GgufModel:
    tensor: Tensor = dataclasses.replace(model.tensors[name], shape=shape)
    return dataclasses.replace(model, tensors=model.tensors | {name: tensor})


@pytest.mark.parametrize("name", ["sample_f32", "sample_share", "sample_mix", "sample_mtp"])
def test_equals_the_twin(name: str, request: pytest.FixtureRequest) -> None:
    """The twin's config comes from the dimensions, this one from the file's metadata."""
    path: Path = request.getfixturevalue(name)
    ours = hf_config(open_gguf(path))
    twin = json.loads((path.parent / "hf" / "config.json").read_text())
    assert ours.pop("dtype") == ("float32" if "f32" in path.name else "bfloat16")
    del twin["dtype"]
    assert ours.pop("moe_layer_freq") == 1
    assert ours == twin


def test_hf_reads_every_field_it_decides(sample_share: Path) -> None:
    from transformers import AutoConfig, GlmMoeDsaConfig

    ours = hf_config(open_gguf(sample_share))
    config = GlmMoeDsaConfig(**ours)
    back = config.to_dict()
    assert {k: v for k, v in ours.items() if k != "dtype" and back.get(k) != v} == {}
    # Whatever HF has a field for and we leave out has to be a matter of training, not of the file.
    known = {f.name for f in dataclasses.fields(GlmMoeDsaConfig)}
    base = {f.name for f in dataclasses.fields(GlmMoeDsaConfig.__mro__[1])}
    left = {"initializer_range", "use_cache", "output_router_logits", "mlp_bias", "head_dim"}
    derived = {"mlp_layer_types", "layer_types"}
    assert known - base - set(ours) <= left | derived
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 4
    assert isinstance(AutoConfig.from_pretrained(sample_share.parent / "hf"), GlmMoeDsaConfig)


def test_published_dimensions_are_hf_defaults() -> None:
    from transformers import GlmMoeDsaConfig

    published, defaults = Glm5Architecture.glm5(), GlmMoeDsaConfig()
    for field in dataclasses.fields(published):
        if hasattr(defaults, field.name) and field.name != "indexer_types":
            assert getattr(published, field.name) == getattr(defaults, field.name), field.name
    assert list(published.indexer_types) == defaults.indexer_types
    assert (published.block_count, published.latent_dim, published.qk_head_dim) == (79, 576, 256)


def test_published_dimensions_survive_the_metadata(sample_f32: Path) -> None:
    """GLM-5's own metadata, as its converter writes them, give GLM-5's dimensions."""
    a = Glm5Architecture.glm5()
    keys = {
        "block_count": 79, "nextn_predict_layers": 1, "context_length": 202752,
        "embedding_length": 6144, "feed_forward_length": 12288, "vocab_size": 154880,
        "attention.head_count": 64, "attention.head_count_kv": 1,
        "attention.key_length": 576, "attention.value_length": 512,
        "attention.key_length_mla": 256, "attention.value_length_mla": 256,
        "attention.q_lora_rank": 2048, "attention.kv_lora_rank": 512,
        "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "attention.indexer.head_count": 32, "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048, "rope.dimension_count": 64, "rope.freq_base": 1e6,
        "leading_dense_block_count": 3, "expert_count": 256, "expert_used_count": 8,
        "expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1,
        "expert_feed_forward_length": 2048, "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }  # fmt: skip
    assert Glm5Architecture.from_metadata({f"glm-dsa.{k}": v for k, v in keys.items()}) == a


def test_which_layers_hold_an_indexer(sample_f32: Path) -> None:
    published = [0, 1, 2, *range(6, 75, 4)]
    by_context = indexer_types(None, 78, 1048576)
    assert [i for i, kind in enumerate(by_context) if kind == "full"] == published
    assert set(indexer_types(None, 78, 1048575)) == {"full"}
    flags = [True, False, True, False, False, True]  # the last one is the MTP layer's
    assert indexer_types(flags, 5, 4096) == ("full", "shared", "full", "shared", "shared")

    model = open_gguf(sample_f32)
    assert hf_config(changed(model, context_length=1 << 20))["index_topk_pattern"] == "FFFSS"
    integers = changed(model, attention__indexer__types=[1, 0, 1, 1, 0])
    assert hf_config(integers)["index_topk_pattern"] == "FSFFS"
    for wrong in ([True], "FFSFS", [False, True, True, True, True]):
        with pytest.raises(InputError, match=r"attention.indexer.types"):
            hf_config(changed(model, attention__indexer__types=wrong))


def test_sharing_as_vllm_and_hf_read_it(sample_share: Path) -> None:
    from transformers import GlmMoeDsaConfig

    config = hf_config(open_gguf(sample_share))
    assert config["index_topk_pattern"] == "FFSFS"
    pattern_only = {k: v for k, v in config.items() if k != "indexer_types"}
    assert GlmMoeDsaConfig(**pattern_only).indexer_types == config["indexer_types"]


def test_layers_do_not_count_mtp(sample_mtp: Path) -> None:
    model = open_gguf(sample_mtp)
    config = hf_config(model)
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (4, 1)
    assert len(config["index_topk_pattern"]) == 4
    dropped = hf_config(without(model, "blk.4."))  # the key kept, the block not
    assert (dropped["num_hidden_layers"], dropped["num_nextn_predict_layers"]) == (4, 0)


def test_tying_and_vocabulary(sample_mix: Path) -> None:
    model = open_gguf(sample_mix)  # its first shard holds no tensors
    assert hf_config(model)["tie_word_embeddings"] is False
    assert hf_config(without(model, "output.weight"))["tie_word_embeddings"] is True
    rows = resized(changed(model, drop="vocab_size"), "token_embd.weight", (640, 256))
    assert hf_config(rows)["vocab_size"] == 640
    with pytest.raises(InputError, match=r"vocab_size is 999, token_embd.weight has 512 rows"):
        hf_config(changed(model, vocab_size=999))


def test_optional_keys(sample_f32: Path) -> None:
    model = open_gguf(sample_f32)
    assert hf_config(changed(model, drop="expert_weights_norm"))["norm_topk_prob"] is False
    assert hf_config(changed(model, drop="expert_gating_func"))["scoring_func"] == "sigmoid"
    assert hf_config(changed(model, drop="expert_group_count"))["n_group"] == 1
    assert hf_config(changed(model, expert_group_count=0))["n_group"] == 1
    per_layer = changed(model, feed_forward_length=[512] * 5)
    assert hf_config(per_layer)["intermediate_size"] == 512
    with pytest.raises(InputError, match="expert_gating_func is 1; GLM-5 routes by sigmoid"):
        hf_config(changed(model, expert_gating_func=1))


REQUIRED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.q_lora_rank", "attention.kv_lora_rank",
    "attention.key_length_mla", "attention.value_length_mla",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    "expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length",
    "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
)  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(sample_f32: Path, key: str) -> None:
    model = open_gguf(sample_f32)
    with pytest.raises(InputError, match=f"metadata key 'glm-dsa.{key}' is missing"):
        hf_config(changed(model, drop=key))
    wrong = dataclasses.replace(model, metadata=model.metadata | {f"glm-dsa.{key}": "many"})
    with pytest.raises(InputError, match=f"glm-dsa.{key} is 'many', not a"):
        hf_config(wrong)


def test_contradictions(sample_f32: Path) -> None:
    model = open_gguf(sample_f32)
    with pytest.raises(InputError, match=r"key_length 256 is not kv_lora_rank 512 \+ rope"):
        hf_config(changed(model, attention__key_length=256))
    with pytest.raises(InputError, match="block_count 5 with nextn_predict_layers 5"):
        hf_config(changed(model, nextn_predict_layers=5))
    with pytest.raises(InputError, match="key_length_mla is not above"):
        hf_config(changed(model, attention__key_length_mla=64))
    with pytest.raises(InputError, match="glm5lab runs 'glm-dsa'"):
        read_architecture(dataclasses.replace(model, metadata={"general.architecture": "llama"}))


def test_rope_scaling(sample_f32: Path) -> None:
    from transformers import GlmMoeDsaConfig

    model = open_gguf(sample_f32)
    yarn: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 1024,
        "rope__scaling__yarn_log_multiplier": 0.10000000149011612,
    }
    rope = hf_config(changed(model, **yarn))["rope_parameters"]
    assert rope == {
        "rope_theta": 1e6,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert GlmMoeDsaConfig(**hf_config(changed(model, **yarn))).rope_parameters == rope
    none = changed(model, rope__scaling__type="none")
    assert hf_config(none)["rope_parameters"]["rope_type"] == "default"
    with pytest.raises(InputError, match="'longrope' with factor None"):
        hf_config(changed(model, rope__scaling__type="longrope"))


def test_generation_config(sample_f32: Path) -> None:
    model = open_gguf(sample_f32)
    tokens = model.metadata["tokenizer.ggml.tokens"]
    config = generation_config(model)
    ends = [tokens[i] for i in config["eos_token_id"]]
    assert ends == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    sampling = {"general.sampling.temp": 0.699999988079071, "general.sampling.top_k": 40}
    advised = dataclasses.replace(model, metadata=model.metadata | sampling)
    assert generation_config(advised)["temperature"] == 0.7
    assert generation_config(advised)["top_k"] == 40
    outside = dataclasses.replace(
        model, metadata=model.metadata | {"tokenizer.ggml.eos_token_id": 512}
    )
    with pytest.raises(InputError, match="eos_token_id is 512, the vocabulary has 512"):
        generation_config(outside)

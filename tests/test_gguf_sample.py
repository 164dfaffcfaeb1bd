"""Samples: readable by others, equal to their HF twin, non-degenerate, never half written."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llama_tokenize import llama_cpp_ids
from unknown_types import with_unknown_types

from glm5lab.architecture import Glm5Architecture
from glm5lab.errors import Glm5labError, InputError
from glm5lab.gguf import ggml_types
from glm5lab.gguf import quantize as quantize_module
from glm5lab.gguf.quantize import dequantize, quantize
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.gguf.sample_weights import random_weights

SAMPLES = ["sample_f32", "sample_share", "sample_mix", "sample_mtp"]


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in open_gguf(path).files)


@pytest.mark.parametrize("kind", ["full", "share", "mtp"])
def test_small_and_quick(tmp_path: Path, kind: str) -> None:
    start = time.perf_counter()
    path = write_sample(tmp_path, kind)
    assert time.perf_counter() - start < 5
    assert size(path) < 100e6
    assert path == tmp_path / f"tiny-glm5-{kind}-f32.gguf"


def hf_values(model: GgufModel, name: str) -> np.ndarray[Any, Any]:
    """An HF tensor from GGUF ones, with gguf-py's own name table."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM_DSA, 5)

    def find(hf_name: str) -> str:
        found = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert found, hf_name
        return found

    if name.endswith("kv_b_proj.weight"):
        k_b = model.dequantize(find(name.replace("kv_b_proj", "k_b_proj")))
        v_b = model.dequantize(find(name.replace("kv_b_proj", "v_b_proj")))
        return np.concatenate([k_b.swapaxes(1, 2), v_b], axis=1).reshape(-1, k_b.shape[1])
    if ".experts." in name:
        head, rest = name.split(".experts.")
        expert, part, _ = rest.split(".")
        row = slice(int(expert), int(expert) + 1)
        return model.dequantize(find(f"{head}.experts.{part}.weight"), row)[0]
    return model.dequantize(find(name.replace("score_correction_bias", "score_correction.bias")))


@pytest.mark.parametrize("name", SAMPLES)
def test_twin_holds_the_same_values(name: str, request: pytest.FixtureRequest) -> None:
    from safetensors.numpy import load_file

    path: Path = request.getfixturevalue(name)
    model, twin = open_gguf(path), load_file(path.parent / "hf" / "model.safetensors")
    for hf_name, values in twin.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(hf_values(model, hf_name), values, err_msg=hf_name)
    # every GGUF value is in the twin: stacks and kv_b are split, nothing is left over
    assert sum(v.size for v in twin.values()) == sum(
        int(np.prod(t.shape)) for t in model.tensors.values()
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_twin_loads_in_transformers(name: str, request: pytest.FixtureRequest) -> None:
    import torch
    from transformers import AutoTokenizer, GlmMoeDsaForCausalLM

    folder = request.getfixturevalue(name).parent / "hf"
    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    # transformers has no MTP layers; it ignores GLM-5's by their number, 78.
    assert all(k.startswith("model.layers.4.") for k in info["unexpected_keys"])
    assert bool(info["unexpected_keys"]) == (name == "sample_mtp")
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    assert 0.7 < logits.std() < 1.5
    assert logits[0].argmax(-1).unique().numel() > 32


@pytest.mark.parametrize("name", SAMPLES)
def test_llama_cpp_loads_it(name: str, request: pytest.FixtureRequest) -> None:
    """As it is: shards, an empty first shard, mixed types, IndexShare and MTP included."""
    assert llama_cpp_ids(request.getfixturevalue(name), [" the<|user|>"]) == [[263, 307]]


@pytest.mark.parametrize("kind", ["full", "share", "mtp"])
def test_weights_are_not_degenerate(kind: str) -> None:
    """Each norm, bias and correction differs from its neutral value and from every other."""
    weights = random_weights(Glm5Architecture.tiny(kind), 0)
    small = {k: v for k, v in weights.items() if v.ndim == 1}
    for name, values in small.items():
        neutral = 1 if name.endswith("weight") else 0
        assert np.abs(values - neutral).max() > 0.05, name
        assert values.std() > 0.05, name
    assert len({v.tobytes() for v in small.values()}) == len(small)
    other = random_weights(Glm5Architecture.tiny(kind), 1)
    assert all((weights[k] != other[k]).any() for k in weights)


def test_seed_decides_the_bytes(tmp_path: Path) -> None:
    def content(folder: str, seed: int) -> bytes:
        return write_sample(tmp_path / folder, types="q8_0", seed=seed).read_bytes()

    assert content("a", 3) == content("b", 3) != content("c", 4)


def test_names_and_types(sample_mix: Path, sample_share: Path, sample_mtp: Path) -> None:
    """What llama-quantize and publishers do to a file is in the samples."""
    mix = open_gguf(sample_mix)
    types = {name: t.type for name, t in mix.tensors.items()}
    assert types["blk.0.attn_k_b.weight"] == "Q5_0"  # rows of 192 hold no block of 256
    assert types["blk.1.indexer.proj.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K"
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"
    for a, b in (
        ("attn_q_a", "attn_kv_a_mqa"),
        ("ffn_gate_exps", "ffn_up_exps"),
        ("indexer.attn_k", "indexer.proj"),
    ):
        assert types[f"blk.1.{a}.weight"] != types[f"blk.1.{b}.weight"]
    assert types["blk.1.ffn_gate_exps.weight"] != types["blk.2.ffn_gate_exps.weight"]
    share = open_gguf(sample_share)
    indexers = [i for i in range(5) if f"blk.{i}.indexer.attn_k.weight" in share.tensors]
    assert indexers == [0, 1, 3]
    assert share.metadata["glm-dsa.attention.indexer.types"] == [True, True, False, True, False]
    assert share.metadata_types["glm-dsa.attention.indexer.types"] == (9, 7)
    mtp = open_gguf(sample_mtp)
    assert {n for n in mtp.tensors if ".nextn." in n} == {
        f"blk.4.nextn.{n}.weight"
        for n in (
            "eh_proj",
            "enorm",
            "hnorm",
            "embed_tokens",
            "shared_head_head",
            "shared_head_norm",
        )
    }
    assert "blk.4.indexer.attn_k.weight" in mtp.tensors


def test_q4_k_m_is_llama_quantizes(tmp_path: Path) -> None:
    """Types that llama-quantize itself chose for this model (measured with build b11739)."""
    path = write_sample(tmp_path, types="q4_k_m", shards=2)
    assert llama_cpp_ids(path, [" the"]) == [[263]]
    model = open_gguf(path)
    types = {name: t.type for name, t in model.tensors.items()}
    assert model.metadata["general.file_type"] == 15
    assert (types["token_embd.weight"], types["output.weight"]) == ("Q4_K", "Q6_K")
    block = {n.split(".", 2)[2]: t for n, t in types.items() if n.startswith("blk.1.")}
    small = {n for n, t in block.items() if t == "F32"}
    assert small == {n for n in block if "norm" in n} | {"ffn_gate_inp.weight", "exp_probs_b.bias"}
    assert {n: t for n, t in block.items() if t not in ("F32", "Q4_K")} == {
        "attn_k_b.weight": "Q5_0"
    }
    for role, layers in (("ffn_down_exps", (1, 2, 3, 4)), ("ffn_down_shexp", (1, 2, 3, 4))):
        found = [types[f"blk.{i}.{role}.weight"] for i in layers]
        assert found == ["Q4_K", "Q6_K", "Q4_K", "Q6_K"]


def test_type_numbers_are_ggmls() -> None:
    ours = {name: number for name, number in vars(ggml_types).items() if name.isupper()}
    assert len(ours) > 10
    assert ours == {name: gguf.GGMLQuantizationType[name] for name in ours}


def test_types_of_the_ik_fork(sample_mix: Path, tmp_path: Path) -> None:
    """gguf-py refuses such a file; ours reads it."""
    path = with_unknown_types(sample_mix, tmp_path)
    model = open_gguf(path)
    assert model.tensors["blk.2.ffn_down_exps.weight"].type == "unknown(138)"
    assert model.tensors["blk.2.ffn_gate_exps.weight"].type == "unknown(144)"
    assert len(model.tensors) == len(open_gguf(sample_mix).tensors)
    with pytest.raises(ValueError, match="is not a valid GGMLQuantizationType"):
        gguf.GGUFReader(model.tensors["blk.2.ffn_down_exps.weight"].path)


def test_gguf_names_are_gguf_pys(sample_mtp: Path) -> None:
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GLM_DSA]}
    for tensor in open_gguf(sample_mtp).tensors.values():
        base = tensor.name.rpartition(".")[0]
        assert base.replace(f"blk.{tensor.layer}.", "blk.{bid}.") in known, tensor.name


def test_shards(tmp_path: Path) -> None:
    plain = open_gguf(write_sample(tmp_path / "a", types="q8_0"))
    for folder, first in (("b", False), ("c", True)):
        path = write_sample(tmp_path / folder, types="q8_0", shards=4, metadata_first_shard=first)
        assert path.name.endswith("-00001-of-00004.gguf")
        model = open_gguf(path)
        counts = [sum(t.shard == i for t in model.tensors.values()) for i in range(4)]
        assert (counts[0] == 0) == first
        assert min(counts[first:]) > 0
        assert list(model.tensors) == list(plain.tensors)
        for name in ("token_embd.weight", "blk.4.ffn_down_exps.weight"):
            np.testing.assert_array_equal(model.raw(name), plain.raw(name))
        second = gguf.GGUFReader(model.shards[1])
        keys = [k for k in second.fields if not k.startswith("GGUF.")]
        assert keys == ["split.no", "split.count", "split.tensors.count"]
        assert second.fields["split.no"].contents() == 1


def test_writing_again_replaces_the_old_files(tmp_path: Path) -> None:
    write_sample(tmp_path, types="q8_0", shards=3)
    (tmp_path / "notes.txt").write_text("mine")
    other = write_sample(tmp_path, kind="share", types="q8_0")
    path = write_sample(tmp_path, types="q8_0", hf=True)
    again = write_sample(tmp_path, types="q8_0", hf=True)
    assert sorted(os.listdir(tmp_path)) == sorted(["hf", "notes.txt", other.name, path.name])
    assert again == path
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_layers"] == 5


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="is there and is no GLM-5 twin"):
        write_sample(tmp_path, types="q8_0", hf=True)
    assert (tmp_path / "hf" / "thesis.tex").read_text() == "mine"
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="is a file, not a folder"):
        write_sample(file)
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        write_sample(file / "below")


def test_failure_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
        with pytest.raises(InputError, match="No space left on device"):
            write_sample(tmp_path, types="q8_0", shards=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"kind": "huge"}, "kind: 'huge' is unknown; use full, share, mtp"),
        ({"types": "q4"}, "types: 'q4' is unknown; use f32, f16, q8_0, q4_k_m, mix, q2_k, iq4_xs"),
        ({"shards": 0}, "shards: 0 is out of range; use 1 to"),
        ({"shards": 100}, "shards: 100 is out of range"),
        ({"metadata_first_shard": True}, "shards: 1 is out of range; use 2 to"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        write_sample(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "IQ2_XXS", "Q5_0"])
def test_quantizing_keeps_the_values(kind: str) -> None:
    type_id = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((3, 5, 512), dtype=np.float32)
    if type_id not in quantize_module.IN_NUMPY:
        pytest.importorskip("xllamacpp")
    data = quantize(values, type_id)
    assert data.shape == gguf.quant_shape_to_byte_shape(values.shape, type_id)
    error = np.sqrt(np.mean((dequantize(data, type_id) - values) ** 2))
    assert error < (0.5 if kind.startswith("IQ2") else 0.12)
    with pytest.raises(ValueError, match=f"rows of 100 hold no whole {kind} blocks"):
        quantize(values[..., :100], type_id)


def test_without_the_quantizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_module._library.cache_clear()
    monkeypatch.setitem(sys.modules, "xllamacpp.xllamacpp", None)
    with pytest.raises(Glm5labError, match="pip install xllamacpp"):
        write_sample(tmp_path / "new", types="mix")
    assert not (tmp_path / "new").exists()
    quantize_module._library.cache_clear()

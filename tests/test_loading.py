"""Layer 2: names, values on the way, what does not fit, and the audit of a load."""

import json
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from glm5lab.errors import CheckError, InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import open_gguf
from glm5lab.loading import names, transforms
from glm5lab.loading.prepare import (
    MARKER,
    find_gguf,
    is_prepared,
    open_prepared,
    prepare,
)
from glm5lab.loading.reconcile import reconcile, require_complete
from glm5lab.loading.shapes import expected_shapes


def test_renames_act_on_whole_components():
    name = "model.layers.3.self_attn.indexer.weights_proj.weight"
    assert names.rename_component(name, "weight", "qweight").endswith(".weights_proj.qweight")
    assert names.vllm_parameter(name) == (
        "model.layers.3.self_attn.indexer.wk_weights_proj.weight",
        "1",
    )
    gate = "model.layers.3.mlp.gate.weight"
    assert names.vllm_parameter(gate) == (gate, "")


@pytest.mark.parametrize("sample", ["sample_f32", "sample_share", "sample_mix"])
def test_values_equal_the_hf_twin(sample, request):
    """The twin is written from HF weights without this layer: names, shapes and values agree."""
    path = request.getfixturevalue(sample)
    model = open_gguf(path)
    mappings = require_complete(model, hf_config(model)).loaded
    twin = load_file(path.parent / "hf" / "model.safetensors")
    seen = set()
    for name, tensor in transforms.hf_weights(model, mappings):
        assert name not in seen, f"{name} twice"
        seen.add(name)
        np.testing.assert_array_equal(tensor.numpy(), twin[name], err_msg=name)
    assert seen == set(twin)


def test_shared_layers_and_mtp_are_dropped_with_a_reason(sample_share, tmp_path):
    from glm5lab.gguf.sample import write_sample

    model = open_gguf(sample_share)
    config = hf_config(model)
    result = reconcile(model, config)
    assert result.problems == []
    assert not any("indexer" in m.gguf for m in result.dropped)  # written on full layers only
    extra = names.map_name("blk.2.indexer.proj.weight", {**config, "indexer_types": ["shared"] * 9})
    assert extra is not None
    assert "shares" in extra.dropped

    mtp = open_gguf(write_sample(tmp_path, kind="mtp"))
    dropped = reconcile(mtp, hf_config(mtp)).dropped
    assert dropped
    assert {m.gguf.split(".")[1] for m in dropped} == {str(hf_config(mtp)["num_hidden_layers"])}
    assert all("prediction" in m.dropped for m in dropped)


def test_what_does_not_fit_is_named(sample_f32):
    model = open_gguf(sample_f32)
    config = hf_config(model)
    tensors = dict(model.tensors)
    tensors["blk.0.attn_qq.weight"] = tensors.pop("blk.0.attn_q_a.weight")
    model.tensors = tensors
    config["index_head_dim"] += 1
    problems = "\n".join(reconcile(model, config).problems)
    assert "blk.0.attn_qq.weight: GLM-5 has no such tensor" in problems
    assert "blk.0.attn_q_a.weight: missing, expected shape [" in problems
    assert "blk.1.indexer.attn_k.weight: expected shape [129, " in problems
    with pytest.raises(InputError, match=r"complete GLM-5.*and \d+ more"):
        require_complete(model, config)


def test_every_expected_tensor_is_mapped(sample_f32):
    config = hf_config(open_gguf(sample_f32))
    for name in expected_shapes(config):
        mapping = names.map_name(name, config)
        assert mapping is not None
        assert mapping.vllm, name


def test_kv_b_parts_that_do_not_belong_together():
    with pytest.raises(ValueError, match="attn_k_b"):
        transforms.join_kv_b(np.zeros((2, 8, 4), np.float32), np.zeros((3, 5, 8), np.float32))


def test_prepare_writes_a_folder_and_reuses_its_cache(sample_f32, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM5LAB_CACHE", str(tmp_path / "cache"))
    folder = prepare(sample_f32)
    assert is_prepared(folder)
    written = (folder / MARKER).stat().st_mtime_ns
    assert prepare(sample_f32) == folder
    assert (folder / MARKER).stat().st_mtime_ns == written
    assert json.loads((folder / "config.json").read_text())["model_type"] == "glm_moe_dsa"
    assert open_prepared(folder).tensors.keys() == open_gguf(sample_f32).tensors.keys()
    assert list(folder.parent.glob(".*")) == []  # no work folder left behind


@pytest.mark.parametrize("cached", [True, False])
def test_a_folder_that_cannot_be_written_is_named(sample_f32, tmp_path, monkeypatch, cached):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLM5LAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match=f"cannot be written.*{'GLM5LAB_CACHE' if cached else ''}"):
        prepare(sample_f32, None if cached else tmp_path / "file" / "folder")


def test_a_moved_shard_is_named(tmp_path):
    from glm5lab.gguf.sample import write_sample

    path = write_sample(tmp_path / "a")
    folder = prepare(path, tmp_path / "prepared")
    path.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(InputError, match="prepare"):
        open_prepared(folder)


def test_find_gguf_leaves_other_models_alone(sample_f32, tmp_path):
    assert find_gguf(sample_f32)
    (tmp_path / "config.json").write_text("{}")
    assert not find_gguf(tmp_path)
    assert not find_gguf(tmp_path / "config.json")
    assert not find_gguf(tmp_path / "absent")


class Tiny(torch.nn.Module):
    """Two parameters; `a` has vLLM's kind of weight loader, `b` has none."""

    def __init__(self):
        super().__init__()
        self.a: Any = torch.nn.Parameter(torch.zeros(2))
        self.b = torch.nn.Parameter(torch.zeros(2))
        self.a.weight_loader = lambda parameter, value: parameter.data.copy_(value)  # type: ignore[attr-defined]


def run_audit(weights, expected):
    from glm5lab.loading.loader import LoadAudit

    model = cast(Any, Tiny())
    before = model.a.weight_loader
    audit = LoadAudit(model)
    with audit.watch():
        for name, value in audit.announce(weights):
            parameter = getattr(model, name.split(".")[-1])
            parameter.weight_loader(parameter, value)
    assert model.a.weight_loader is before
    assert not hasattr(model.b, "weight_loader")
    audit.require_complete(expected)
    return model


def test_audit_passes_a_complete_load():
    one = torch.ones(2)
    model = run_audit([("hf.a", one), ("hf.b", one)], {"hf.a": "a", "hf.b": "b"})
    assert torch.equal(model.b, one)


@pytest.mark.parametrize(
    ("loaded", "expected", "message"),
    [
        (["hf.a"], {"hf.a": "a", "hf.b": "b"}, r"hf\.b: loaded 0 times"),
        (["hf.a", "hf.a", "hf.b"], {"hf.a": "a", "hf.b": "b"}, r"hf\.a: loaded 2 times"),
        (["hf.a"], {"hf.a": "a"}, "b: no tensor fills it"),
        (["hf.a", "hf.b"], {"hf.a": "a", "hf.b": "a"}, r"hf\.b: loaded into b unexpectedly"),
    ],
)
def test_audit_names_what_is_wrong(loaded, expected, message):
    with pytest.raises(CheckError, match=message):
        run_audit([(name, torch.ones(2)) for name in loaded], expected)

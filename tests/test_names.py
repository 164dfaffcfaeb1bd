"""Layer 2, the name table: against gguf-py, HF's twin and vllm-gguf-plugin's lists of types."""

import ast
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from rewrite import fuse_experts, rewrite
from safetensors.numpy import load_file
from unknown_types import with_unknown_types

from glm5lab.gguf import kernels
from glm5lab.gguf.byte_order import PLAIN_BYTES
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.placement import placements
from glm5lab.gguf.reader import open_gguf
from glm5lab.loading import names, transforms
from glm5lab.loading.reconcile import reconcile, require_complete
from glm5lab.loading.table import COLUMNS, name_table
from glm5lab.views.names import map_text, name_map, names_text


def table_of(path, **options):
    model = open_gguf(path)
    return name_table(model, hf_config(model), **{"gpu": False, **options})


def of(table, name):
    return table.set_index("name").loc[name]


@pytest.mark.parametrize("role", sorted(names.BLOCK))
def test_gguf_py_agrees_on_every_name(role):
    """gguf-py's own map from Hugging Face names, as the converter uses it."""
    arch = gguf.MODEL_ARCH.GLM_DSA
    if role == "ffn_gate_up_exps.weight":  # listed for Gemma 4 and others, not for GLM_DSA
        fused = gguf.MODEL_TENSOR.FFN_GATE_UP_EXP
        arch = next(a for a, tensors in gguf.MODEL_TENSORS.items() if fused in tensors)
    known = gguf.get_tensor_name_map(arch, 4)
    hf = names.BLOCK[role]
    # The converter renames these before it asks: stacks, the halves of kv_b, the bias.
    hf = {"attn_k_b.weight": "self_attn.k_b_proj.weight"}.get(role, hf)
    hf = {"attn_v_b.weight": "self_attn.v_b_proj.weight"}.get(role, hf)
    hf = hf.replace("{e}.", "").replace("{gate,up}", "gate_up")
    hf = hf.replace("e_score_correction_bias", "e_score_correction.bias")
    found = known.get_name(f"model.layers.3.{hf}", try_suffixes=(".weight", ".bias"))
    assert found == f"blk.3.{role}"


def test_gguf_py_agrees_outside_the_blocks():
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM_DSA, 1)
    for name, hf in names.OUTSIDE.items():
        assert known.get_name(hf, try_suffixes=(".weight",)) == name


@pytest.mark.parametrize("sample", ["sample_f32", "sample_share", "sample_mix", "sample_mtp"])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_row_for_every_tensor(sample, gpu, request):
    path = request.getfixturevalue(sample)
    model, table = open_gguf(path), table_of(path, gpu=gpu, tp=2, pp=2)
    assert tuple(table.columns) == COLUMNS
    assert list(table["name"]) == list(model.tensors)
    assert not table.isna().drop(columns="layer").to_numpy().any()
    for row, tensor in zip(table.itertuples(), model.tensors.values(), strict=True):
        assert (row.type, row.nbytes, row.shape, row.shard) == (
            *(tensor.type, tensor.nbytes, tensor.shape),
            tensor.shard + 1,
        )
        # Loaded or dropped for a reason, never both, never neither.
        assert bool(row.vllm) == bool(row.hf) == bool(row.kernel) != bool(row.dropped)
        assert bool(row.dropped) == (row.stage == -1) == (row.rank_bytes == 0)
    placed = placements(model, hf_config(model), 2, 2, gpu)
    assert dict(zip(table["name"], table["rank_bytes"], strict=True)) == {
        name: p.loaded for name, p in placed.items()
    }


def test_a_fused_parameter_has_each_part_once(sample_f32):
    table = table_of(sample_f32)
    parts = table[table["part"] != ""]
    assert not parts.duplicated(["vllm", "part"]).any()
    assert set(parts.groupby("vllm")["part"].agg("".join)) == {"01", "w1w3", "w2"}
    whole = table[(table["part"] == "") & (table["vllm"] != "")]
    twice = whole[whole.duplicated("vllm", keep=False)]
    assert set(twice["vllm"].str.extract(r"(\w+)\.weight$")[0]) == {"kv_b_proj"}


def test_indexers_of_shared_layers_are_dropped(sample_share, tmp_path):
    """Some publishers write an indexer on every layer of an IndexShare model."""
    config = hf_config(open_gguf(sample_share))
    shared = config["indexer_types"].index("shared")

    def everywhere(tensors):
        mine = {n: t for n, t in tensors.items() if n.startswith("blk.0.indexer.")}
        return tensors | {n.replace("blk.0.", f"blk.{shared}."): t for n, t in mine.items()}

    table = table_of(rewrite(sample_share, tmp_path / "copy.gguf", everywhere))
    dropped = table[table["dropped"] != ""]
    assert list(dropped["layer"]) == [shared] * 5
    assert set(dropped["dropped"]) == {names.SHARED_INDEXER}
    assert not (table["problem"] != "").any()


def test_rope_freqs_and_the_draft_block_are_dropped(sample_mtp, tmp_path):
    copy = rewrite(
        sample_mtp,
        tmp_path / "copy.gguf",
        lambda tensors: {**tensors, "rope_freqs.weight": (np.ones(32, np.float32), 0)},
    )
    model = open_gguf(copy)
    table = table_of(copy)
    reasons = dict(zip(table["name"], table["dropped"], strict=True))
    assert reasons["rope_freqs.weight"] == names.ROPE_FREQS
    last = hf_config(model)["num_hidden_layers"]
    assert {n for n, why in reasons.items() if why == names.MTP} == {
        name for name in model.tensors if name.startswith(f"blk.{last}.")
    }
    text, fits = map_text(copy)
    assert fits
    assert text.count("dropped: ") == 2


def test_fused_experts_load_the_same_values(sample_f32, tmp_path):
    """HF's twin knows gate and up apart; the file holds them in one tensor, gate first."""
    model = open_gguf(rewrite(sample_f32, tmp_path / "fused.gguf", fuse_experts))
    result = require_complete(model, hf_config(model))
    twin = load_file(sample_f32.parent / "hf" / "model.safetensors")
    loaded = {n: values.numpy() for n, values in transforms.hf_weights(model, result.loaded)}
    assert loaded.keys() == twin.keys()
    for name, values in loaded.items():
        np.testing.assert_array_equal(values, twin[name], err_msg=name)
    row = of(table_of(model.path), "blk.1.ffn_gate_up_exps.weight")
    assert (row["part"], row["hf"]) == (
        "w1+w3",
        "model.layers.1.mlp.experts.{e}.{gate,up}_proj.weight",
    )
    assert row["problem"] == ""


def test_experts_both_fused_and_apart_are_a_problem(sample_f32, tmp_path):
    both = rewrite(
        sample_f32, tmp_path / "both.gguf", lambda tensors: fuse_experts(tensors) | tensors
    )
    model = open_gguf(both)
    problems = reconcile(model, hf_config(model)).problems
    assert any(p.startswith("blk.1.ffn_up_exps.weight: not expected") for p in problems)
    assert not any("gate_up" in p.split(":")[0] for p in problems)


@pytest.mark.parametrize("gpu", [False, True])
def test_unknown_types_have_no_kernel(sample_f32, tmp_path, gpu):
    path = with_unknown_types(sample_f32, tmp_path)
    table = table_of(path, gpu=gpu)
    unknown = table["type"].str.startswith("unknown(")
    assert unknown.any()
    assert (table["kernel"][unknown] == "").all()
    assert (table["problem"][unknown] != "").all()
    assert (table["problem"][~unknown] == "").all()
    text, fits = map_text(path, gpu=gpu)
    assert not fits
    assert "problem: ffn_down_exps.weight (blocks 1-4): type unknown(138)" in text


def test_a_file_without_output_is_incomplete(sample_f32, tmp_path):
    """vLLM's lm_head for GLM-5 is a parameter of its own: nothing would fill it."""

    def without(tensors):
        return {name: t for name, t in tensors.items() if name != "output.weight"}

    text, fits = map_text(rewrite(sample_f32, tmp_path / "copy.gguf", without))
    assert not fits
    assert "problem: output.weight: missing, expected shape [512, 256]" in text


def test_missing_blocks_are_one_problem(sample_f32, tmp_path):
    def without(tensors):
        gone = ("blk.0.", "blk.2.", "blk.3.")
        return {name: t for name, t in tensors.items() if not name.startswith(gone)}

    model = open_gguf(rewrite(sample_f32, tmp_path / "copy.gguf", without))
    assert reconcile(model, hf_config(model)).problems == [
        "blk.0: missing, every tensor of it",
        "blk.2 to blk.3: missing, every tensor of them",
    ]


def test_experts_of_two_types_are_no_problem(sample_mix):
    for gpu in (True, False):
        table = table_of(sample_mix, gpu=gpu)
        halves = table[table["name"].str.contains("(?:gate|up)_exps")]
        assert (halves.groupby("layer")["type"].nunique() == 2).any()
        assert (table["problem"] == "").all()


def test_any_shape_and_type_ends_in_a_table(sample_f32):
    """Shapes and types at random: problems, never an exception."""
    model = open_gguf(sample_f32)
    config, rng = hf_config(model), random.Random(0)
    original = dict(model.tensors)
    types = ["Q4_K", "IQ2_XS", "BF16", "I8", "MXFP4", "Q8_K", "unknown(144)"]
    for number in range(30):
        model.tensors = {}
        for name, tensor in original.items():
            if rng.random() < 0.1:
                shape = tuple(rng.choice([0, 1, 3, 256]) for _ in range(rng.randint(1, 4)))
                tensor = replace(tensor, shape=shape)
            if rng.random() < 0.1:
                tensor = replace(tensor, type=rng.choice(types))
            if rng.random() > 0.05 and number:
                model.tensors[name] = tensor
        names_of = name_map(model, config, tp=2, pp=2, gpu=bool(number % 2))
        assert names_of.problems
        for tensors in (False, True):
            assert "problem: " in names_text(names_of, tensors)
        wrong = [n for n, t in model.tensors.items() if t.shape != original[n].shape]
        assert (of(names_of.table, wrong)["problem"].str.contains("expected shape")).all()


def test_odd_names_are_named_not_mapped(sample_f32, tmp_path):
    odd = [
        *("blk.0.attn_norm.weight\n", "blk.00.attn_norm.weight", "blk.-1.attn_norm.weight"),
        *("blk.99999999999999999999.attn_norm.weight", "blk.5.attn_norm.weight"),
        *("blk.0.nextn.enorm.weight", "attn_norm.weight", "blk.0.token_embd.weight"),
        *("blk.0.ffn_gate_exps.scale", "blk.0.rope_freqs.weight", "blk..attn_norm.weight"),
    ]
    model = open_gguf(sample_f32)
    config = hf_config(model)
    assert [n for n in odd if names.map_name(n, config) is not None] == []
    one = np.ones(256, np.float32), 0
    copy = rewrite(sample_f32, tmp_path / "odd.gguf", lambda t: t | dict.fromkeys(odd, one))
    problems = reconcile(open_gguf(copy), config).problems
    assert problems == [f"{name}: GLM-5 has no such tensor" for name in odd]


def test_gguf_py_dequantizes_what_the_table_says():
    for kind in gguf.GGMLQuantizationType:
        if kind.name in PLAIN_BYTES or kind not in gguf.GGML_QUANT_SIZES:
            continue
        packed = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            gguf.quants.dequantize(packed, kind)
            expected = True
        except NotImplementedError:
            expected = False
        assert kernels.can_dequantize(kind.name) == expected, kind.name
        assert (kernels.kernel(kind.name, "attn_k_b.weight", gpu=True) != "") == expected
    assert not kernels.can_dequantize("unknown(144)")
    assert not kernels.can_dequantize("__class__")


def test_every_listed_type_is_one_of_ggml():
    known = {kind.name for kind in gguf.GGMLQuantizationType}
    assert known >= PLAIN_BYTES.keys() | kernels.UNQUANTIZED | kernels.QUANTIZED


@pytest.mark.skipif(find_spec("vllm_gguf_plugin") is None, reason="vllm-gguf-plugin is for GPUs")
def test_the_lists_are_the_plugin_s():
    """Parsed, not imported: the package loads CUDA libraries."""
    spec = find_spec("vllm_gguf_plugin")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "quantization" / "utils.py").read_text())
    found = {
        node.targets[0].id: {e.attr for e in node.value.elts if isinstance(e, ast.Attribute)}
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Set)
    }
    assert found["UNQUANTIZED_TYPES"] == kernels.UNQUANTIZED
    assert found["STANDARD_QUANT_TYPES"] == kernels.STANDARD
    assert found["KQUANT_TYPES"] == kernels.K_TYPES
    assert found["IMATRIX_QUANT_TYPES"] == kernels.I_TYPES


@pytest.mark.parametrize(
    ("role", "type_name", "gpu", "expected"),
    [
        ("attn_q_b.weight", "Q4_K", True, "MMVQ + MMQ"),
        ("attn_q_b.weight", "IQ2_XS", True, "MMVQ + dequantize"),
        ("attn_q_b.weight", "MXFP4", True, "dequantized"),
        ("attn_q_b.weight", "MXFP4", False, "dequantized"),
        ("attn_q_b.weight", "BF16", True, "unquantized"),
        ("attn_k_b.weight", "Q5_0", True, "dequantized"),
        ("indexer.proj.weight", "Q4_K", True, "dequantized"),
        ("indexer.attn_q_b.weight", "Q4_K", True, "MMVQ + MMQ"),
        ("token_embd.weight", "Q4_K", True, "dequantize rows"),
        ("output.weight", "Q6_K", True, "MMVQ + MMQ"),
        ("ffn_up_exps.weight", "Q4_K", True, "MoE MMVQ + MMQ"),
        ("ffn_up_exps.weight", "IQ1_S", True, "MoE MMVQ"),
        ("ffn_up_exps.weight", "IQ3_S", True, "MoE Triton"),
        ("attn_output.weight", "IQ3_S", True, "Triton + dequantize"),
        ("ffn_up_shexp.weight", "Q8_0", True, "MMVQ + MMQ"),
        ("ffn_up_exps.weight", "IQ1_S", False, "dequantized"),
        ("ffn_up_exps.weight", "unknown(144)", False, ""),
    ],
)
def test_kernels(role, type_name, gpu, expected):
    assert kernels.kernel(type_name, role, gpu) == expected

"""Layer 1: which rank holds how many bytes, against what vLLM allocates."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from children import printed

from glm5lab.errors import InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.parts import widest_share
from glm5lab.gguf.placement import DROPPED, placements, stage_layers
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.loading.names import map_name

RANK = Path(__file__).parent / "vllm_rank.py"
# Bytes of every parameter of one rank, right behind the loader: afterwards vLLM's CPU kernels
# repack matrices into forms of their own.
ENGINE = """
import json, os, sys
from glm5lab.loading.loader import GgufModelLoader
load = GgufModelLoader.load_weights
def recorded(self, model, config):
    load(self, model, config)
    sizes = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    print("SIZES", json.dumps(sizes))
    sys.stdout.flush()
    os._exit(0)
GgufModelLoader.load_weights = recorded
from vllm import LLM
LLM(model=sys.argv[1], dtype=sys.argv[2], enforce_eager=True, max_model_len=64, max_num_seqs=1)
"""


def sizes_from(*command):
    """Parameter bytes that a child prints."""
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    return printed("SIZES", command, env)[0]


def loaded_by_parameter(config, table):
    """Placement's bytes, summed over the tensors that fill the same vLLM parameter."""
    sums: Counter[str] = Counter()
    for name, placement in table.items():
        mapping = map_name(name, config)
        assert mapping is not None
        assert bool(mapping.dropped) == (placement.split == "dropped"), name
        if mapping.vllm:
            sums[mapping.vllm] += placement.loaded
    return dict(sums)


@pytest.mark.parametrize(
    ("sample", "dtype"),
    [("sample_mix", "bfloat16"), ("sample_share", "float32"), ("sample_mtp", "bfloat16")],
)
def test_the_sums_equal_what_the_engine_allocates(sample, dtype, request):
    """Parameter by parameter, so that no two mistakes cancel."""
    file = request.getfixturevalue(sample)
    model = open_gguf(file)
    config = {**hf_config(model), "dtype": dtype}
    table = placements(model, config, gpu=False)
    assert loaded_by_parameter(config, table) == sizes_from("-c", ENGINE, file, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tp", "pp", "ranks"),
    [
        # Whole experts a rank take blocks on a CPU too: see the packed ranks below.
        ("glm-5-q4_k_m", 8, 1, [7]),
        ("glm-5-q4_k_m", 2, 4, [0, 7]),
        ("glm-5.2-ud-iq2_xxs", 4, 2, [7]),
    ],
)
def test_ranks_of_the_real_model_are_as_vllm_builds_them(layout, tp, pp, ranks, tmp_path):
    """Files of public models' shape, without weights; vLLM's parameters of single ranks."""
    file = write_layout(read_layouts()[layout], tmp_path)
    model = open_gguf(file)
    config = hf_config(model)
    table = placements(model, config, tp, pp, gpu=False)
    for rank in ranks:
        held = {
            name: p if p.stage == rank // tp else replace(p, loaded=0) for name, p in table.items()
        }
        expected = {k: v for k, v in loaded_by_parameter(config, held).items() if v}
        assert expected == sizes_from(RANK, file, tp, pp, rank, 0), rank


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2), (1, 5)])
@pytest.mark.parametrize("sample", ["sample_f32", "sample_mix"])
def test_the_ranks_parts_add_up_to_the_file(sample, tp, pp, request):
    model = open_gguf(request.getfixturevalue(sample))
    config = hf_config(model)
    for name, placement in placements(model, config, tp, pp).items():
        nbytes = model.tensors[name].nbytes
        whole = placement.split == "replicated"
        assert (placement.packed - placement.border) * (1 if whole else tp) == nbytes, name
        assert 0 <= placement.stage < pp
        assert placement.loaded >= placement.packed or not placement.kept


def test_quantized_weights_stay_so_on_a_gpu_but_for_what_vllm_needs_plain(sample_mix):
    model = open_gguf(sample_mix)
    table = placements(model, hf_config(model))
    plain = {model.tensors[n].role for n, p in table.items() if not p.kept}
    assert plain == {
        *("attn_k_b.weight", "attn_v_b.weight", "indexer.attn_k.weight", "indexer.proj.weight"),
        *("ffn_gate_inp.weight", "exp_probs_b.bias", "output_norm.weight", "attn_norm.weight"),
        *("ffn_norm.weight", "attn_q_a_norm.weight", "attn_kv_a_norm.weight"),
        *("indexer.k_norm.weight", "indexer.k_norm.bias"),
    }
    # Rows of 256: Q8_0 takes 272 bytes, Q6_K 210; each part is a parameter of its own.
    q_a, kv_a = table["blk.0.attn_q_a.weight"], table["blk.0.attn_kv_a_mqa.weight"]
    assert (q_a.loaded, q_a.packed) == (256 * 272, 256 * 272)
    assert (kv_a.loaded, kv_a.packed) == (576 * 210, 576 * 210)
    # [4, 512, 192] in Q5_0 (22 bytes for 32 values) becomes bfloat16.
    k_b = table["blk.0.attn_k_b.weight"]
    assert (k_b.loaded, k_b.packed) == (4 * 512 * 192 * 2, 4 * 512 * 192 // 32 * 22)


def test_a_plain_part_leaves_the_other_quantized(sample_mix):
    model = open_gguf(sample_mix)
    name = "blk.0.attn_q_a.weight"
    model.tensors[name] = replace(model.tensors[name], type="BF16", nbytes=256 * 512)
    table = placements(model, hf_config(model))
    assert not table[name].kept
    assert table["blk.0.attn_kv_a_mqa.weight"].kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tp", "pp", "expert_parallel", "rank"),
    [
        ("glm-5-q4_k_m", 8, 1, False, 7),
        ("glm-5-q4_k_m", 8, 1, True, 3),
        ("glm-5-q4_k_m", 2, 4, False, 7),
        ("glm-5.2-ud-iq2_xxs", 4, 2, False, 0),
    ],
)
def test_quantized_ranks_of_the_real_model_take_what_is_planned(
    layout, tp, pp, expert_parallel, rank, tmp_path
):
    """As on a GPU, layer by layer: blocks where they stay, bf16 elsewhere."""
    file = write_layout(read_layouts()[layout], tmp_path)
    model = open_gguf(file)
    config = {**hf_config(model), "dtype": "bfloat16"}
    table = placements(model, config, tp, pp, expert_parallel=expert_parallel)
    held = {n: p if p.stage == rank // tp else replace(p, loaded=0) for n, p in table.items()}
    built = sizes_from(RANK, file, tp, pp, rank, int(expert_parallel), "glm5lab")
    assert by_layer(loaded_by_parameter(config, held)) == by_layer(built)
    assert sum(p.loaded for p in held.values()) == sum(built.values())


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_half_a_file_is_read_by_each_of_two_ranks(expert_parallel, tmp_path):
    """Of the real GLM-5: what is replicated adds less than a tenth."""
    model = open_gguf(write_layout(read_layouts()["glm-5-q4_k_m"], tmp_path))
    table = placements(model, hf_config(model), 2, expert_parallel=expert_parallel)
    assert sum(p.packed for p in table.values()) <= 0.55 * model.nbytes


def by_layer(sizes):
    """Bytes of each of vLLM's layers: how many parameters one has depends on its types."""
    sums: Counter[str] = Counter()
    for name, size in sizes.items():
        sums[name.rpartition(".")[0]] += size
    return {layer: size for layer, size in sums.items() if size}


def test_what_the_ranks_cannot_divide_is_named(sample_mix):
    model = open_gguf(sample_mix)
    config = hf_config(model)

    def problems(tp, **options):
        table = placements(model, config, tp, **options)
        return "\n".join(p.problem for p in table.values() if p.problem)

    assert problems(1) == problems(2) == problems(4) == ""
    assert "blk.0.attn_k_b.weight: 4 heads do not divide by 3 ranks" in problems(3)
    assert "token_embd.weight: 512 rows do not divide by 3 ranks" in problems(3)
    assert "blk.1.ffn_down_exps.weight: 256 columns do not divide by 3 ranks" in problems(3)
    assert "ffn_down_exps" not in problems(3, expert_parallel=True)


def test_ranks_keep_the_blocks_at_their_borders_whole(sample_mix):
    """Rows of 256 hold one block of Q6_K or Q4_K, of which each of two ranks owns a half."""
    model = open_gguf(sample_mix)
    name = "blk.1.ffn_down_exps.weight"  # [12, 256, 256] in Q4_K, 144 bytes a row
    sliced, whole = 12 * 256 * 144, 6 * 256 * 144
    place = placements(model, hf_config(model), 2)[name]
    assert (place.packed, place.loaded, place.border) == (sliced, sliced, sliced // 2)
    place = placements(model, hf_config(model), 2, expert_parallel=True)[name]
    assert (place.packed, place.loaded, place.border) == (whole, whole, 0)
    # As numbers only the share is kept; the blocks are read.
    place = placements(model, hf_config(model), 2, gpu=False)[name]
    assert (place.packed, place.loaded, place.border) == (sliced, 12 * 256 * 128 * 2, 0)


@pytest.mark.parametrize(
    ("columns", "ranks", "widest"),
    [
        *((256, 2, 256), (512, 2, 256), (2048, 8, 256), (2048, 16, 256), (768, 4, 512)),
        *((1280, 4, 512), (768, 2, 512), (0, 2, 0), (256, 3, 256), (1024, 1, 1024)),
    ],
)
def test_the_widest_share_of_a_row(columns, ranks, widest):
    """Counted block by block: 768 columns over 4 ranks are 192 each, the second one's in two."""
    assert widest_share(columns, ranks, 256) == widest
    share = -(-columns // ranks)
    blocks = [
        {column // 256 for column in range(rank * share, min(columns, (rank + 1) * share))}
        for rank in range(ranks)
    ]
    assert max(map(len, blocks)) * 256 == widest


def test_whole_experts_a_rank(sample_mix):
    model = open_gguf(sample_mix)
    table = placements(model, hf_config(model), tp=4, expert_parallel=True)
    for name in ("blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"):
        assert table[name].split == "expert"
        assert table[name].packed * 4 == model.tensors[name].nbytes


def test_layers_are_dealt_as_vllm_deals_them(monkeypatch):
    from vllm.distributed.utils import get_pp_indices

    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for layers in (4, 5, 78):
        for pp in range(1, min(layers, 9) + 1):
            expected = [range(*get_pp_indices(layers, rank, pp)) for rank in range(pp)]
            assert stage_layers(layers, pp) == expected, (layers, pp)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    expected = [range(*get_pp_indices(4, rank, 2)) for rank in range(2)]
    assert stage_layers(4, 2, [1, 3]) == expected


@pytest.mark.parametrize(
    "options", [{"tp": 0}, {"pp": 0}, {"pp": 6}, {"pp": 2, "partition": [5, 1]}]
)
def test_impossible_counts_are_refused(sample_f32, options):
    model = open_gguf(sample_f32)
    with pytest.raises(InputError, match="expected"):
        placements(model, hf_config(model), **options)


def test_mtp_and_indexers_of_shared_layers_are_dropped(tmp_path):
    model = open_gguf(write_sample(tmp_path / "mtp", kind="mtp", types="mix"))
    table = placements(model, hf_config(model))
    assert {model.tensors[n].layer for n, p in table.items() if p == DROPPED} == {4}


@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 256), (2**40,)])
def test_shapes_that_no_glm5_has_give_numbers_and_no_crash(sample_mix, shape):
    """`map` names them as problems; sums must not end in a traceback before that."""
    model = open_gguf(sample_mix)
    for name, tensor in model.tensors.items():
        model.tensors[name] = replace(tensor, shape=shape)
    for expert_parallel in (False, True):
        table = placements(model, hf_config(open_gguf(sample_mix)), 4, 2, True, expert_parallel)
        assert all(p.packed >= 0 and p.loaded >= 0 for p in table.values())

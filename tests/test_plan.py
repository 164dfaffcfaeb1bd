"""Layer 1: does a file fit, spread how, with how many tokens."""

import json
from itertools import combinations

import pytest
from http_server import serving
from typer.testing import CliRunner

from glm5lab.__main__ import app
from glm5lab.errors import InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.memory import GIB, PAGE_TOKENS, index_row_bytes, kv_row_bytes, workspace
from glm5lab.gguf.parallel import Card, evaluate
from glm5lab.gguf.placement import placements
from glm5lab.gguf.plan import make_plan
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.gguf.stages import balanced_partition
from glm5lab.views.plan import plan_json, plan_text


@pytest.fixture(scope="module")
def shared(sample_share):
    return open_gguf(sample_share)


@pytest.fixture(scope="module")
def full(sample_f32):
    return open_gguf(sample_f32)


def gib_for(model, tp, pp, spare=0):
    """GiB of a card such that the model's fullest rank has `spare` bytes for the cache."""
    config = {**hf_config(model), "dtype": "bfloat16"}
    split = evaluate(model, config, Card(64.0, 1.0), ("bf16",), tp, pp, 1, 4096)
    return (split.used + spare) / GIB


def test_rows_are_those_of_vllms_caches(full):
    """The sample has GLM-5's widths; vLLM's own: 576 bf16, 656 packed, 128 fp8 and a float32."""
    config = hf_config(full)
    assert kv_row_bytes(config, "bf16") == 1152
    assert kv_row_bytes(config, "fp8_ds_mla") == 656
    assert index_row_bytes(config) == 132


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_ds_mla"])
def test_a_block_of_the_cache_is_as_large_as_vllms(shared, kv_dtype):
    """vLLM's own cache descriptions for a model that shares indices, as its layers give them."""
    import torch
    from vllm.v1.hisparse.runtime import FP8_DS_MLA_ROW_BYTES
    from vllm.v1.kv_cache_interface import (
        MLAAttentionSpec,
        SparseCacheRole,
        UniformTypeKVCacheSpecs,
    )

    common = {"block_size": PAGE_TOKENS, "num_kv_heads": 1, "max_tp_shards": 1}
    rows = {"head_size": 576, "dtype": torch.bfloat16}
    if kv_dtype == "fp8_ds_mla":
        rows |= {"dtype": torch.uint8, "cache_dtype_str": kv_dtype}
        rows["state_content_bytes"] = FP8_DS_MLA_ROW_BYTES
    keys = {"head_size": 132, "dtype": torch.uint8, "cache_role": SparseCacheRole.INDEXER}
    specs = {}
    for layer, kind in enumerate(hf_config(shared)["indexer_types"]):
        leads = kind == "full"
        specs[f"{layer}.attn"] = MLAAttentionSpec(**common, **rows, is_index_group_leader=leads)
        if leads:
            specs[f"{layer}.indexer"] = MLAAttentionSpec(**common, **keys)
    block = UniformTypeKVCacheSpecs.from_specs(specs)
    assert block is not None
    config = {**hf_config(shared), "dtype": "bfloat16"}
    split = evaluate(shared, config, Card(8.0), (kv_dtype,), 1, 1)
    assert block.page_size_bytes == PAGE_TOKENS * split.stages[0].token_bytes(config, kv_dtype)


def test_tokens_are_counted_in_whole_pages_of_the_fullest_rank(full):
    page = 64 * 5 * (1152 + 132)
    for spare, tokens in ((100 * page, 6400), (100 * page - 1, 6336), (page - 1, 0)):
        gib = gib_for(full, 1, 1, spare)
        plan = make_plan(full, 1, gib, context=4096, utilization=1.0)
        assert plan.best.caches[0].tokens == tokens
        assert plan.fits == (tokens >= 4096)
    assert plan.best.caches[0].missing == 4096 * 5 * 1284 - (page - 1)
    assert plan.missing_gib == pytest.approx(plan.best.caches[0].missing / GIB)


def test_cache_rows_are_divided_by_context_parallelism_only(full):
    card, config = Card(8.0), {**hf_config(full), "dtype": "bfloat16"}
    by_tp = [evaluate(full, config, card, ("bf16",), tp, 1, 1, 4096) for tp in (1, 2)]
    assert by_tp[0].stages[0].token_bytes(config, "bf16") == 5 * 1284
    assert by_tp[1].stages[0].token_bytes(config, "bf16") == 5 * 1284
    spread = evaluate(full, config, card, ("bf16",), 2, 1, 2, 4096)
    assert spread.caches[0].tokens == 2 * by_tp[1].caches[0].tokens


def test_shared_layers_keep_no_index_keys(shared):
    """Layers 2 and 4 of the sample share: three indexers on five layers."""
    config = {**hf_config(shared), "dtype": "bfloat16"}
    split = evaluate(shared, config, Card(8.0), ("bf16", "fp8_ds_mla"), 1, 1)
    assert split.stages[0].token_bytes(config, "bf16") == 5 * 1152 + 3 * 132
    assert split.stages[0].token_bytes(config, "fp8_ds_mla") == 5 * 656 + 3 * 132


def test_weights_are_the_placements_sums(sample_mix):
    model = open_gguf(sample_mix)
    config = hf_config(model)
    result, _ = plan_json(model, 2, 16.0, tp=1, pp=2)
    table = placements(model, config, 1, 2)
    for number, stage in enumerate(result["splits"][0]["stages"]):
        held = [p for p in table.values() if p.stage == number]
        assert stage["packed_bytes"] == sum(p.loaded for p in held if p.kept)
        assert stage["dequantized_bytes"] == sum(p.loaded for p in held if not p.kept)


def test_no_context_means_as_long_as_fits(full):
    """A card with room for a few pages only: a shorter request needs less workspace too."""
    roomy = make_plan(full, 1, 64.0)
    assert roomy.best.caches[0].context == 4096
    config = {**hf_config(full), "dtype": "bfloat16"}
    base = gib_for(full, 1, 1) * GIB - workspace(config, 1, 4096, 1.0, True).total
    needs = base + workspace(config, 1, 3000, 1.0, True).total + 3008 * 5 * 1284
    plan = make_plan(full, 1, needs / GIB, utilization=1.0)
    cache = plan.best.caches[0]
    assert plan.fits
    assert 2944 <= cache.context <= cache.tokens < 3200
    assert not make_plan(full, 1, needs / GIB, utilization=1.0, context=4096).fits
    assert plan.best.options(plan.card)[-2:] == ["--max-model-len", str(cache.context)]


def test_stages_begin_where_an_indexer_is(shared):
    """vLLM's 3 + 2 would begin the second stage at layer 3, its 1 + 2 + 2 at 1 and 3."""
    config = {**hf_config(shared), "dtype": "bfloat16"}
    assert config["index_topk_pattern"] == "FFSFS"
    for pp, starts in ((2, {0, 1, 3}), (3, {0, 1, 3})):
        split = evaluate(shared, config, Card(64.0), ("bf16",), 1, pp)
        assert split.fits
        assert {stage.layers[0] for stage in split.stages} <= starts
    assert split.environment == {"VLLM_PP_LAYER_PARTITION": "1,2,2"}
    four = evaluate(shared, config, Card(64.0), ("bf16",), 1, 4)
    assert not four.fits
    assert "shares the top-k" in four.problems[0]


@pytest.mark.parametrize("pp", [2, 3])
def test_the_balanced_partition_is_the_best_of_all(shared, pp):
    config = {**hf_config(shared), "dtype": "bfloat16"}
    placed = placements(shared, config, 1, pp)

    def fullest(counts):
        split_at = placements(shared, config, 1, pp, partition=counts)
        return max(sum(p.loaded for p in split_at.values() if p.stage == n) for n in range(pp))

    ways = [
        [b - a for a, b in zip((0, *cuts), (*cuts, 5), strict=True)]
        for cuts in combinations((1, 3), pp - 1)
    ]
    found = balanced_partition(config, placed, shared, pp)
    assert found is not None
    assert fullest(found) == min(map(fullest, ways))
    assert balanced_partition(config, placed, shared, 5) is None


def test_splits_are_ranked_and_use_every_gpu(full):
    plan = make_plan(full, 4, 64.0)
    assert [(s.tp, s.pp) for s in plan.splits] == [(4, 1), (2, 2), (1, 4)]
    assert all(split.fits for split in plan.splits)
    # 4 heads: no three ranks; 5 layers: no six stages.
    assert [(s.tp, s.pp) for s in make_plan(full, 3, 64.0).splits] == [(1, 3)]
    with pytest.raises(InputError, match="does not come to 6 GPUs"):
        make_plan(full, 6, 64.0, tp=1)
    assert [(s.tp, s.pp) for s in make_plan(full, 6, 64.0, tp=2).splits] == [(2, 3)]
    assert [(s.tp, s.pp) for s in make_plan(full, 6, 64.0, tp=2, pp=1).splits] == [(2, 1)]
    refused = make_plan(full, 3, 64.0, tp=3, pp=1)
    assert not refused.fits
    assert "4 attention heads do not divide by tp 3" in refused.best.problems


def test_slices_across_block_borders_become_whole_experts(sample_mix):
    """Experts of 256 columns in K types: half of them is no block, both ranks would keep it."""
    model = open_gguf(sample_mix)
    split = evaluate(model, hf_config(model), Card(64.0), ("bf16",), 2, 1)
    assert (split.expert_parallel, split.problems) == (True, ())
    assert "--enable-expert-parallel" in split.options(Card(64.0))


def test_what_blocks_on_two_ranks_cost_is_said(sample_mix):
    """Of two shared experts in Q6_K each rank keeps 256 rows of 210 bytes; half is its share."""
    text, fits = plan_text(sample_mix, 2, 64.0, tp=2, width=1000)
    assert fits
    assert (
        "note: borders between ranks lie inside blocks of Q6_K: of 2 tensors, such as "
        "blk.1.ffn_down_shexp.weight, ranks keep the blocks at their borders whole, "
        "each rank at most 53,760 bytes beside its share of 53,760" in text
    )
    assert "lie inside blocks" not in plan_text(sample_mix, 2, 64.0, tp=1, pp=2, width=1000)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus 0"),
        ({"gpu_memory_gib": 0.0}, "gpu memory"),
        ({"gpu_memory_gib": float("nan")}, "gpu memory nan"),
        ({"context": 4097}, "1 to 4096 tokens"),
        ({"utilization": 1.5}, "utilization 1.5"),
        ({"utilization": 0.0}, "utilization 0.0"),
        ({"kv_dtype": "int3"}, "kv dtype 'int3'"),
    ],
)
def test_arguments_out_of_range_are_named(full, options, message):
    with pytest.raises(InputError, match=message):
        make_plan(full, **{"gpus": 1, "gpu_memory_gib": 8.0, **options})


def test_the_command_answers_yes_no_and_in_json(sample_f32, sample_share):
    run = CliRunner().invoke
    yes = run(app, ["plan", str(sample_f32), "--gpus", "2", "--gpu-memory", "8"])
    assert yes.exit_code == 0, yes.output
    assert "fits: tp 2" in yes.output
    line = "vllm serve FILE --tensor-parallel-size 2 --kv-cache-dtype bfloat16"
    assert f"{line} --max-model-len 4096" in yes.output
    no = run(app, ["plan", str(sample_f32), "--gpus", "1", "--gpu-memory", "0.5"])
    assert no.exit_code == 1
    assert "GiB are missing on each GPU" in " ".join(no.output.split())
    command = ["plan", str(sample_share), "--gpus", "1", "--gpu-memory", "8", "--json"]
    result = json.loads(run(app, [*command, "--kv-dtype", "fp8_ds_mla"]).output)
    assert result["fits"]
    assert result["splits"][0]["vllm_options"][2:4] == ["--kv-cache-dtype", "fp8_ds_mla"]
    assert result["splits"][0]["cache"]["bf16"]["fits"]


def test_the_text_fits_a_screen_and_a_header_is_enough(sample_mix, tmp_path):
    text, _ = plan_text(sample_mix, 8, 0.1)
    assert len(text.splitlines()) < 40
    # The last shard's weights cut off right behind the header: what a partial download leaves.
    source = write_sample(tmp_path, "share", "mix")
    whole, _ = plan_json(source, 1, 8.0)
    first = min(tensor.offset for tensor in open_gguf(source).tensors.values())
    with source.open("r+b") as file:
        file.truncate(first)
    cut, _ = plan_json(source, 1, 8.0)
    assert "truncated" in cut["notes"][0]
    assert cut["notes"][1:] == whole["notes"]
    assert {**cut, "notes": []} == {**whole, "notes": []}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Files of the shape of public GLM-5 files, without weights, by the layout's name."""
    folder = tmp_path_factory.mktemp("layouts")
    return {name: write_layout(layout, folder) for name, layout in read_layouts().items()}


def test_glm5_q4_k_m_fits_eight_cards_of_96_gib(layouts):
    """456 GB of weights on 8 x 96: 57 GB a card, and about 30 GiB for the cache."""
    result, fits = plan_json(layouts["glm-5-q4_k_m"], 8, 96.0)
    best = result["splits"][0]
    assert fits
    assert (best["tp"], best["pp"], best["problems"]) == (8, 1, [])
    assert result["row_bytes"] == {"bf16": 1152, "fp8_ds_mla": 656}
    assert best["stages"][0]["token_bytes"] == {"bf16": 78 * 1284, "fp8_ds_mla": 78 * 788}
    weights = best["stages"][0]["packed_bytes"] + best["stages"][0]["dequantized_bytes"]
    # Whole on every rank: latents, indexer and norms; so more than an eighth of the file.
    assert 53 * GIB < weights < 54 * GIB
    room = int(96 * 0.92 * GIB) - weights - best["stages"][0]["workspace_bytes"]
    for kind, row in best["stages"][0]["token_bytes"].items():
        assert best["cache"][kind]["tokens"] == room // (64 * row) * 64
    assert 280_000 < best["cache"]["bf16"]["tokens"] < 340_000
    assert 460_000 < best["cache"]["fp8_ds_mla"]["tokens"] < 550_000


def test_glm5_q8_0_does_not_fit_and_says_what_is_missing(layouts):
    text, fits = plan_text(layouts["glm-5-q8_0"], 8, 96.0)
    assert not fits
    result, _ = plan_json(layouts["glm-5-q8_0"], 8, 96.0, tp=8, pp=1)
    stage = result["splits"][0]["stages"][0]
    needed = stage["packed_bytes"] + stage["dequantized_bytes"] + stage["workspace_bytes"]
    needed += 2048 * 78 * 1284
    assert result["missing_gib"] == pytest.approx((needed - 0.92 * 96 * GIB) / GIB, abs=1e-3)
    assert "GiB are missing on each GPU" in " ".join(text.split())
    assert plan_json(layouts["glm-5-q8_0"], 8, 141.0)[1]


def test_glm52_stages_begin_at_full_layers(layouts):
    result, fits = plan_json(layouts["glm-5.2-ud-iq2_xxs"], 8, 96.0, pp=4)
    assert fits
    split = result["splits"][0]
    starts = [stage["layers"][0] for stage in split["stages"]]
    assert all(start < 3 or start % 4 == 2 for start in starts)
    assert split["environment"]["VLLM_PP_LAYER_PARTITION"].count(",") == 3
    assert split["stages"][0]["token_bytes"]["bf16"] % 4 == 0


def test_types_without_a_kernel_are_noted(layouts):
    """The ik_llama.cpp fork's types: whatever the memory, vLLM cannot run them."""
    path = layouts["glm-5.2-iq2_kt-sokann"]
    text, fits = plan_text(path, 8, 96.0, width=1000)
    assert not fits
    assert "fits: " not in text
    assert "vllm serve" not in text
    second = text.splitlines()[1]
    assert second.startswith("vLLM cannot run this file: no kernel takes unknown(133) (")
    assert "no kernel takes unknown(153) (225 tensors" in second
    result, fits = plan_json(path, 8, 96.0)
    assert (fits, result["fits"]) == (False, False)
    assert len(result["reasons"]) == 2
    assert not any(split["fits"] for split in result["splits"])
    answer = CliRunner().invoke(app, ["plan", str(path), "--gpus", "8", "--gpu-memory", "96"])
    assert answer.exit_code == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_by_address_from_the_header_alone(sample_share, ranges):
    """A server that knows ranges and one that does not; the answer is the local file's."""
    local, fits = plan_json(sample_share, 1, 8.0)
    with serving(sample_share.parent, ranges=ranges) as server:
        url = f"{server.url}/{sample_share.name}"
        assert plan_json(url, 1, 8.0) == (local | {"file": url}, fits)
        answer = CliRunner().invoke(app, ["plan", url, "--gpus", "1", "--gpu-memory", "8"])
        assert answer.exit_code == 0
        assert "fits: tp 1" in answer.output

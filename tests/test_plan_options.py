"""Layer 1: what a plan tells the user to type, and what it says that this version cannot do."""

import math
import shlex
from dataclasses import replace

import pytest
from gguf import GGMLQuantizationType

from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.memory import GIB, workspace
from glm5lab.gguf.parallel import Card, evaluate
from glm5lab.gguf.placement import placements
from glm5lab.gguf.plan import make_plan
from glm5lab.gguf.reader import open_gguf
from glm5lab.views.names import map_json
from glm5lab.views.plan import plan_json, plan_text


@pytest.fixture(scope="module")
def full(sample_f32):
    return open_gguf(sample_f32)


@pytest.fixture(scope="module")
def shared(sample_share):
    return open_gguf(sample_share)


def test_llama_cpps_types_without_a_kernel_are_counted_dequantized_and_noted(full):
    """A type that gguf-py knows and vllm-gguf-plugin does not."""
    name = "blk.1.ffn_up_exps.weight"
    shape = full.tensors[name].shape
    kind = GGMLQuantizationType.TQ1_0
    tensor = replace(full.tensors[name], type="TQ1_0", type_id=int(kind), nbytes=54 * 12 * 256)
    model = replace(full, tensors=full.tensors | {name: tensor})
    plan = make_plan(model, 1, 8.0)
    assert plan.fits
    assert placements(model, plan.config)[name].loaded == 2 * math.prod(shape)
    result, _ = plan_json(model, 1, 8.0)
    note = f"no kernel takes TQ1_0: 1 tensor, such as {name}, dequantized while loading"
    assert any(text.startswith(note) for text in result["notes"])
    assert not any("no kernel" in text for text in plan_json(full, 1, 8.0)[0]["notes"])


def test_the_options_mean_to_vllm_what_was_planned(full):
    """Parsed by vLLM's own parser; its default utilization is the plan's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for kv_dtype, theirs in (("auto", "bfloat16"), ("fp8_ds_mla", "fp8_ds_mla")):
        for utilization in (None, 0.925):
            plan = make_plan(full, 2, 8.0, kv_dtype=kv_dtype, utilization=utilization)
            options = plan.best.options(plan.card)
            parsed = parser.parse_args(options)
            assert parsed.kv_cache_dtype == theirs
            assert parsed.gpu_memory_utilization == plan.card.utilization
            assert parsed.tensor_parallel_size == plan.best.tp
            assert parsed.max_model_len == plan.best.caches[0].context
            assert ("--gpu-memory-utilization" in options) == (utilization is not None)
            text, _ = plan_text(full, 2, 8.0, kv_dtype=kv_dtype, utilization=utilization, width=200)
            assert shlex.join(options) in text


def test_context_ranks_only_where_they_are_asked_for(full):
    config = {**hf_config(full), "dtype": "bfloat16"}
    # No room for the cache, which context ranks would divide.
    gib = evaluate(full, config, Card(64.0, 1.0), ("bf16",), 4, 1, 1, 4096).used / GIB
    assert {split.dcp for split in make_plan(full, 4, gib, utilization=1.0).splits} == {1}
    assert {split.dcp for split in make_plan(full, 4, gib, dcp=2, tp=4).splits} == {2}


def test_what_has_not_been_run_is_noted(full):
    for dcp in (1, 2):
        result, _ = plan_json(full, 2, 8.0, tp=2, dcp=dcp)
        text, _ = plan_text(full, 2, 8.0, width=1000, tp=2, dcp=dcp)
        assert all(f"note: {note}" in text for note in result["notes"])
        notes = "\n".join(result["notes"])
        assert ("dcp needs an attention backend" in notes) == (dcp > 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dcp": 3}, "no: all 3 splits are impossible, whatever the memory: tp 4, dcp 3: tp 4"),
        ({"tp": 3, "pp": 1}, "no: the split is impossible, whatever the memory: tp 3: 4 attention"),
    ],
)
def test_an_impossible_split_is_not_a_lack_of_memory(full, options, says):
    text, fits = plan_text(full, 4, 8.0, width=1000, **options)
    assert not fits
    assert text.splitlines()[1].startswith(says)
    assert not any(word in text for word in ("missing", "fits", "tokens,", "does not fit"))
    short, _ = plan_text(full, 4, 0.5, width=1000, **options)
    assert "GiB are missing on each GPU" in short.splitlines()[1]


def test_a_token_s_bytes_can_be_recomputed(shared):
    """From the text alone: room and bytes a token of each stage, divided by dcp."""
    text, _ = plan_text(shared, 8, 8.0, width=1000, tp=4, pp=2, dcp=2)
    table = {line[:27].strip(): line[27:].split("  ") for line in text.splitlines() if "  " in line}
    assert [cell.strip() for cell in table["layers"] if cell] == ["0-2", "3-4"]
    assert [cell.strip() for cell in table["of these with an indexer"] if cell] == ["2", "1"]
    sizes = [int(c.replace(",", "")) for c in table["bytes a token, bf16"] if c]
    assert sizes == [3 * 1152 + 2 * 132, 2 * 1152 + 132]
    assert "not divided by tp, divided by dcp 2: " in text
    cache = make_plan(shared, 8, 8.0, tp=4, pp=2, dcp=2).best.caches[0]
    assert f"{cache.tokens:,} tokens on the fullest stage" in text
    room = [float(cell.removesuffix(" GiB")) for cell in table["left for the cache"] if cell]
    most = min(gib * GIB / size for gib, size in zip(room, sizes, strict=True)) * 2
    assert cache.tokens == pytest.approx(most, rel=0.02)


def test_every_stage_is_shown_or_counted(tmp_path):
    path = write_layout(read_layouts()["glm-5-q4_k_m"], tmp_path)
    text, _ = plan_text(path, 26, 96.0, tp=1, pp=26)
    assert "stage 15" in text
    assert "and 10 more stages, see --json" in text


@pytest.mark.parametrize("role", ["attn_norm.weight", "ffn_up_exps.weight"])
def test_what_map_refuses_is_a_reason(role, full):
    """A tensor that is missing, and one under another name."""
    name = f"blk.1.{role}"
    without = {n: t for n, t in full.tensors.items() if n != name}
    renamed = without | {f"{name}x": replace(full.tensors[name], name=f"{name}x")}
    for tensors in (without, renamed):
        model = replace(full, tensors=tensors)
        result, fits = plan_json(model, 1, 8.0)
        problems = map_json(model, gpu=True)[0]["problems"]
        assert problems
        assert set(problems) <= set(result["reasons"])
        assert not fits
        assert not result["fits"]
        text, _ = plan_text(model, 1, 8.0, width=1000)
        assert text.splitlines()[1].startswith("vLLM cannot run this file: ")
        assert f"{name}: missing" in text
        assert "vllm serve" not in text


@pytest.mark.parametrize(("gib", "memory"), [(24, 24), (96, 96), (180, 180)])
def test_batches_are_vllms_defaults_for_the_card(full, gib, memory, monkeypatch):
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    class Platform:
        get_device_total_memory = staticmethod(lambda: memory * GIB)
        get_device_name = staticmethod(lambda: "a card")
        is_device_capability = is_tpu = is_cpu = staticmethod(lambda *_: False)

    monkeypatch.setattr(arg_utils, "current_platform", Platform)
    tokens, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
    server = UsageContext.OPENAI_API_SERVER
    config = hf_config(full)
    space = workspace(config, 1, 4096, float(gib), True)
    token_bytes = space.activations / workspace(config, 1, 4096, 1.0, True).activations * 2048
    assert token_bytes == tokens[server]
    assert space.logits == sequences[server] * config["vocab_size"] * 6

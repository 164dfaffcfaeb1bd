"""Layer 4: what vLLM's own CUDA model would load, though no GPU is here.

Children build vllm/models/deepseek_v32/nvidia on a platform that pretends to be SM90, without
memory; the loader plans every copy and the audit marks it. Only the copies and the kernels are
missing from a real load.
"""

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from children import printed
from test_loader_ranks import KINDS, wide_sample
from test_placement import by_layer, loaded_by_parameter

from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.placement import placements
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.loading.audit import not_taken
from glm5lab.loading.prepare import prepare

CHILD = Path(__file__).parent / "vllm_cuda_plan.py"
SERVE = Path(__file__).parent / "vllm_serve_config.py"


def planned(file: Path, tp: int = 1, rank: int = 0, ep: int = 0, **options: Any) -> dict[str, Any]:
    """What `vllm_cuda_plan.py` prints."""
    arguments = [CHILD, file, tp, rank, ep, json.dumps(options)]
    found, _ = printed("PLAN", arguments, {"OMP_NUM_THREADS": "1"})
    found["boxes"] = {name: list(map(tuple, b)) for name, b in found["boxes"].items()}
    return found


def assert_as_planned(file: Path, found: dict[str, Any], tp: int = 1, ep: int = 0) -> None:
    """The bytes of every layer are the plan's."""
    model = open_gguf(file)
    config = {**hf_config(model), "dtype": "bfloat16"}
    table = placements(model, config, tp, expert_parallel=bool(ep))
    assert by_layer(loaded_by_parameter(config, table)) == by_layer(found["sizes"])


def test_a_gpu_takes_blocks_without_being_asked(sample_mix):
    found = planned(sample_mix)
    assert found["quantization"] == "glm5lab"
    assert found["class"] == "vllm.models.deepseek_v32.nvidia.model.DeepseekV32ForCausalLM"
    assert found["problems"] == []
    methods = Counter(found["methods"])
    assert methods["RoutedExperts: PackedExpertsMethod"] == 4
    assert methods["VocabParallelEmbedding: PackedEmbeddingMethod"] == 1
    assert methods["ParallelLMHead: PackedEmbeddingMethod"] == 1
    # kv_b, wk with weights_proj, and the router stay plain numbers.
    plain = {name: count for name, count in methods.items() if "Unquantized" in name}
    assert plain == {
        "ColumnParallelLinear: UnquantizedLinearMethod": 5,
        "MergedColumnParallelLinear: UnquantizedLinearMethod": 5,
        "GateLinear: UnquantizedLinearMethod": 4,
    }
    assert_as_planned(sample_mix, found)


@pytest.mark.parametrize(
    "how", ["vllm serve", "glm5lab serve", pytest.param("folder", marks=pytest.mark.slow)]
)
def test_serving_on_gpus_takes_blocks_without_flags(how, sample_mix, tmp_path):
    """What vLLM makes of the words that a user types, and of those that glm5lab makes of them."""
    words = [str(prepare(sample_mix, tmp_path / "folder") if how == "folder" else sample_mix)]
    if how == "glm5lab serve":
        gpus = ("--gpus", "2", "--gpu-memory", "8", "--tp", "2")
        line = run(["-m", "glm5lab", "serve", *words, *gpus, "--dry-run"]).splitlines()[-1]
        words = shlex.split(line)
        words = words[words.index("serve") + 1 :]
    (line,) = [s for s in run([SERVE, *words]).splitlines() if s.startswith("CONFIG ")]
    found = json.loads(line.removeprefix("CONFIG "))
    assert found["quantization"] == found["load_format"] == "glm5lab"
    assert found["dtype"] == "torch.bfloat16"
    two = how == "glm5lab serve"
    assert (found["ranks"], found["expert_parallel"]) == ((2, True) if two else (1, False))


def run(arguments: list[Any]) -> str:
    """What a Python child prints."""
    child = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, (child.stdout + child.stderr)[-4000:]
    return child.stdout


def test_a_file_of_plain_numbers_is_left_to_vllms_own_layers(sample_share):
    found = planned(sample_share)
    assert found["problems"] == []
    assert not any("Packed" in name for name in found["methods"])
    assert not any("layers.2.self_attn.indexer" in name for name in found["sizes"])


def test_the_prediction_block_takes_blocks_too(tmp_path):
    found = planned(write_sample(tmp_path, kind="mtp", types="mix"), draft=True)
    assert "nvidia.mtp" in found["class"]
    assert found["problems"] == []
    assert Counter(found["methods"])["RoutedExperts: PackedExpertsMethod"] == 1
    assert {name.split(".")[1] for name in found["tensors"]} == {"4"}


@pytest.mark.slow
@pytest.mark.parametrize("ep", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_take_everything_between_them(kind, ep, tmp_path):
    file = wide_sample(tmp_path, kind, width=256)  # slices of experts cut blocks
    ranks = [planned(file, 2, rank, ep) for rank in range(2)]
    for found in ranks:
        assert found["problems"] == []
        assert_as_planned(file, found, 2, ep)
    tensors = open_gguf(file).tensors
    boxes = [found["boxes"] for found in ranks]
    assert not_taken(boxes, [tensors[name] for name in ranks[0]["tensors"]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["glm-5-q4_k_m", "glm-5.2-ud-iq2_xxs"])
def test_a_rank_of_the_real_model(layout, tmp_path):
    file = write_layout(read_layouts()[layout], tmp_path)
    found = planned(file, 8, 5)
    assert found["problems"] == []
    assert_as_planned(file, found, 8)

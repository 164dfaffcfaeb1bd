"""Layer 2: what single ranks load, against vLLM's own weight loaders; what they took together."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from children import printed
from rewrite import Tensors, rewrite

from glm5lab.architecture import Glm5Architecture
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.placement import placements
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.loading.audit import not_taken

KINDS = ("q8_0", "q4_k_m", "q2_k", "iq4_xs", "mix")
CHILD = Path(__file__).parent / "vllm_load.py"


def loaded(
    file: Path, tp: int = 1, pp: int = 1, rank: int = 0, ep: int = 0, **options: Any
) -> dict[str, Any]:
    """What `vllm_load.py` prints for one rank."""
    arguments = [CHILD, file, tp, pp, rank, ep, json.dumps(options)]
    found, log = printed("TAKEN", arguments, {"OMP_NUM_THREADS": "1"})
    found["boxes"] = {name: list(map(tuple, b)) for name, b in found["boxes"].items()}
    return found | {"log": log}


def problems(file: Path, *ranks: dict[str, Any]) -> list[str]:
    """What the audit says about ranks that loaded together."""
    tensors = open_gguf(file).tensors
    return not_taken([r["boxes"] for r in ranks], [tensors[n] for n in ranks[0]["tensors"]])


def test_two_ranks_load_what_vllms_own_code_gives_them(sample_mix):
    """Blocks of Q4_K and Q6_K cover whole rows here: half a row is cut out of whole blocks."""
    ranks = [loaded(sample_mix, tp=2, rank=rank) for rank in range(2)]
    for rank in ranks:
        assert rank["different"] == []
        assert rank["parameters"] == 89
    assert problems(sample_mix, *ranks) == []
    half = problems(sample_mix, ranks[0])
    assert "token_embd.weight: the ranks together took 65,536 of its 131,072 numbers" in half


@pytest.mark.slow
def test_a_rank_that_takes_rank_0s_share_is_caught(sample_mix):
    """Values and audit both say so: vllm-gguf-plugin's mistake, its issue 103."""
    ranks = [loaded(sample_mix, tp=2, rank=rank, rank0=True) for rank in range(2)]
    assert ranks[0]["different"] == []
    assert "model.layers.1.self_attn.q_b_proj.weight" in ranks[1]["different"]
    found = problems(sample_mix, *ranks)
    cut = [t for t in ranks[0]["tensors"] if ranks[0]["boxes"][t] == ranks[1]["boxes"][t]]
    names = {problem.split(":")[0] for problem in found}
    assert names < set(cut)
    for role in ("attn_q_b", "attn_k_b", "attn_output", "ffn_up_exps", "ffn_down_shexp"):
        assert f"blk.1.{role}.weight" in names
    assert all("and several the same" in problem for problem in found)


@pytest.mark.slow
def test_multi_token_prediction_is_loaded_when_asked_for(tmp_path):
    file = write_sample(tmp_path, kind="mtp", types="mix")
    draft = loaded(file, draft=True)
    assert draft["different"] == []
    assert problems(file, draft) == []
    taken = {name.split(".")[1] for name in draft["tensors"]}
    assert taken == {"4"}
    model = loaded(file)
    assert not any(name.startswith("blk.4.") for name in model["tensors"])


def wide_sample(
    folder: Path, types: str, width: int = 512, experts: int = 12, **sizes: Any
) -> Path:
    """A sample whose experts' rows hold several blocks of 256, two of them for two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        tiny = Glm5Architecture.tiny
        sizes |= {"moe_intermediate_size": width, "n_routed_experts": experts}
        patch.setattr(Glm5Architecture, "tiny", lambda kind: replace(tiny(kind), **sizes))
        return write_sample(folder, types=types)


@pytest.mark.slow
def test_whole_experts_a_rank(tmp_path):
    # Expert parallel takes blocks on a CPU too: vLLM's own experts there know nothing of it.
    file = wide_sample(tmp_path, "mix")
    ranks = [
        loaded(file, tp=2, rank=rank, ep=1, quantization="glm5lab", dtype="float32")
        for rank in range(2)
    ]
    for number, rank in enumerate(ranks):
        assert rank["different"] == []
        assert rank["boxes"]["blk.1.ffn_down_exps.weight"] == [
            (6 * number, 6 * number + 6, 0, 256, 0, 512)
        ]
    assert problems(file, *ranks) == []


@pytest.mark.parametrize(
    ("kind", "tp", "rank", "ep"),
    [
        pytest.param("mix", 1, 0, 0, marks=pytest.mark.slow),
        ("mix", 2, 1, 0),
        pytest.param("mix", 2, 1, 1, marks=pytest.mark.slow),
        pytest.param("q8_0", 4, 3, 0, marks=pytest.mark.slow),
    ],
)
def test_blocks_are_those_of_the_numbers_that_vllms_own_code_gives(tmp_path, kind, tp, rank, ep):
    """Packed parameters, dequantized where they lie, against a plain model filled by vLLM."""
    file = wide_sample(tmp_path, kind)
    found = loaded(file, tp=tp, rank=rank, ep=ep, quantization="glm5lab", dtype="float32")
    assert found["different"] == []
    assert found["packed"] > 30
    assert found["opened"] == 1  # for building the layers and for filling them


@pytest.mark.parametrize(
    "kind", ["mix", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "mix")]
)
def test_borders_inside_blocks(kind, tmp_path, monkeypatch):
    """Experts' rows of one block of 256, of which each of two ranks owns a half.

    Both keep it whole, take only their columns of it in the audit's eyes, and say what it costs.
    """
    file = write_sample(tmp_path, types=kind)
    monkeypatch.setenv("GLM5LAB_LOAD_REPORT", str(tmp_path / "load.json"))
    model = open_gguf(file)
    planned = placements(model, {**hf_config(model), "dtype": "float32"}, 2)
    ranks = []
    for number in range(2):
        rank = loaded(file, tp=2, rank=number, quantization="glm5lab", dtype="float32")
        assert rank["different"] == []
        assert rank["packed"] > 30
        ranks.append(rank)
        report = json.loads((tmp_path / "load.json").read_text())
        sources = [s for p in report["parameters"] for s in p["sources"]]
        taken = {s["tensor"]: (s["bytes"], s["border_bytes"]) for s in sources}
        assert taken == {n: (p.packed, p.border) for n, p in planned.items() if n in taken}
        border = sum(p.border for p in planned.values())
        assert (border > 0) == (kind != "q8_0")  # blocks of 32
        assert (f"{border:,} bytes beside its share" in rank["log"]) == bool(border)
    assert problems(file, *ranks) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_shares_in_one_block_and_in_two(tmp_path, rank):
    """Rows of three blocks over four ranks: 192 columns each, the second rank's in two blocks."""
    file = wide_sample(tmp_path, "q4_k_m", width=768)
    found = loaded(file, tp=4, rank=rank, quantization="glm5lab", dtype="float32")
    assert found["different"] == []
    tensor = open_gguf(file).tensors["blk.1.ffn_down_exps.weight"]
    size = found["sizes"]["model.layers.1.mlp.experts.routed_experts.w2_weight"]
    assert size * 3 == tensor.nbytes * (rank + 1)


@pytest.mark.slow
def test_a_plain_part_beside_blocks(tmp_path):
    """q_a in F16 beside kv_a in Q6_K, gate in F16 beside up: no part changes for the other."""

    def to_f16(tensors: Tensors) -> Tensors:
        plain = {}
        for name in ("attn_q_a", "ffn_gate"):
            data, kind = tensors[f"blk.0.{name}.weight"]
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
            plain[f"blk.0.{name}.weight"] = (values.astype(np.float16), 1)
        return tensors | plain

    one_file = write_sample(tmp_path, types="mix")
    file = rewrite(one_file, tmp_path / "part.gguf", to_f16)
    found = loaded(file, quantization="glm5lab", dtype="float32")
    assert found["different"] == []
    whole = loaded(one_file, quantization="glm5lab", dtype="float32")
    assert found["packed"] == whole["packed"] - 2


@pytest.mark.slow
def test_a_type_without_a_kernel_is_dequantized_alone(tmp_path):
    """MXFP4 in a linear layer and in a stack of experts; all else stays, the log has the cost."""
    changed = ("blk.0.attn_output.weight", "blk.1.ffn_up_exps.weight")

    def to_mxfp4(tensors: Tensors) -> Tensors:
        kind = gguf.GGMLQuantizationType.MXFP4
        values = {
            name: gguf.quants.dequantize(data, gguf.GGMLQuantizationType(number))
            for name, (data, number) in tensors.items()
            if name in changed
        }
        return tensors | {n: (gguf.quants.quantize(v, kind), kind) for n, v in values.items()}

    one_file = write_sample(tmp_path, types="mix")
    file = rewrite(one_file, tmp_path / "mxfp4.gguf", to_mxfp4)
    found = loaded(file, quantization="glm5lab", dtype="float32")
    assert found["different"] == []
    whole = loaded(one_file, quantization="glm5lab", dtype="float32")
    # The stack's partner had a type of its own before and keeps its parameter.
    assert found["packed"] == whole["packed"] - 2
    tensors = [open_gguf(file).tensors[name] for name in changed]
    plain = sum(2 * np.prod(tensor.shape) for tensor in tensors) / 2**20
    packed = sum(tensor.nbytes for tensor in tensors) / 2**20
    assert (
        f"No kernel multiplies MXFP4: 2 tensors such as {changed[0]} are dequantized while loading "
        f"and take {plain:,.0f} MiB instead of {packed:,.0f} MiB" in found["log"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "tp", "pp", "ep"),
    [
        ("sample_share", 4, 1, 0),
        ("sample_f32", 1, 2, 0),
        ("sample_mix", 2, 2, 1),
        ("sample_mtp", 4, 1, 1),
    ],
)
def test_more_ways_to_divide(sample, tp, pp, ep, request):
    file = request.getfixturevalue(sample)
    ranks = [loaded(file, tp, pp, rank, ep) for rank in range(tp * pp)]
    assert [rank["different"] for rank in ranks] == [[]] * len(ranks)
    names = {name for rank in ranks for name in rank["tensors"]}
    assert problems(file, *ranks) == []
    assert names == set(ranks[0]["tensors"])


def test_memory_stays_small_while_large_tensors_load(tmp_path):
    """A stack of 800 MB in float32 grows the process by little more than its parameter."""
    code = """
import resource, sys
from pathlib import Path
import torch
from glm5lab.gguf.part_reader import PartReader
from glm5lab.gguf.parts import whole
from glm5lab.gguf.tensors import Tensor
from glm5lab.loading.destinations import Copy
from glm5lab.loading.streaming import Streamer

path = Path(sys.argv[1])
shape, nbytes = (64, 512, 6144), 64 * 512 * 24 * 144
with path.open("wb") as file:
    file.truncate(nbytes)
tensor = Tensor("blk.3.ffn_up_exps.weight", shape, 12, "Q4_K", nbytes, 0, path, 0)
parameter = torch.full(shape, 1.0, dtype=torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with PartReader() as reader:
    pieces = list(Streamer(reader, {"w": parameter}, 2).run([Copy("w", whole(tensor))]))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
assert not parameter.any() and len(pieces) > 20
assert reader.nbytes == nbytes
print(grown >> 20)
"""
    child = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "weights"], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout) < 400

"""Layer 2, what `glm5lab map` shows: folded text, JSON, exit codes, published layouts."""

import json
import os
import shutil

import numpy as np
import pytest

from glm5lab.__main__ import main
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.loading import names
from glm5lab.loading.table import COLUMNS, name_table
from glm5lab.views.inspection import inspect_json
from glm5lab.views.names import (
    fold_sentences,
    map_json,
    map_text,
    name_map,
    names_text,
)
from glm5lab.views.plan import plan_json


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, *range(6, 75, 4)], "0-2,6-74/4"),
        ([0, 2, 4], "0,2,4"),
        ([0, 2, 4, 6], "0-6/2"),
        ([1, 2, 3, 5, 7, 9, 11, 20], "1-3,5-11/2,20"),
        ([5, 3, 4], "3-5"),
        ([3, 4, 5, 7, 8, 9, 11, 12, 13], "3-5,7-9,11-13"),
        ([n for n in range(3, 78) if n % 4 != 2], "3-77 but 6-74/4"),
    ],
)
def test_layers_are_folded(layers, text):
    assert layer_ranges(layers) == text


def read_back(text):
    read: set[int] = set()
    for part in filter(None, text.split(",")):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        read |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return read


def test_every_set_of_layers_can_be_read_back():
    rng = np.random.default_rng(0)
    for _ in range(500):
        layers = set(np.flatnonzero(rng.random(30) < rng.random()).tolist())
        whole, _, but = layer_ranges(layers).partition(" but ")
        assert read_back(whole) - read_back(but) == layers


def test_problems_are_folded():
    problems = [f"blk.{n}.x.weight: missing" for n in (0, 1, 2)] + ["output.weight: missing"]
    assert fold_sentences([*problems, "blk.7.x.weight: other", "blk.3: gone", "blk.4: gone"]) == [
        *("x.weight (blocks 0-2): missing", "output.weight: missing"),
        *("blk.7.x.weight: other", "blk.3: gone", "blk.4: gone"),
    ]


def test_json_says_what_the_table_says(sample_mtp):
    content, fits = map_json(sample_mtp, tp=2, pp=2, gpu=True)
    assert fits
    content = json.loads(json.dumps(content, allow_nan=False))
    model = open_gguf(sample_mtp)
    table = name_table(model, hf_config(model), tp=2, pp=2, gpu=True)
    assert [row["name"] for row in content["tensors"]] == list(table["name"])
    assert set(content["tensors"][0]) == set(COLUMNS)
    assert content["tensors"][0]["layer"] is None
    assert all((row["stage"] is None) == bool(row["dropped"]) for row in content["tensors"])
    assert sum(content["stage_bytes"]) == table["rank_bytes"].sum()
    assert content["problems"] == content["missing"] == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 0),
        (["--json"], 0),
        (["--tensors", "--device", "gpu"], 0),
        (["--tp", "3"], 1),  # four heads
        (["--tp", "3", "--json"], 1),
        (["--tp", "0"], 2),
        (["--pp", "9"], 2),  # five layers
    ],
)
def test_the_command_s_exit_codes(options, code, sample_f32, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["map", str(sample_f32), *options])
    assert (ended.value.code or 0) == code
    out = capsys.readouterr().out
    if "--json" in options:
        assert bool(json.loads(out)["problems"]) == bool(code)
    elif "--tensors" in options:
        assert out.count("blk.3.") > 20
    elif code < 2:
        assert len(out.splitlines()) < 75


def test_a_needed_division_into_stages_is_said_and_counted(sample_share):
    """vLLM's own 2 + 2 + 1 begins stages at layers 2 and 4, which share; as plan has it."""
    content, fits = map_json(sample_share, 2, 3, gpu=True)
    split = plan_json(sample_share, 6, 64.0, tp=2, pp=3)[0]["splits"][0]
    assert fits
    assert content["environment"] == split["environment"] == {"VLLM_PP_LAYER_PARTITION": "1,2,2"}
    weights = [stage["packed_bytes"] + stage["dequantized_bytes"] for stage in split["stages"]]
    assert content["stage_bytes"] == weights
    assert {row["stage"] for row in content["tensors"] if row["layer"] == 2} == {1}
    text, _ = map_text(sample_share, 2, 3, gpu=True, width=1000)
    assert "note: set VLLM_PP_LAYER_PARTITION=1,2,2, which is counted here: " in text
    assert map_json(sample_share, 1, 2)[0]["environment"] == {}
    # Four stages need four layers that choose for themselves; there are three.
    content, fits = map_json(sample_share, 1, 4)
    assert not fits
    assert content["problems"][0].startswith("stage 2 begins at layer 2, which shares the top-k")


@pytest.mark.parametrize("sample", ["sample_f32", "sample_mtp", "sample_mix"])
def test_map_and_plan_count_the_same_bytes(sample, request):
    path = request.getfixturevalue(sample)
    stages = plan_json(path, 2, 8.0, tp=1, pp=2)[0]["splits"][0]["stages"]
    weights = [stage["packed_bytes"] + stage["dequantized_bytes"] for stage in stages]
    assert map_json(path, 1, 2, gpu=True)[0]["stage_bytes"] == weights


@pytest.mark.parametrize("options", [[], ["--expert-parallel"], ["--no-expert-parallel"]])
def test_map_gives_whole_experts_where_plan_does(options, sample_mix, capsys):
    """Half an expert's row of 256 is no block; slices are mapped where they are asked for."""
    whole = options != ["--no-expert-parallel"]
    with pytest.raises(SystemExit) as ended:
        main(["map", str(sample_mix), "--tp", "2", "--device", "gpu", "--json", *options])
    assert not ended.value.code
    content = json.loads(capsys.readouterr().out)
    split = plan_json(sample_mix, 2, 8.0, tp=2)[0]["splits"][0]
    assert split["expert_parallel"]
    assert content["expert_parallel"] == whole
    assert content["problems"] == split["problems"] == []
    weights = [stage["packed_bytes"] + stage["dequantized_bytes"] for stage in split["stages"]]
    assert (content["stage_bytes"] == weights) == whole
    stacks = [row for row in content["tensors"] if row["name"].endswith("ffn_down_exps.weight")]
    assert all((row["border_bytes"] == 0) == whole for row in stacks)
    counted = "whole experts a rank (--enable-expert-parallel) are counted here"
    assert (counted in content["warnings"]) == whole
    # What is not an expert's has borders inside blocks either way.
    border = [note for note in content["warnings"] if "borders between ranks lie inside" in note]
    assert len(border) == 1
    assert ("need less" in border[0]) != whole
    assert not map_json(sample_mix, 2, gpu=False)[0]["expert_parallel"]


def test_json_names_files_and_shards_as_inspect_does(sample_mix, tmp_path):
    ours, theirs = map_json(sample_mix)[0], inspect_json(sample_mix)
    for field in ("file", "shards"):
        assert ours[field] == theirs[field]
    assert plan_json(sample_mix, 1, 8.0)[0]["file"] == ours["file"]
    for field in ("name", "shard", "nbytes", "type", "shape", "layer"):
        assert [t[field] for t in ours["tensors"]] == [t[field] for t in theirs["tensors"]]
    assert {t["shard"] for t in ours["tensors"]} == {2, 3}
    assert set(open_gguf(sample_mix).table()["shard"]) == {2, 3}
    first = "113 tensors: 113 fill 89 parameters, 0 dropped for a named reason, 0 problems"
    assert first in map_text(sample_mix, gpu=False, width=200)[0]
    assert map_json(sample_mix, gpu=False)[0]["counts"] == {
        **{"tensors": 113, "loaded": 113, "parameters": 89},
        **{"dropped": 0, "problems": 0},
    }


@pytest.mark.parametrize("command", [["inspect"], ["map"], ["plan"]], ids=" ".join)
def test_json_of_a_path_that_is_no_text(command, sample_f32, tmp_path, capsys):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf")
    shutil.copy(sample_f32, path)
    options = ["--gpus", "1", "--gpu-memory", "8"] if command == ["plan"] else []
    with pytest.raises(SystemExit) as ended:
        main([*command, path, "--json", *options])
    assert not ended.value.code
    content = json.loads(capsys.readouterr().out)
    assert content["file"].endswith(r"\udcff.gguf")
    json.dumps(content, ensure_ascii=False).encode()


def test_the_text_folds_many_layers(tmp_path):
    """A GLM-5's 78 layers print in as many lines as five do."""
    path = write_sample(tmp_path, kind="full")
    few, _ = map_text(path)
    model = open_gguf(path)
    many = dict(model.tensors)
    for name, tensor in model.tensors.items():
        if name.startswith("blk.4."):
            many |= {name.replace("blk.4.", f"blk.{n}."): tensor for n in range(5, 78)}
    model.tensors = many
    config = hf_config(model) | {"num_hidden_layers": 78, "indexer_types": ["full"] * 78}
    text = names_text(name_map(model, config, gpu=False))
    assert "0 problems" in text
    assert len(text.splitlines()) == len(few.splitlines())
    assert max(map(len, text.splitlines())) < 140


def test_published_layouts(tmp_path):
    """The type layouts of public files: what fits, what is dropped, what has no kernel."""
    seen = {}
    for name, layout in read_layouts().items():
        model = open_gguf(write_layout(layout, tmp_path / name))
        table = name_table(model, hf_config(model), tp=8, gpu=True)
        seen[name] = set(table["problem"].str.partition("(")[0]) - {""}
        shared = table[table["dropped"] == names.SHARED_INDEXER]
        assert len(shared) == (285 if name == "glm-5.2-ud-iq2_xxs" else 0)  # 57 layers
        assert (table["dropped"] == names.MTP).sum() == 27
        assert map_text(model, tp=8, gpu=True)[1] == (not seen[name])
    assert seen.pop("glm-5.2-iq2_kt-sokann") == {"type unknown"}
    assert set().union(*seen.values()) == set()

"""What `glm5lab backends` compares and when it fails; the engines themselves need a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from glm5lab.errors import CheckError, InputError
from glm5lab.gpu_check import answers, cases, model
from glm5lab.gpu_check.child import prompt
from glm5lab.gpu_check.compare import difference, differences, line, pooled_mean
from glm5lab.gpu_check.model import architecture, config_of, shapes_of, write_model
from glm5lab.gpu_check.run import dealt


def answer(prompt_values, tokens, logprobs):
    return {"prompt": prompt_values, "tokens": tokens, "logprobs": logprobs}


def test_a_difference_ends_where_tokens_part():
    a = answer([-1.0, -2.0], [5, 6, 7], [{"5": -0.1}, {"6": -0.5, "8": -0.75}, {"7": -0.1}])
    b = answer([-1.0, -2.5], [5, 8, 9], [{"5": -0.3}, {"8": -0.6, "6": -0.7}, {"9": -0.1}])
    found = difference(3, a, b)
    assert (found.same, found.generated) == (1, 3)
    assert found.mean == pytest.approx(0.25)
    assert found.largest == 0.5
    assert found.beyond == 0.5
    assert found.step == pytest.approx(0.2)
    assert found.margin == pytest.approx(0.25)


def test_equal_answers_differ_in_nothing():
    same = answer([-1.0], [5], [{"5": -0.1}])
    (row,) = differences([2], [same], [same])
    assert (row.same, row.mean, row.step, row.margin) == (1, 0, 0, 0)
    assert pooled_mean([row]) == 0


def table(mean):
    """One prompt whose log-probabilities are `mean` apart."""
    a = answer([-1.0], [5], [{"5": -0.1}])
    b = answer([-1.0 - mean], [5], [{"5": -0.1}])
    return differences([1000], [a], [b])


def test_ours_may_be_as_far_from_a_native_backend_as_two_are_apart():
    native = table(0.070)
    assert not answers.wrong({"natives": native, "ours and flash_attn": table(0.075)}, {})
    (said,) = answers.wrong({"natives": native, "ours and flash_attn": table(0.080)}, {})
    assert said == "ours and flash_attn: mean 0.0800, where 'natives' has 0.0700"


def test_several_native_comparisons_bound_by_the_greatest_of_each_prompt():
    first, second = cases.FLASH_SPREAD
    mine = "ours and flash_attn, GLM-5.3-Flash"
    tables = {first: table(0.01), mine: table(0.066)}
    assert not answers.wrong(tables, {})  # one of its bounds did not run
    assert answers.absent(answers.bounds_of(mine), tables) == [second]
    assert not answers.wrong(tables | {second: table(0.062)}, {})
    (said,) = answers.wrong(tables | {second: table(0.058)}, {})
    assert said == f"{mine}: mean 0.0660, where {first!r} and {second!r} has 0.0580"


@pytest.mark.parametrize("name", ["ours, MTP 3", "ours graphs, alone and together"])
def test_generated_tokens_are_judged_too(name):
    a = answer([-1.0], [5], [{"5": -0.1, "6": -9.0}])
    b = answer([-1.0], [6], [{"6": -0.1}])
    native = table(0.07)
    assert not answers.wrong({"natives": native, name: differences([1000], [a], [a])}, {})
    (said,) = answers.wrong({"natives": native, name: differences([1000], [a], [b])}, {})
    assert said == (f"{name}: a token after 1000 is 8.90 apart, where 'natives' has 0.07 at most")


def test_answers_from_the_cache_have_no_mean_and_are_judged_by_their_tokens():
    a = answer([], [5], [{"5": -0.1, "6": -9.0}])
    b = answer([], [6], [{"6": -0.1}])
    alike, parted = differences([1000], [a], [a]), differences([1000], [a], [b])
    assert (alike[0].mean, pooled_mean(alike)) == (None, None)
    assert "1000 tokens: prompt not asked for; 1/1 generated alike" in line("ours", alike[0])
    name, native = "ours chunks, again from the cache", table(0.07)
    assert not answers.wrong({"natives": native, name: alike}, {})
    (said,) = answers.wrong({"natives": native, name: parted}, {})
    assert said == f"{name}: a token after 1000 is 8.90 apart, where 'natives' has 0.07 at most"
    chunks = {"alone": [a] * 7, "again": [[a | {"cached": 0}] * 7, [a | {"cached": 9}] * 7]}
    engine = chunks | {"started_s": 1.0, "compiled": []}
    report = answers.compared(answers.chosen(["ours chunks"]), {"ours chunks": engine}, print)
    assert report["mean"] == {name: None}
    assert report["unjudged"] == [name]


@pytest.mark.parametrize("lacking", ["natives", "ours and flash_attn"])
def test_a_comparison_that_should_have_a_mean_and_has_none_is_wrong(lacking):
    same = answer([], [5], [{"5": -0.1}])
    tables = {"natives": table(0.07), "ours and flash_attn": table(0.07)}
    tables[lacking] = differences([1000], [same], [same])
    (said,) = answers.wrong(tables, {})
    assert said.startswith("ours and flash_attn: not judged, ")
    assert said.endswith("has no log-probabilities of prompts")
    assert lacking in said.partition("not judged")[2]


def test_late_kernels_of_ours_an_unused_cache_and_a_dead_engine_are_wrong():
    monitor = "Triton kernel JIT compilation during inference: {} (constexprs={{}})"
    good: dict[str, Any] = {"started_s": 1.0, "compiled": [monitor.format("fused_moe_kernel")]}
    bad: dict[str, Any] = {"started_s": 1.0, "compiled": [monitor.format("_attend_kernel")]}
    cold: dict[str, Any] = good | {"again": [[], [{"cached": 0}]]}
    found: dict[str, dict[str, Any]] = {
        "good": good,
        "bad": bad,
        "cold": cold,
        "dead": {"error": "exit 1"},
    }
    facts = {name: answers.serving_facts(entry) for name, entry in found.items()}
    assert facts["good"] == {"started_s": 1.0, "compiled_while_serving": 1, "of_these_ours": 0}
    assert answers.wrong({}, facts) == [
        "dead: exit 1",
        "bad: 1 kernels of ours compiled while serving",
        "cold: nothing came from the prefix cache",
    ]


def test_every_comparison_names_cases_and_a_native_one():
    names = {case.name for case in cases.CASES}
    assert len(names) == len(cases.CASES)
    for name, (a, b, bounds) in cases.PAIRS.items():
        assert {a, b} <= names
        assert (not bounds) == name.startswith("natives")
        for bound in bounds:
            case_, together, _ = bound.partition(", alone and together")
            known = answers.chosen([case_])[0].together if together else not cases.PAIRS[bound][2]
            assert known
    with pytest.raises(InputError, match=r"--only: no case is called 'theirs'; there are flash_a"):
        answers.chosen(["theirs"])
    with pytest.raises(InputError, match=r"--only: names no case; there are flash_attn"):
        answers.chosen([])
    assert answers.chosen(None) == list(cases.CASES)
    assert [case.name for case in answers.chosen(["ours"])] == ["ours"]


def test_the_model_has_real_attention_and_a_folder_is_taken_as_it_is(tmp_path):
    arch = architecture("share")
    assert (arch.num_attention_heads, arch.latent_dim, arch.index_topk) == (8, 576, 2048)
    assert arch.indexer_types == ("full", "shared", "full", "shared")
    assert arch.num_nextn_predict_layers == 1
    with pytest.raises(ValueError, match="kind: expected one of full, share, flash, got 'half'"):
        architecture("half")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert write_model(tmp_path, "full") == Path(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_model_whose_writing_was_interrupted_is_written_anew(tmp_path, monkeypatch):
    import safetensors.torch

    names = ("model.embed_tokens.weight", "lm_head.weight")
    monkeypatch.setattr(model, "shapes_of", lambda *_: dict.fromkeys(names, (4, 2)))

    def interrupted(_weights, file, **_):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    folder = tmp_path / "work" / "model-full"
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_model(folder, "full", device="cpu")
    assert not folder.exists()
    (leftover,) = folder.parent.iterdir()
    (leftover / ".tmp").write_bytes(b"of the library that writes")
    folder.mkdir()  # and one of a run that wrote into it
    (folder / "model.safetensors").write_bytes(b"half")
    assert write_model(folder, "full", device="cpu") == folder
    assert [file.name for file in folder.parent.iterdir()] == ["model-full"]
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert weights["lm_head.weight"].shape == (4, 2)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "model-full").mkdir()
    (tmp_path / "model-full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"model-full: holds 'notes.txt' and no whole model; move"):
        write_model(tmp_path / "model-full", "full", device="cpu")
    assert (tmp_path / "model-full" / "notes.txt").read_text() == "mine"


def test_prompts_are_the_same_everywhere():
    assert prompt(4) == prompt(4)
    assert prompt(4) != prompt(4, seed=1)
    assert len(prompt(17)) == 17


def test_cases_for_more_gpus_than_there_are_are_named_and_left_out():
    lines: list[str] = []
    kept = answers.fitting(cases.CASES, 1, lines.append)
    assert {case.gpus for case in kept} == {1}
    assert len(kept) + len(lines) == len(cases.CASES)
    assert "ours tp 2: left out, it takes 2 GPUs and there are 1" in lines
    assert answers.fitting(cases.CASES, 2, lines.append) == list(cases.CASES)
    with pytest.raises(InputError, match=r"no case fits, they take 2 GPUs or more and there are 1"):
        answers.fitting(answers.chosen(["ours tp 2"]), 1, lines.append)


def case(name):
    return cases.EngineCase(name, cases.OURS)


def test_engines_for_one_gpu_are_dealt_out():
    both = cases.EngineCase("both", cases.OURS, gpus=2)
    found = dealt([case("a"), both, case("b"), case("c")], ["4", "6"])
    assert {name: env["CUDA_VISIBLE_DEVICES"] for name, env in found.items()} == {
        "a": "4",
        "both": "4,6",
        "b": "6",
        "c": "4",
    }
    assert dealt([case("a")], ["0"]) == {"a": {}}


def test_the_referee_answers_a_prompt_in_chunks_as_whole(tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    from glm5lab.architecture import Glm5Architecture
    from glm5lab.gguf.sample_hf import twin_config
    from glm5lab.gguf.sample_weights import random_weights
    from glm5lab.gpu_check import hf

    arch = Glm5Architecture.tiny("mtp")
    weights = random_weights(arch, 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(twin_config(arch)))
    referee = hf.HfModel(tmp_path, "float32", "cpu")
    tokens = [(i * 37 + 11) % 500 for i in range(50)]
    whole = referee.answer(tokens, 4)
    monkeypatch.setattr(hf, "CHUNK", 7)
    parts = referee.answer(tokens, 4)
    (row,) = differences([50], [whole], [parts])
    assert len(whole["prompt"]) == 49
    assert (row.same, row.generated) == (4, 4)
    assert max(row.largest, row.step) < 1e-4
    assert whole["logprobs"][0][str(whole["tokens"][0])] == max(whole["logprobs"][0].values())

    del weights["model.layers.2.self_attn.o_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckError, match=r"lacks 1 parameters: .*layers\.2\.self_attn\.o_proj"):
        hf.HfModel(tmp_path, "float32", "cpu")


def test_flash_has_rows_without_a_rotary_part_and_pools_of_keys():
    from transformers import CONFIG_MAPPING

    arch = architecture("flash")
    config = config_of(arch, "flash")
    read = CONFIG_MAPPING[config["model_type"]](**config)
    assert arch.latent_dim == read.kv_lora_rank + read.qk_rope_head_dim == 512
    assert (read.mla_use_nope, read.mhc, read.topk_method) == (True, False, "noaux_tc")
    shapes = shapes_of(arch, "flash")
    prefix = "model.layers.3.self_attn."
    assert shapes[f"{prefix}kv_a_proj_with_mqa.weight"] == (512, arch.hidden_size)
    assert shapes[f"{prefix}indexer.index_kpool_compress_gate"] == (128, arch.hidden_size)
    assert not any(".layers.4." in name for name in shapes)

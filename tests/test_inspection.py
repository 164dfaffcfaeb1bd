"""What `inspect --json` gives, for any file."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner
from unknown_types import with_unknown_types

from glm5lab.__main__ import app, main
from glm5lab.errors import InputError
from glm5lab.gguf.reader import open_gguf
from glm5lab.views.inspection import inspect_json, plain
from glm5lab.views.tables import inspect_text


def test_it_says_what_gguf_py_reads(sample_mix):
    """Against gguf-py's reader, shard by shard."""
    result = inspect_json(sample_mix)
    ours = {tensor["name"]: tensor for tensor in result["tensors"]}
    count = 0
    for number, shard in enumerate(result["shards"], 1):
        reader = gguf.GGUFReader(shard["file"])
        assert shard["tensors"] == len(reader.tensors)
        for theirs in reader.tensors:
            found = ours[theirs.name]
            assert found["shape"] == list(reversed(theirs.shape.tolist()))
            assert (found["type"], found["type_id"]) == (
                theirs.tensor_type.name,
                theirs.tensor_type,
            )
            assert found["nbytes"] == theirs.n_bytes
            assert found["offset"] == theirs.data_offset
            assert found["shard"] == number
            count += 1
    assert count == len(ours)
    assert result["nbytes"] == sum(result["bytes_by_type"].values())
    assert result["nbytes"] == sum(result["bytes_by_role"].values())
    assert result["parameters"] == sum(math.prod(t["shape"]) for t in result["tensors"])
    assert result["metadata"]["glm-dsa.block_count"] == 5
    assert result["metadata"]["tokenizer.ggml.tokens"] == {"array_of": 512}


def test_the_command_gives_strict_json(sample_share):
    output = CliRunner().invoke(app, ["inspect", str(sample_share), "--json"])
    assert output.exit_code == 0
    assert json.loads(output.output) == inspect_json(sample_share)


def test_values_that_json_lacks():
    assert plain([float("inf"), 1.5, True, None, "a"]) == ["inf", 1.5, True, None, "a"]
    assert plain([0] * 300) == {"array_of": 300}


def test_other_architectures_and_cut_files_are_inspected_with_a_note(tmp_path, sample_f32):
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    writer.add_float32("llama.odd", float("nan"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    result = inspect_json(other)
    assert (result["architecture"], result["metadata"]["llama.odd"]) == ("llama", "nan")
    assert result["warnings"] == []

    cut = tmp_path / "cut.gguf"
    cut.write_bytes(sample_f32.read_bytes()[:-1000])
    last = max(open_gguf(sample_f32).tensors.values(), key=lambda tensor: tensor.offset).name
    assert any(last in warning for warning in inspect_json(cut)["warnings"])
    assert "note: cut.gguf: " in inspect_text(cut, width=200)
    with pytest.raises(InputError, match="truncated"):
        open_gguf(cut)


def test_unknown_types_and_byte_order_are_said(tmp_path, sample_f32):
    path = with_unknown_types(sample_f32, tmp_path)
    text = inspect_text(path, width=1000)
    said = [line for line in text.splitlines() if line.startswith("note: type unknown(")]
    assert [line.partition(" is ")[0] for line in said] == [
        "note: type unknown(144)",
        "note: type unknown(138)",
    ]
    assert "(8 tensors, such as blk.1.ffn_gate_exps.weight)" in said[0]
    model = open_gguf(sample_f32)
    assert "big-endian" not in inspect_text(model)
    assert "byte order " in inspect_text(replace(model, byte_order="big"))


def test_an_adapter_is_said_to_be_one(tmp_path, capsys):
    path = tmp_path / "lora.gguf"
    writer = gguf.GGUFWriter(path, "glm-dsa")
    writer.add_type("adapter")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "note: a LoRA adapter (general.type), not a model" in inspect_text(path, width=200)
    for command in (["map"], ["plan", "--gpus", "1", "--gpu-memory", "8"], ["prepare"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, str(path)])
        assert ended.value.code == 2
        assert "a LoRA adapter (general.type), not a model; " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "map", "prepare", "serve", "demo", "check"])
def test_an_empty_name_is_not_the_current_folder(command, sample_f32, monkeypatch):
    monkeypatch.chdir(sample_f32.parent)
    answer = CliRunner().invoke(app, [command, ""])
    assert answer.exit_code == 2
    assert "the name is empty" in answer.output


def test_a_newline_in_a_path_makes_no_second_line(tmp_path, sample_f32, capsys):
    folder = tmp_path / "x\ny"
    folder.mkdir()
    shutil.copy(sample_f32, folder / "a-00001-of-00002.gguf")
    for path in (folder / "a-00001-of-00002.gguf", folder / "none.gguf", tmp_path / "x\nz"):
        with pytest.raises(SystemExit):
            main(["inspect", str(path)])
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(sample_f32):
    for options in ([], ["--json"]):
        command = [sys.executable, "-m", "glm5lab", "inspect", str(sample_f32), *options]
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "glm5lab: standard output: no space left; write to another place"
        ]

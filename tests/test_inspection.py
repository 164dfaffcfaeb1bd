"""What `inspect --json` gives, for any file."""

import json
import math

import gguf
import pytest
from typer.testing import CliRunner

from glm5lab.__main__ import app
from glm5lab.errors import InputError
from glm5lab.gguf.reader import open_gguf
from glm5lab.views.inspection import inspect_json, plain
from glm5lab.views.tables import inspect_text


def test_it_says_what_gguf_py_reads(sample_mix):
    """Against gguf-py's reader, shard by shard."""
    result = inspect_json(sample_mix)
    ours = {tensor["name"]: tensor for tensor in result["tensors"]}
    count = 0
    for number, shard in enumerate(result["shards"]):
        reader = gguf.GGUFReader(shard["file"])
        assert shard["tensors"] == len(reader.tensors)
        for theirs in reader.tensors:
            found = ours[theirs.name]
            assert found["shape"] == list(reversed(theirs.shape.tolist()))
            assert (found["type"], found["type_id"]) == (
                theirs.tensor_type.name,
                theirs.tensor_type,
            )
            assert found["bytes"] == theirs.n_bytes
            assert found["offset"] == theirs.data_offset
            assert found["shard"] == number
            count += 1
    assert count == len(ours)
    assert result["bytes"] == sum(result["bytes_by_type"].values())
    assert result["bytes"] == sum(result["bytes_by_role"].values())
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

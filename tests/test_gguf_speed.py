"""The set of GLM-5's size, and the benchmark on it. No timings: those are the benchmark's."""

import json
import os
from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from glm5lab.__main__ import app
from glm5lab.architecture import KINDS, Glm5Architecture
from glm5lab.gguf.bench import bench_text
from glm5lab.gguf.config import hf_config, read_architecture
from glm5lab.gguf.large_sample import large_vocabulary, write_large_sample
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.gguf.shapes import tensor_shapes
from glm5lab.gguf.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> GgufModel:
    folder = tmp_path_factory.mktemp("large")
    write_large_sample(folder)
    return open_gguf(folder)


def test_it_has_glm5s_size(large: GgufModel) -> None:
    assert len(large.files) == 12
    assert len({t.layer for t in large.tensors.values()} - {None}) == 79
    assert 1700 < len(large.tensors) < 1900
    assert 4.4e11 < large.nbytes < 4.7e11
    assert read_architecture(large) == Glm5Architecture.glm5()
    assert hf_config(large)["num_nextn_predict_layers"] == 1
    assert large.warnings == []


def test_it_takes_no_room(large: GgufModel) -> None:
    assert sum(os.stat(p).st_blocks * 512 for p in large.files) < 2e7


def test_gguf_py_reads_the_same_table(large: GgufModel) -> None:
    """A later shard, and the names of all: the first one's vocabulary takes gguf-py 10 s."""
    for index in (5, 11):
        for t in gguf.GGUFReader(large.files[index]).tensors:
            ours = large.tensors[t.name]
            assert ours.shape == tuple(int(n) for n in reversed(t.shape))
            assert (ours.type, ours.nbytes) == (t.tensor_type.name, t.n_bytes)
            assert (ours.offset, ours.shard) == (t.data_offset, index)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_those_of_a_sample(kind: str, request: pytest.FixtureRequest) -> None:
    """Names and shapes of a file made from an HF checkpoint, which has a table of its own."""
    path = request.getfixturevalue("sample_f32" if kind == "full" else f"sample_{kind}")
    sample = {name: t.shape for name, t in open_gguf(path).tensors.items()}
    assert tensor_shapes(Glm5Architecture.tiny(kind)) == sample


def test_the_vocabulary_is_a_tokenizer(large: GgufModel, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    vocabulary = large_vocabulary(154_880)
    assert len(set(vocabulary.tokens)) == len(vocabulary.types) == 154_880
    assert len(vocabulary.merges) > 300_000
    write_tokenizer(large, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("bababa<|user|>", add_special_tokens=False).tokens == [
        "bababa",
        "<|user|>",
    ]


@pytest.mark.slow
def test_bench_reader(tmp_path: Path) -> None:
    out = tmp_path / "reader.json"
    done = CliRunner().invoke(app, ["bench", "reader", "--rounds", "1", "--json", str(out)])
    result = json.loads(out.read_text())
    assert done.stdout.strip() == bench_text(result)
    assert result["ratio"] > 1
    assert result["ours"]["mb"] < result["limits"]["mb"]
    assert result["set"]["tokens"] == 154_880

"""Layouts of public files: their sizes, llama-quantize's rules, and files of their shape."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import pytest

from glm5lab.architecture import Glm5Architecture
from glm5lab.errors import InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import FOLDER, Layout, layers_of, read_layout, read_layouts
from glm5lab.gguf.quantize_rules import quantized_type
from glm5lab.gguf.reader import open_gguf

LAYOUTS = read_layouts()
NAMES = sorted(LAYOUTS)
GIB = 1 << 30


@pytest.mark.parametrize("name", NAMES)
def test_source_and_size(name: str) -> None:
    """Each names what was read, and its tensors give the published size."""
    layout = LAYOUTS[name]
    for source in layout.sources:
        assert source["url"].startswith("https://")
        assert len(source["read"]) == 10
        assert source["says"]
    published = layout.published
    assert published
    if "gib" in published:  # to the last published digit
        digits = len(str(published["gib"]).partition(".")[2])
        assert round(layout.nbytes / GIB, digits) == published["gib"]
    if "gb" in published:
        assert layout.nbytes / 1e9 == pytest.approx(published["gb"], abs=published["gb_tolerance"])
    if "llama_quantize_mib" in published:  # a dry run of llama.cpp's quantizer
        assert round(layout.nbytes / (1 << 20), 2) == published["llama_quantize_mib"]
    if "bpw" in published:
        weights = sum(_elements(t.shape) for t in layout.tensors)
        assert layout.nbytes * 8 / weights == pytest.approx(published["bpw"], rel=2e-3)
    if "type_counts" in published:
        assert Counter(t.type for t in layout.tensors) == published["type_counts"]
    if "tensors" in published:
        assert len(layout.tensors) == published["tensors"]


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


@pytest.mark.parametrize("name", NAMES)
def test_dimensions(name: str) -> None:
    arch, published = LAYOUTS[name].architecture, Glm5Architecture.glm5()
    assert arch.block_count == 79
    for field in ("hidden_size", "n_routed_experts", "kv_lora_rank", "vocab_size", "index_topk"):
        assert getattr(arch, field) == getattr(published, field)
    longer = LAYOUTS[name].model == "zai-org/GLM-5.2"
    assert arch.max_position_embeddings == (1048576 if longer else 202752)
    assert arch.rope_theta == (8e6 if longer else 1e6)
    assert arch.indexer_types.count("full") == (21 if longer else 78)


@pytest.mark.parametrize(
    ("name", "file_type"), [("glm-5-q4_k_m", "q4_k_m"), ("glm-5-q8_0", "q8_0")]
)
def test_derived_types_follow_the_rules(name: str, file_type: str) -> None:
    layout = LAYOUTS[name]
    assert "llama-quantize" in layout.derived
    for t in layout.tensors:
        assert t.type_id == quantized_type(t.name, t.shape, 79, file_type), t.name


def test_q4_k_m_mixes_types_between_layers() -> None:
    """What makes the real file hard: Q6_K in both ends and every third layer between."""
    types = {t.name: t.type for t in LAYOUTS["glm-5-q4_k_m"].tensors}
    down = "".join(types[f"blk.{i}.ffn_down_exps.weight"][1] for i in range(3, 79))
    assert down == "6" * 6 + "446" * 20 + "6" * 10
    assert types["blk.5.attn_k_b.weight"] == "Q5_0"
    assert types["blk.5.indexer.proj.weight"] == "Q4_K"


@pytest.mark.parametrize("name", NAMES)
def test_files_of_its_shape(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    model = open_gguf(write_layout(layout, tmp_path))
    assert len(model.shards) == len(layout.shard_tensors)
    assert [t.name for t in model.tensors.values()] == [t.name for t in layout.tensors]
    for ours in layout.tensors:
        found = model.tensors[ours.name]
        assert (found.shape, found.type_id, found.nbytes) == (ours.shape, ours.type_id, ours.nbytes)
    on_disk = sum(os.stat(shard).st_blocks * 512 for shard in model.shards)
    assert on_disk < 20e6
    config = hf_config(model)
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (78, 1)
    assert config["eos_token_id"] == [154820, 154827, 154829]
    assert config["bos_token_id"] == 154822


def test_gguf_py_reads_them_too(tmp_path: Path) -> None:
    layout = LAYOUTS["glm-5.2-ud-iq2_xxs"]
    model = open_gguf(write_layout(layout, tmp_path, vocabulary=False))
    found: dict[str, Any] = {}
    for shard in model.shards:
        reader = gguf.GGUFReader(shard)
        found |= {t.name: (t.tensor_type.name, int(t.n_bytes)) for t in reader.tensors}
    assert found == {t.name: (t.type, t.nbytes) for t in layout.tensors}
    keys = {k: f.contents() for k, f in gguf.GGUFReader(model.shards[0]).fields.items()}
    for key, value in layout.metadata.items():
        assert keys[key] == (pytest.approx(value) if isinstance(value, float) else value), key


def test_shards_as_long_as_the_published_ones(tmp_path: Path) -> None:
    layout = LAYOUTS["glm-5.2-ud-iq2_xxs"]
    model = open_gguf(write_layout(layout, tmp_path, vocabulary=False))
    for index, size in enumerate(layout.published["shard_bytes"], start=1):
        start = min(t.offset for t in model.tensors.values() if t.shard == index)
        assert os.stat(model.shards[index]).st_size - start == size


def test_any_number_of_shards(tmp_path: Path) -> None:
    layout = LAYOUTS["glm-5-q4_k_m"]
    model = open_gguf(write_layout(layout, tmp_path, shards=3, vocabulary=False))
    assert {t.shard for t in model.tensors.values()} == {0, 1, 2}
    single = write_layout(layout, tmp_path / "one", shards=1, vocabulary=False)
    assert single.name == "glm-5-q4_k_m.gguf"
    assert open_gguf(single).nbytes == layout.nbytes
    for wrong in (0, 5000):
        with pytest.raises(InputError, match=f"shards: {wrong} is out of range; use 1 to 1809"):
            write_layout(layout, tmp_path, shards=wrong)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="cannot be written"):
        write_layout(layout, file / "below")


def _changed(tmp_path: Path, change: dict[str, Any]) -> Layout:
    data = json.loads((FOLDER / "glm-5-q8_0.json").read_text(encoding="utf-8"))
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data | change), encoding="utf-8")
    return read_layout(path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"types": {"output.weight": "Q9_X"}}, "type 'Q9_X' is unknown"),
        ({"types": {"attn_k_b.weight": {"Q4_K": "0-78"}}}, "rows of 192 hold no whole Q4_K blocks"),
        ({"types": {"attn_k.weight": {"Q4_K": "0-78"}}}, "KeyError 'attn_k.weight'"),
        (
            {"types": {"attn_q_b.weight": {"Q8_0": "0-2", "F16": "2"}}},
            "attn_q_b.weight has two types",
        ),
        ({"shard_tensors": [1, 2]}, "shards hold 3 tensors, types name 1809"),
        ({"metadata": {}}, "KeyError 'glm-dsa.block_count'"),
    ],
)
def test_wrong_layouts(tmp_path: Path, change: dict[str, Any], cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        _changed(tmp_path, change)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no layouts"):
        read_layouts(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_layout(tmp_path / "none.json")
    assert layers_of("0-2,6,10-11") == [0, 1, 2, 6, 10, 11]

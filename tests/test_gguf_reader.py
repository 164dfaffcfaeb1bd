"""The reader against gguf-py's own reader, and against files that are broken in every way."""

import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pandas as pd
import pytest
from gguf_bytes import header, key, string, tensor, text_key, write

from glm5lab.errors import InputError
from glm5lab.gguf.reader import open_gguf
from glm5lab.loading.names import split_names

ARCH = text_key("general.architecture", "glm-dsa")


def assert_same_as_gguf_py(path: Path) -> None:
    model = open_gguf(path)
    theirs: dict[str, tuple[int, Any]] = {}
    for index, shard in enumerate(model.shards):
        reader = gguf.GGUFReader(shard)
        theirs |= {t.name: (index, t) for t in reader.tensors}
        if index == 0:
            fields = {k: f.contents() for k, f in reader.fields.items() if k[:5] != "GGUF."}
            assert fields == model.metadata
    assert list(theirs) == list(model.tensors)
    for name, (number, t) in theirs.items():
        ours = model.tensors[name]
        assert ours.shape == tuple(int(n) for n in reversed(t.shape))
        assert (ours.type, ours.nbytes) == (t.tensor_type.name, t.n_bytes)
        assert (ours.offset, ours.shard) == (t.data_offset, number)
        np.testing.assert_array_equal(model.raw(name), t.data.view(np.uint8).reshape(-1))
        values = gguf.quants.dequantize(t.data, t.tensor_type).reshape(ours.shape)
        np.testing.assert_array_equal(model.dequantize(name), values)


@pytest.mark.parametrize("name", ["sample_f32", "sample_share", "sample_mix", "sample_mtp"])
def test_agrees_with_gguf_py(name: str, request: pytest.FixtureRequest) -> None:
    assert_same_as_gguf_py(request.getfixturevalue(name))


def test_rows_of_a_stack_equal_the_whole(sample_mix: Path) -> None:
    model = open_gguf(sample_mix)
    whole = model.dequantize("blk.1.ffn_gate_exps.weight")
    part = model.dequantize("blk.1.ffn_gate_exps.weight", rows=slice(7, 9))
    assert part.shape == (2, 256, 256)
    np.testing.assert_array_equal(part, whole[7:9])
    bias = model.dequantize("blk.1.exp_probs_b.bias")
    np.testing.assert_array_equal(
        model.dequantize("blk.1.exp_probs_b.bias", rows=slice(3, 5)), bias[3:5]
    )
    part[:] = 0  # the caller's own copy
    assert not model.raw("blk.1.ffn_gate_exps.weight").flags.writeable


def test_any_shard_or_the_folder_opens_the_set(sample_mix: Path) -> None:
    expected = open_gguf(sample_mix)
    assert len(expected.shards) == 3
    assert expected.path == sample_mix
    assert {t.shard for t in expected.tensors.values()} == {1, 2}
    for path in (*expected.files, sample_mix.parent):
        model = open_gguf(path)
        assert model.tensors == expected.tensors
        assert model.metadata["glm-dsa.block_count"] == 5
    assert open_gguf(str(sample_mix)).tensors == expected.tensors


def test_table_has_a_row_a_tensor(sample_share: Path) -> None:
    model = open_gguf(sample_share)
    table = model.table()
    assert len(table) == len(model.tensors)
    assert table["nbytes"].sum() == model.nbytes
    proj = table[table["role"] == "indexer.proj.weight"]
    assert list(proj["layer"]) == [0, 1, 3]


def test_every_value_type_and_nested_arrays(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 2)
    for row in ([1, 2], [3]):
        nested += struct.pack(f"<IQ{len(row)}h", 3, len(row), *row)
    keys = [ARCH]
    values: dict[int, tuple[str, float]] = {
        **{0: ("B", 200), 1: ("b", -5), 2: ("H", 60000), 3: ("h", -7), 4: ("I", 1 << 31)},
        **{5: ("i", -9), 6: ("f", 0.5), 7: ("B", 1), 10: ("Q", 1 << 60), 11: ("q", -1)},
        12: ("d", 0.1),
    }
    for kind, (code, value) in values.items():
        keys.append(key(f"k{kind}", kind, struct.pack(f"<{code}", value)))
    keys.append(key("nested", 9, nested))
    keys.append(key("empty", 9, struct.pack("<IQ", 8, 0)))
    keys.append(key("flags", 9, struct.pack("<IQ3B", 7, 3, 1, 0, 1)))
    keys.append(key("latin1", 8, struct.pack("<Q", 2) + b"\xe9!"))
    model = open_gguf(write(tmp_path / "a.gguf", header(keys, [])))
    assert {k: v for k, v in model.metadata.items() if k[0] == "k"} == {
        f"k{kind}": value for kind, (_, value) in values.items()
    }
    assert model.metadata["k7"] is True
    assert model.metadata["nested"] == [[1, 2], [3]]
    assert model.metadata["empty"] == []
    assert model.metadata["flags"] == [True, False, True]
    assert model.metadata["latin1"] == r"\xe9!"
    assert model.metadata_types["nested"] == (9, 9, 3)
    assert model.metadata_types["flags"] == (9, 7)


@pytest.mark.parametrize("version", [2, 3])
def test_alignment_and_versions(tmp_path: Path, version: int) -> None:
    keys = [ARCH, key("general.alignment", 4, struct.pack("<I", 64))]
    head = header(keys, [tensor("a", (3,), 0, 0), tensor("b", (2, 2), 0, 64)], version)
    data = np.arange(3, dtype="<f4").tobytes().ljust(64, b"\0") + b"\0\0\x80?" * 4
    model = open_gguf(write(tmp_path / "a.gguf", head, data, 64))
    np.testing.assert_array_equal(model.dequantize("a"), [0, 1, 2])
    np.testing.assert_array_equal(model.dequantize("b"), np.ones((2, 2)))


def test_unknown_type_keeps_the_file_readable(tmp_path: Path) -> None:
    infos = [tensor("x", (256,), 139, 0), tensor("b", (2,), 0, 160), tensor("y", (256,), 141, 192)]
    data = b"\1" * 160 + struct.pack("<2f", 1, 2).ljust(32, b"\0") + b"\2" * 200
    model = open_gguf(write(tmp_path / "a.gguf", header([ARCH], infos), data))
    assert [(t.type, t.nbytes) for t in model.tensors.values()] == [
        ("unknown(139)", 160),
        ("F32", 8),
        ("unknown(141)", 200),
    ]
    np.testing.assert_array_equal(model.dequantize("b"), [1, 2])
    assert model.raw("x").sum() == 160
    with pytest.raises(InputError, match=r"unknown\(139\), which the gguf package cannot"):
        model.dequantize("x")


def test_large_vocabulary_is_fast(tmp_path: Path) -> None:
    def strings(count: int, text: str) -> bytes:
        items = b"".join(string(f"{text}{i}") for i in range(count))
        return struct.pack("<IQ", 8, count) + items

    keys = [ARCH, key("tokens", 9, strings(151_000, "Ġtoken"))]
    keys.append(key("merges", 9, strings(320_000, "Ġa b")))
    path = write(tmp_path / "a.gguf", header(keys, []))
    start = time.perf_counter()
    model = open_gguf(path)
    assert time.perf_counter() - start < 5  # 0.3 s on an idle core
    assert model.metadata["merges"][-1] == "Ġa b319999"


def test_unknown_tensor_name(sample_f32: Path) -> None:
    with pytest.raises(InputError, match=r"no tensor 'x.weight' among its 113"):
        open_gguf(sample_f32).raw("x.weight")


def test_reader_is_light() -> None:
    code = (
        "import glm5lab.gguf.reader, glm5lab.gguf.config, glm5lab.gguf.sample, sys;"
        "bad = {'torch', 'vllm', 'transformers', 'pandas'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "layer", "role"),
    [
        ("blk.0.a.weight", 0, "a.weight"),
        ("blk.78.a", 78, "a"),
        ("blk.01.a", None, "blk.01.a"),
        ("blk.².a", None, "blk.².a"),
        ("blk.1234567890.a", None, "blk.1234567890.a"),
        ("blk.3.", None, "blk.3."),
        ("ablk.3.a", None, "ablk.3.a"),
        ("output.weight", None, "output.weight"),
    ],
)
def test_block_and_role_are_the_same_everywhere(
    tmp_path: Path, name: str, layer: int | None, role: str
) -> None:
    """The reader's table and the table of names split a tensor's name alike."""
    head = header([text_key("general.architecture", "glm-dsa")], [tensor(name, (8,), 0, 0)])
    found = open_gguf(write(tmp_path / "a.gguf", head, b"\0" * 32)).tensors[name]
    row = split_names([name]).astype(object).to_dict("records")[0]
    assert (found.layer, found.role) == (layer, role)
    assert (None if row["layer"] is pd.NA else row["layer"], row["role"]) == (layer, role)

"""Files whose weights are not all there, and files in the other byte order."""

import argparse
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.scripts.gguf_convert_endian import convert_byteorder
from gguf_bytes import header, tensor, text_key, write

from glm5lab.errors import InputError
from glm5lab.gguf.quantize import quantize
from glm5lab.gguf.reader import open_gguf, open_sources
from glm5lab.gguf.source import FileSource, UrlPath, location

ARCH = text_key("general.architecture", "glm-dsa")


def data_start(path: Path) -> int:
    return min(t.offset for t in open_gguf(path).tensors.values())


# -------------------------------------------------------------------------------- truncated


def test_cut_inside_the_data(tmp_path: Path, sample_f32: Path) -> None:
    whole = open_gguf(sample_f32)
    last = max(whole.tensors.values(), key=lambda t: t.offset)
    path = Path(shutil.copy(sample_f32, tmp_path))
    os.truncate(path, last.offset + 10)
    with pytest.raises(InputError, match=f"first tensor that is cut is '{last.name}'"):
        open_gguf(path)
    model = open_gguf(path, allow_truncated=True)
    assert list(model.tensors) == list(whole.tensors)
    assert len(model.warnings) == 1
    assert f"first tensor that is cut is {last.name!r}" in model.warnings[0]
    assert not model.header_only
    np.testing.assert_array_equal(
        model.dequantize("output_norm.weight"), whole.dequantize("output_norm.weight")
    )
    with pytest.raises(InputError, match=f"ends inside tensor '{last.name}'"):
        model.raw(last.name)


def test_header_alone(tmp_path: Path, sample_f32: Path) -> None:
    whole = open_gguf(sample_f32)
    path = Path(shutil.copy(sample_f32, tmp_path))
    os.truncate(path, data_start(sample_f32))
    with pytest.raises(InputError, match=r"truncated at \d+ bytes: the first tensor"):
        open_gguf(path)
    for options in ({"header_only": True}, {"allow_truncated": True}):
        model = open_gguf(path, **options)
        assert model.header_only
        assert model.tensors.keys() == whole.tensors.keys()
        assert model.nbytes == whole.nbytes
        assert len(model.warnings) == (1 if "allow_truncated" in options else 0)
        with pytest.raises(InputError, match="only its header is read, not the weights"):
            model.raw("output_norm.weight")
        with pytest.raises(InputError, match="only its header is read, not the weights"):
            model.dequantize("output_norm.weight")


def test_every_cut_shard_of_a_set_is_named(tmp_path: Path) -> None:
    """A shard whose weights are all cut away does not hide that another one is damaged."""
    for number, left in (("1", 0), ("2", 40), ("3", 64)):
        infos = [tensor(f"{number}{name}", (8,), 0, 32 * i) for i, name in enumerate("ab")]
        path = tmp_path / f"m-0000{number}-of-00003.gguf"
        write(path, header([ARCH], infos), b"\0" * left)
    model = open_gguf(tmp_path, allow_truncated=True)
    assert model.header_only
    assert [warning.partition(": truncated")[0] for warning in model.warnings] == [
        "m-00001-of-00003.gguf",
        "m-00002-of-00003.gguf",
    ]
    assert open_gguf(tmp_path, header_only=True).warnings == []


def test_header_alone_without_its_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header([ARCH], [tensor("a", (8,), 0, 0)]))
    assert path.stat().st_size % 32
    assert open_gguf(path, allow_truncated=True).header_only
    assert open_gguf(path, header_only=True).tensors["a"].nbytes == 32


def test_cut_at_a_tensor_of_unknown_type(tmp_path: Path) -> None:
    infos = [tensor("a", (8,), 0, 0), tensor("x", (256,), 139, 32)]
    path = write(tmp_path / "a.gguf", header([ARCH], infos), b"\0" * 32)
    with pytest.raises(InputError, match="cut is 'x', all of it is missing"):
        open_gguf(path)


class Shrinking(FileSource):
    """A file that another process cuts while its header is being read."""

    def read(self, offset: int, count: int) -> bytes:
        return super().read(offset, count)[: max(0, 700 - offset)]


def test_a_file_that_shrinks_meanwhile(sample_f32: Path) -> None:
    with (
        Shrinking(sample_f32) as source,
        pytest.raises(InputError, match="has shrunk while it was read"),
    ):
        open_sources([source])


def test_locations() -> None:
    url = "https://example.org/a/b-00001-of-00002.gguf"
    path = location(url)
    assert isinstance(path, UrlPath)
    assert (str(path), path.name) == (url, "b-00001-of-00002.gguf")
    assert str(path.parent) == "https://example.org/a"
    assert isinstance(location("a/b.gguf"), Path)


# ------------------------------------------------------------------------------- byte order


def big_endian(path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in big-endian order, made by the gguf package's own converter."""
    shutil.copy(path, copy)
    monkeypatch.setattr("builtins.input", lambda _prompt: "YES")
    options = argparse.Namespace(order="big", dry_run=False)
    convert_byteorder(gguf.GGUFReader(copy, "r+"), options)
    return copy


def test_big_endian_equals_little(
    tmp_path: Path, sample_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = open_gguf(sample_f32)
    big = open_gguf(big_endian(sample_f32, tmp_path / "big.gguf", monkeypatch))
    assert (little.byte_order, big.byte_order) == ("little", "big")
    assert big.metadata == little.metadata
    assert big.table().drop(columns=["offset"]).equals(little.table().drop(columns=["offset"]))
    for name in little.tensors:
        np.testing.assert_array_equal(big.raw(name), little.raw(name))
        np.testing.assert_array_equal(big.dequantize(name), little.dequantize(name))


TYPES = ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"]


def test_big_endian_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 512)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "little.gguf", "glm-dsa")
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    little = open_gguf(tmp_path / "little.gguf")
    big = open_gguf(big_endian(little.files[0], tmp_path / "big.gguf", monkeypatch))
    for name in TYPES:
        assert (big._mapped(name) != little._mapped(name)).any()
        np.testing.assert_array_equal(big.raw(name), little.raw(name))
        np.testing.assert_array_equal(big.dequantize(name), little.dequantize(name))
        rows = slice(1, 2)
        np.testing.assert_array_equal(
            big.dequantize(name, rows=rows), little.dequantize(name)[rows]
        )


def test_big_endian_types_that_nobody_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    info = struct.pack(">Q1sIQIQ", 1, b"a", 1, 256, 11, 0)  # Q3_K
    head = struct.pack(">4sIQQ", b"GGUF", 3, 1, 0) + info
    write(path, head, b"\0" * 110)
    model = open_gguf(path)
    assert model.tensors["a"].type == "Q3_K"
    with pytest.raises(InputError, match="'a' of type Q3_K in a big-endian file cannot be read"):
        model.raw("a")


@pytest.mark.parametrize("alignment", [1, 8, 256, 4096])
def test_any_power_of_two_aligns(tmp_path: Path, alignment: int) -> None:
    values: dict[str, Any] = {"a": np.arange(3, dtype="f4"), "b": np.arange(5, dtype="f4") - 2}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "glm-dsa")
    writer.add_custom_alignment(alignment)
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_gguf(tmp_path / "a.gguf")
    for name, value in values.items():
        np.testing.assert_array_equal(model.dequantize(name), value)

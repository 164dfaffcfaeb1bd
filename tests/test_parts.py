"""Layer 1: parts of tensors, cut on block borders, read from files that may change meanwhile."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from glm5lab.errors import InputError
from glm5lab.gguf import part_reader
from glm5lab.gguf.block_scales import HALF_SCALES, broken_block, can_check
from glm5lab.gguf.part_reader import PartReader
from glm5lab.gguf.parts import Part, whole
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.tensors import Tensor, type_sizes

EXPERTS = "blk.1.ffn_down_exps.weight"


@pytest.mark.parametrize(
    ("stack", "rows", "columns"),
    [
        (range(12), range(256), range(256)),
        (range(3, 7), range(256), range(256)),
        (range(2, 4), range(64, 192), range(256)),
        (range(12), range(256), range(128, 256)),
        (range(5, 6), range(1, 200, 1), range(96, 160)),
        (range(0), range(256), range(256)),
    ],
)
@pytest.mark.parametrize("name", [EXPERTS, "blk.2.ffn_down_exps.weight"])
def test_a_part_equals_the_same_part_of_the_whole(sample_mix, name, stack, rows, columns):
    model = open_gguf(sample_mix)
    part = Part(model.tensors[name], stack, rows, columns)
    with PartReader() as reader:
        found = reader.values(part)
        assert reader.nbytes == part.nbytes
    expected = model.dequantize(name)[
        stack.start : stack.stop, rows.start : rows.stop, columns.start : columns.stop
    ]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("limit", [1, 1000, 30_000, 1 << 30])
@pytest.mark.parametrize("whole_matrices", [False, True])
def test_pieces_cover_a_part_once_and_keep_to_the_limit(sample_mix, limit, whole_matrices):
    tensor = open_gguf(sample_mix).tensors[EXPERTS]
    part = Part(tensor, range(2, 9), range(10, 250), range(0, 256))
    seen = np.zeros((12, 256), int)
    for piece in part.pieces(limit, whole_matrices):
        assert piece.nbytes <= max(limit, 240 * 210 if whole_matrices else 210)
        assert not whole_matrices or piece.rows == part.rows
        seen[piece.stack.start : piece.stack.stop, piece.rows.start : piece.rows.stop] += 1
    assert seen.sum() == 7 * 240
    assert (seen[2:9, 10:250] == 1).all()


def test_vectors_and_columns_touch_only_what_they_need(sample_f32):
    model = open_gguf(sample_f32)
    vector = whole(model.tensors["output_norm.weight"])
    assert vector.shape == (1, 1, 256)
    with PartReader() as reader:
        np.testing.assert_array_equal(
            reader.values(vector)[0, 0], model.dequantize("output_norm.weight")
        )
        half = replace(whole(model.tensors[EXPERTS]), columns=range(128, 256))
        reader.nbytes = 0
        reader.read(half)
        assert reader.nbytes == model.tensors[EXPERTS].nbytes // 2


def test_several_threads_read_more_files_than_are_kept_open(tmp_path, sample_mix, monkeypatch):
    monkeypatch.setattr(part_reader, "MAX_FILES", 2)
    model = open_gguf(sample_mix)
    copies = []
    for number in range(6):
        path = tmp_path / str(number)
        shutil.copy(model.tensors[EXPERTS].path, path)
        copies.append(replace(model.tensors[EXPERTS], path=path))
    expected = model.raw(EXPERTS)
    before = len(os.listdir("/proc/self/fd"))
    failures: list[str] = []
    with PartReader() as reader:

        def work() -> None:
            for copy in copies * 5:
                ok = np.array_equal(reader.read(whole(copy)).reshape(-1), expected)
                failures.extend([] if ok else [str(copy.path)])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("columns", [range(256), range(128, 256)], ids=["rows", "columns"])
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path, sample_f32, columns):
    """Through a plain memory map this would end the process with SIGBUS."""
    path = shutil.copy(sample_f32, tmp_path / "shrinks.gguf")
    tensor = open_gguf(path).tensors[EXPERTS]
    part = replace(whole(tensor), columns=columns)
    with PartReader() as reader:
        reader.read(part)
        os.truncate(path, tensor.offset + tensor.nbytes // 2)
        with pytest.raises(InputError, match=rf"shrinks.gguf: ends inside tensor '{EXPERTS}'"):
            reader.read(part)


def test_pages_that_go_between_the_check_and_the_copy_are_an_error_too(
    tmp_path, sample_f32, monkeypatch
):
    path = shutil.copy(sample_f32, tmp_path / "shrinks.gguf")
    tensor = open_gguf(path).tensors[EXPERTS]
    part = replace(whole(tensor), columns=range(128, 256))
    original = part_reader._File._address

    def address(self, tensor):
        found = original(self, tensor)
        os.truncate(path, 4096)
        return found

    monkeypatch.setattr(part_reader._File, "_address", address)
    with PartReader() as reader, pytest.raises(InputError, match="ends inside tensor"):
        reader.read(part)


def test_a_file_that_was_removed_is_named(tmp_path, sample_f32):
    path = Path(shutil.copy(sample_f32, tmp_path / "gone.gguf"))
    tensor = open_gguf(path).tensors[EXPERTS]
    path.unlink()
    with PartReader() as reader, pytest.raises(InputError, match=r"gone\.gguf: cannot be opened"):
        reader.read(whole(tensor))


def blocks_of(kind: gguf.GGMLQuantizationType, count: int) -> tuple[np.ndarray, Tensor]:
    """Random blocks with plain scales, and a tensor that they could be."""
    name, elements, nbytes = type_sizes()[int(kind)]
    data = np.random.default_rng(0).integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in HALF_SCALES.get(name, ()):
        data[:, at : at + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    if name == "MXFP4":
        data[:, 0] = 120
    if name == "IQ1_M":
        data[:, 49::2] &= 0x3F
    tensor = Tensor("t", (count, elements), int(kind), name, data.size, 0, Path("f.gguf"), 0)
    return data, tensor


def checked_types() -> list[gguf.GGMLQuantizationType]:
    sizes = gguf.GGML_QUANT_SIZES
    return [k for k in gguf.GGMLQuantizationType if k in sizes and can_check(k.name)]


@pytest.mark.parametrize("kind", checked_types(), ids=lambda kind: kind.name)
def test_damaged_scales_are_found_where_ggufs_own_code_reads_them(kind):
    """The places are right when a bad scale there spoils the values that gguf-py reads."""
    data, tensor = blocks_of(kind, 7)
    if tensor.type in ("F16", "BF16", "F32", "F64"):
        numbers = np.ones(7, np.float32)
        numbers[5] = np.inf
        if tensor.type == "BF16":
            data = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        else:
            data = numbers.astype(f"<f{tensor.nbytes // 7}").view(np.uint8)
        assert broken_block(data, tensor) == 5
        return
    assert broken_block(data, tensor) is None
    places = HALF_SCALES.get(tensor.type) or ((0,) if tensor.type == "MXFP4" else (48,))
    for at in places:
        bad = data.copy()
        if tensor.type == "MXFP4":
            bad[5, 0] = 0xFF
        elif tensor.type == "IQ1_M":
            bad[5, 55] = (bad[5, 55] & 0x0F) | 0x70
            bad[5, 53] |= 0xF0
        else:
            bad[5, at : at + 2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
        assert broken_block(bad, tensor) == 5
        if tensor.type == "Q8_1":  # gguf-py cannot dequantize it: only activations have it
            continue
        with np.errstate(all="ignore"):
            dequantized = np.asarray(gguf.quants.dequantize(bad, kind)).reshape(7, -1)
        good = np.asarray(np.isfinite(dequantized).all(axis=1))
        assert not good[5], at
        assert good[[0, 1, 2, 3, 4, 6]].all()


def test_every_type_with_a_kernel_can_be_checked():
    from glm5lab.gguf.kernels import QUANTIZED, UNQUANTIZED

    assert all(can_check(name) for name in QUANTIZED | UNQUANTIZED)

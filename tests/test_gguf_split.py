"""Sets of shards: what is missing, doubled or foreign is named; what is odd is a warning."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import header, key, tensor, text_key, write

from glm5lab.errors import InputError
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample

ARCH = text_key("general.architecture", "glm-dsa")


def copy_set(sample: Path, folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [Path(shutil.copy(p, folder)) for p in open_gguf(sample).files]


def shard(
    folder: Path,
    index: int,
    names: str,
    total: int | None = 3,
    number: int | None = None,
    count: int = 3,
    architecture: bytes | None = None,
) -> Path:
    """Shard `index` of 3 with a tensor for each letter of `names`."""
    keys = [
        key("split.no", 2, struct.pack("<H", index if number is None else number)),
        key("split.count", 2, struct.pack("<H", count)),
    ]
    if total is not None:
        keys.append(key("split.tensors.count", 5, struct.pack("<i", total)))
    if index == 0 or architecture:
        keys.append(architecture or ARCH)
    infos = [tensor(n, (8,), 0, 32 * i) for i, n in enumerate(names)]
    path = folder / f"m-{index + 1:05d}-of-00003.gguf"
    return write(path, header(keys, infos), b"\0" * 32 * len(names))


def test_missing_shards_are_named(tmp_path: Path, sample_mix: Path) -> None:
    shards = copy_set(sample_mix, tmp_path)
    shards[1].unlink()
    for path in (shards[0], shards[1], tmp_path):
        with pytest.raises(InputError, match=r"1 of its 3 shards is missing: .*-00002-of-00003"):
            open_gguf(path)


def test_a_set_renamed_to_more_shards_misses_none(tmp_path: Path, sample_mix: Path) -> None:
    """The sixth of five was never there: the metadata's number is what is said."""
    for number, shard in enumerate(copy_set(sample_mix, tmp_path), 1):
        shard.rename(tmp_path / f"x-{number:05d}-of-00004.gguf")
    for path in (tmp_path / "x-00002-of-00004.gguf", tmp_path):
        with pytest.raises(InputError, match="says it is shard 1 of 3, its file name says 1 of 4"):
            open_gguf(path)


def test_swapped_and_renamed_shards(tmp_path: Path, sample_mix: Path) -> None:
    shards = copy_set(sample_mix, tmp_path / "swapped")
    shards[1].rename(tmp_path / "x")
    shards[2].rename(shards[1])
    (tmp_path / "x").rename(shards[2])
    with pytest.raises(InputError, match=r"says shard 3 \(split.no 2, counted from 0\)"):
        open_gguf(shards[0])

    shards = copy_set(sample_mix, tmp_path / "renamed")
    alone = shards[1].rename(tmp_path / "model.gguf")
    with pytest.raises(InputError, match="says it is shard 2 of 3, its file name says 1 of 1"):
        open_gguf(alone)


def test_a_shard_twice(tmp_path: Path, sample_mix: Path) -> None:
    shards = copy_set(sample_mix, tmp_path)
    shutil.copy(shards[1], shards[2])
    with pytest.raises(InputError, match=f"the set holds {shards[1].name} twice") as caught:
        open_gguf(shards[0])
    assert caught.value.file == str(shards[2])


def test_a_shard_of_another_model(tmp_path: Path, sample_mix: Path) -> None:
    """Same file names and numbers, but from a set with more layers."""
    shards = copy_set(sample_mix, tmp_path / "set")
    other = write_sample(tmp_path / "mtp", "mtp", "f16", shards=3, metadata_first_shard=True)
    shutil.copy(open_gguf(other).files[2], shards[2])
    with pytest.raises(InputError, match="a shard of another model: it announces") as caught:
        open_gguf(shards[0])
    assert caught.value.file == str(shards[2])


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (
        lambda f: shard(f, 2, "c", architecture=text_key("general.architecture", "llama")),
        "of another model: its architecture is 'llama', that of m-00001-of-00003.gguf is 'glm-dsa'",
    ),
    "tensor of another shard": (
        lambda f: shard(f, 2, "b"),
        r"tensor 'b' occurs in m-00002-of-00003.gguf and m-00003-of-00003.gguf: one of them is",
    ),
    "total": (
        lambda f: shard(f, 2, "cd", total=9),
        r"another model: it announces 9 tensors .* the others 3; there are 4",
    ),
    "count": (lambda f: shard(f, 2, "c", count=5), "says it is shard 3 of 5, its file name says 3"),
    "number": (lambda f: shard(f, 2, "c", number=7), r"says shard 8 \(split.no 7"),
    "text for a number": (
        lambda f: write(f / "m-00003-of-00003.gguf", header([text_key("split.no", "third")], [])),
        "split.no is 'third', not a number of shards",
    ),
    "truth for a number": (
        lambda f: write(f / "m-00003-of-00003.gguf", header([key("split.count", 7, b"\1")], [])),
        "split.count is True, not a number of shards",
    ),
    "byte order": (
        lambda f: (f / "m-00003-of-00003.gguf").write_bytes(
            struct.pack(">4sIQQ", b"GGUF", 3, 0, 0)
        ),
        "of another model: big-endian",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_shards_are_named(tmp_path: Path, name: str) -> None:
    shard(tmp_path, 0, "a")
    shard(tmp_path, 1, "b")
    make, cause = FOREIGN[name]
    make(tmp_path)
    with pytest.raises(InputError, match=cause) as caught:
        open_gguf(tmp_path)
    assert caught.value.file == str(tmp_path / "m-00003-of-00003.gguf")


ODD: dict[str, tuple[list[dict[str, int | None]], list[str]]] = {
    "as llama.cpp writes": ([{}, {}, {}], []),
    "numbers from 1": (
        [{"number": 1}, {"number": 2}, {"number": 3}],
        ["split.no counts from 1; llama.cpp counts from 0"],
    ),
    "count 0": (
        [{"count": 0}, {}, {"count": 0}],
        [
            "split.count is 0 in m-00001-of-00003.gguf, m-00003-of-00003.gguf; "
            "its file name says 3 shards"
        ],
    ),
    "wrong total in one": (
        [{"total": 7}, {}, {}],
        ["split.tensors.count is 7 in m-00001-of-00003.gguf; the set holds 3 tensors"],
    ),
    "wrong total in all": (
        [{"total": 1}] * 3,
        [
            "split.tensors.count is 1 in m-00001-of-00003.gguf, m-00002-of-00003.gguf, "
            "m-00003-of-00003.gguf; the set holds 3 tensors"
        ],
    ),
    "total in the first only": ([{}, {"total": None}, {"total": None}], []),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_numbers_are_warnings(tmp_path: Path, name: str) -> None:
    changes, warnings = ODD[name]
    for index, change in enumerate(changes):
        shard(tmp_path, index, "abc"[index], **change)  # type: ignore[arg-type]
    model = open_gguf(tmp_path)
    assert list(model.tensors) == ["a", "b", "c"]
    assert [t.shard for t in model.tensors.values()] == [0, 1, 2]
    assert model.warnings == warnings


def test_a_single_file_that_was_merged(tmp_path: Path) -> None:
    keys = [ARCH, key("split.no", 2, b"\0\0"), key("split.count", 2, b"\0\0")]
    model = open_gguf(write(tmp_path / "a.gguf", header(keys, [])))
    assert model.warnings == []


def test_samples_open_without_warnings(sample_mix: Path, sample_f32: Path) -> None:
    assert open_gguf(sample_mix).warnings == open_gguf(sample_f32).warnings == []

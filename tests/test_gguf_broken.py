"""Files and paths that cannot be used: each error names the file, the cause and the fix."""

import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import header, key, string, tensor, text_key, write

from glm5lab.errors import InputError
from glm5lab.gguf.reader import open_gguf, require_glm5

ARCH = text_key("general.architecture", "glm-dsa")


def small(tmp_path: Path, data: bytes = b"\0" * 64) -> Path:
    infos = [tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 32)]
    return write(tmp_path / "a.gguf", header([ARCH], infos), data)


NOT_GGUF = {
    "empty": (b"", "the file is empty"),
    "text": (b"hello world, this is no model\n" * 9, "a text file, not GGUF"),
    "html": (b"\n<!DOCTYPE html><html>not found</html>", r"a web page \(HTML\)"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git-lfs pointer"),
    "safetensors": (struct.pack("<Q", 90) + b'{"a":{"dtype":"F32"', "a safetensors file"),
    "zip": (b"PK\3\4" + b"\0\xff" * 40, "ZIP archive"),
    "old": (b"tjgg" + b"\0" * 60, "old format from before GGUF"),
    "bytes": (b"\x7fELF\0\xff" * 30, "does not start with 'GGUF'"),
    "three bytes": (b"GGU", "not GGUF"),
    "magic only": (b"GGUF", "the file ends inside the header"),
    "counts only": (header([], [])[:20], "the file ends inside the header"),
}


@pytest.mark.parametrize("name", NOT_GGUF)
def test_not_gguf_says_what_it_is(tmp_path: Path, name: str) -> None:
    content, cause = NOT_GGUF[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=cause) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


HUGE = 1 << 62
BROKEN: dict[str, tuple[bytes, str]] = {
    "version 1": (header([ARCH], [], version=1), "GGUF version 1; supported are 2, 3"),
    "version 99": (header([ARCH], [], version=99), "GGUF version 99"),
    "many keys": (header([ARCH], [], n_keys=HUGE), f"announces {HUGE} keys"),
    "many tensors": (header([ARCH], [], n_tensors=HUGE), f"announces {HUGE} tensors"),
    "one more tensor": (
        header([ARCH], [tensor("a", (1,), 0, 0)], n_tensors=2),
        "tensor 1 has no name",
    ),
    "long key": (header([struct.pack("<Q", HUGE) + b"x" * 20], []), "inside the name of key 0"),
    "long string": (
        header([ARCH, key("k", 8, struct.pack("<Q", HUGE))], []),
        "inside key 'k'",
    ),
    "long string in array": (
        header([key("k", 9, struct.pack("<IQQ", 8, 1, HUGE))], []),
        "inside key 'k'",
    ),
    "long array": (
        header([key("k", 9, struct.pack("<IQ", 4, HUGE))], []),
        f"key 'k' announces {HUGE} array items",
    ),
    "deep array": (
        header([key("k", 9, struct.pack("<IQ", 9, 1) * 200 + struct.pack("<IQ", 4, 0))], []),
        "nests arrays more than",
    ),
    "value type": (header([key("k", 77, b"\0" * 8)], []), "unknown value type 77"),
    "item type": (
        header([key("k", 9, struct.pack("<IQ", 77, 1))], []),
        "array of unknown type 77",
    ),
    "key twice": (header([ARCH, ARCH], []), "'general.architecture' occurs twice"),
    "alignment": (
        header([key("general.alignment", 4, struct.pack("<I", 33))], []),
        "alignment is 33, not a power of two",
    ),
    "alignment type": (
        header([text_key("general.alignment", "x")], []),
        "alignment is 'x', not a power",
    ),
    "alignment true": (
        header([key("general.alignment", 7, b"\1")], []),
        "alignment is True, not a power",
    ),
    "alignment long": (
        header([text_key("general.alignment", "x" * 5000)], []),
        r"alignment is 'x+ \.\.\. x+', not a power",
    ),
    "five dimensions": (
        header([], [tensor("a", (1, 1, 1, 1, 1), 0, 0)]),
        "'a' has 5 dimensions",
    ),
    "many dimensions": (
        header([], [string("a") + struct.pack("<I", 0xFFFFFFFF) + b"\0" * 64]),
        "'a' has 4294967295 dimensions",
    ),
    "negative size": (header([], [tensor("a", (1 << 63,), 0, 0)]), "impossible dimensions"),
    "overflow": (
        header([], [tensor("a", (1 << 40, 1 << 40), 0, 0)]),
        "impossible dimensions",
    ),
    "too big": (header([], [tensor("a", (1 << 40,), 0, 0)]), "truncated"),
    "bad rows": (
        header([], [tensor("a", (100,), 12, 0)]),
        "type Q4_K has rows of 100, not a multiple .* block of 256",
    ),
    "unaligned": (header([], [tensor("a", (1,), 0, 3)]), "starts at 3, not at a multiple"),
    "offset": (header([], [tensor("a", (1,), 0, 1 << 62)]), "truncated .* 'a'"),
    "offset of unknown type": (
        header([], [tensor("a", (1,), 200, 1 << 62)]),
        "cut is 'a', all of it is missing",
    ),
    "tensor twice": (
        header([], [tensor("a", (1,), 0, 0), tensor("a", (1,), 0, 32)]),
        "tensor 'a' occurs twice in a.gguf",
    ),
    "overlap": (
        header([], [tensor("a", (16,), 0, 0), tensor("b", (1,), 0, 32)]),
        "'a' .* overlaps the next one",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_names_file_cause_and_fix(tmp_path: Path, name: str) -> None:
    head, cause = BROKEN[name]
    path = write(tmp_path / "a.gguf", head, b"\0" * 64)
    start = time.perf_counter()
    with pytest.raises(InputError, match=cause) as caught:
        open_gguf(path)
    assert time.perf_counter() - start < 60  # it does not hang
    assert caught.value.file == str(path)
    assert caught.value.fix


def test_truncated_data_names_the_tensor_and_the_bytes(tmp_path: Path) -> None:
    path = small(tmp_path)
    os.truncate(path, path.stat().st_size - 40)  # all of b and 8 bytes of a
    with pytest.raises(InputError, match="first tensor that is cut is 'a', 8 of its 32 bytes"):
        open_gguf(path)
    path = small(tmp_path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(InputError, match="cut is 'b', 4 of its 32 bytes are missing"):
        open_gguf(path)


def test_every_truncation_and_random_damage_is_an_input_error(
    tmp_path: Path, sample_mix: Path
) -> None:
    """No struct.error, MemoryError, RecursionError or hang, whatever the bytes."""
    whole = sample_mix.read_bytes()
    path = tmp_path / "a.gguf"
    rng = random.Random(0)
    for size in range(0, len(whole) - 31, 97):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError):
            open_gguf(path)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(len(whole) - 8)
            damaged[at : at + 8] = rng.choice(
                (b"\xff" * 8, rng.randbytes(8), struct.pack("<Q", HUGE))
            )
        path.write_bytes(damaged)
        try:
            open_gguf(path)
        except InputError:
            continue


# ------------------------------------------------------------------------------ paths


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no .gguf file; name a .gguf file"):
        open_gguf(tmp_path)
    (tmp_path / "Q4_K_M").mkdir()
    small(tmp_path / "Q4_K_M")
    with pytest.raises(InputError, match="name one of its subfolders that do: Q4_K_M"):
        open_gguf(tmp_path)
    path = small(tmp_path)
    assert open_gguf(tmp_path).path == path
    shutil.copy(path, tmp_path / "mmproj-F16.gguf")
    with pytest.raises(InputError, match=r"holds 2 models: a.gguf, mmproj-F16.gguf"):
        open_gguf(tmp_path)


def broken_link(folder: Path) -> Path:
    link = folder / "link.gguf"
    link.symlink_to("gone.gguf")
    return link


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.gguf")
    return folder / "pipe.gguf"


PATHS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absent": (lambda folder: folder / "none.gguf", "no such file or folder"),
    "file as folder": (lambda folder: small(folder) / "b.gguf", "Not a directory"),
    "broken link": (broken_link, "a link to gone.gguf, which is not there"),
    "pipe": (pipe, "not a regular file"),
    "shard 0": (lambda folder: small(folder).rename(folder / "a-00000-of-00002.gguf"), "cannot be"),
    "absent shard": (lambda folder: folder / "a-00001-of-00002.gguf", "no such file"),
    "long name": (lambda folder: folder / ("x" * 300), "cannot be read: File name too long"),
}


@pytest.mark.parametrize("name", PATHS)
def test_unusable_path(tmp_path: Path, name: str) -> None:
    make, cause = PATHS[name]
    with pytest.raises(InputError, match=cause):
        open_gguf(make(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file(tmp_path: Path) -> None:
    path = small(tmp_path)
    path.chmod(0)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        open_gguf(path)


def test_other_architecture(tmp_path: Path) -> None:
    for name in ("llama", "clip"):
        head = header([text_key("general.architecture", name)], [])
        model = open_gguf(write(tmp_path / "a.gguf", head))
        with pytest.raises(InputError, match=f"architecture '{name}'; glm5lab runs 'glm-dsa'"):
            require_glm5(model)
    with pytest.raises(InputError, match="none named in the metadata"):
        require_glm5(open_gguf(write(tmp_path / "a.gguf", header([], []))))


# ------------------------------------------------------------------------------ size


def many(kind: int, count: int, item: bytes) -> bytes:
    return key("k", 9, struct.pack("<IQ", kind, count) + item * count)


EMPTY_ARRAY = struct.pack("<IQ", 4, 0)
LARGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "nested": (
        lambda: header([many(9, 70_000, EMPTY_ARRAY)], []),
        "'k' has 70000 arrays in arrays so far, above the limit of 65536",
    ),
    "nested twice": (
        lambda: header([many(9, 300, struct.pack("<IQ", 9, 300) + EMPTY_ARRAY * 300)], []),
        "arrays in arrays so far, above the limit of 65536",
    ),
    "strings": (
        lambda: header([many(8, 2_200_000, b"\0" * 8)], []),
        "has 2200000 items, above the limit of 2097152",
    ),
    "keys": (
        lambda: header([text_key(f"k{i}", "") for i in range(70_000)], []),
        "announces 70000 keys, above the limit of 65536",
    ),
    "tensors": (
        lambda: header([], [tensor(f"t{i}", (1,), 0, 0) for i in range(70_000)]),
        "announces 70000 tensors, above the limit of 65536",
    ),
    "name": (
        lambda: header([], [tensor("t" * 70_000, (1,), 0, 0)]),
        "tensor 0 holds a string of 70000 bytes",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_headers_that_only_cost_time_end_at_a_limit(tmp_path: Path, name: str) -> None:
    make, cause = LARGE[name]
    path = write(tmp_path / "a.gguf", make())
    start = time.process_time()
    with pytest.raises(InputError, match=cause) as caught:
        open_gguf(path)
    assert time.process_time() - start < 5  # below 0.1 s each on an idle core
    assert len(str(caught.value)) < 5000


def test_just_below_the_limits_all_is_read(tmp_path: Path) -> None:
    keys = [ARCH, *(text_key(f"k{i}", "") for i in range(30_000)), many(8, 1_000_000, b"\0" * 8)]
    infos = [tensor(f"t{i}", (1,), 0, 32 * i) for i in range(30_000)]
    path = write(tmp_path / "a.gguf", header(keys, infos), b"\0" * 32 * len(infos))
    model = open_gguf(path)
    assert len(model.table()) == 30_000
    assert model.metadata["k"] == [""] * 1_000_000

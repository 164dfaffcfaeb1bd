"""Sets of a thousand files, as some are published: few open files, few bytes, few requests."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_bytes import header, tensor, text_key, write
from http_server import hub, serving

from glm5lab.errors import InputError
from glm5lab.gguf import reader
from glm5lab.gguf.reader import open_gguf

SHARDS = 1100
ARCH = text_key("general.architecture", "glm-dsa")


def name(number: int, total: int = SHARDS) -> str:
    return f"m-{number:05d}-of-{total:05d}.gguf"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor a shard, and data behind it that a careless reader would fetch."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(1, SHARDS + 1):
        keys = [ARCH] if number == 1 else []
        head = header(keys, [tensor(f"t{number}", (1 << 16,), 0, 0)])
        path = write(folder / name(number), head, number.to_bytes(4, "little"))
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 4 + (4 << 16))
    return folder


@pytest.fixture
def _few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_few_files")
def test_local(many: Path) -> None:
    model = open_gguf(many)
    assert list(model.tensors) == [f"t{n}" for n in range(1, SHARDS + 1)]
    for number in (*range(1, SHARDS + 1), 1):
        assert int.from_bytes(model.raw(f"t{number}")[:4].tobytes(), "little") == number
    assert len(model._maps) == reader.MAX_MAPS


@pytest.mark.usefixtures("_few_files")
@pytest.mark.parametrize("ranges", [True, False])
def test_remote(many: Path, ranges: bool) -> None:
    with serving(many, ranges=ranges) as server:
        model = open_gguf(f"{server.url}/{name(7)}")
    assert len(model.tensors) == SHARDS
    assert len(server.requests) == SHARDS
    if ranges:
        assert server.connections == 1
        assert server.sent <= (1 << 18) + SHARDS * (1 << 14)


def test_a_folder_of_the_hub_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list says so: no shard is asked for."""
    (tmp_path / "Q4").mkdir()
    for number in (1, 3):
        write(tmp_path / "Q4" / name(number, 3), header([ARCH], []))
    with serving(tmp_path, answer=hub(tmp_path, "o/r")) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(InputError, match=r"1 of its 3 shards is missing: m-00002-of-00003"):
            open_gguf("hf://o/r/Q4")
        assert [path for path, _ in server.requests if "/api/" not in path] == []


def test_a_name_that_claims_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server's list, a server's file, or of a file here."""
    listing = json.dumps([{"type": "file", "path": name(1, 99_999)}]).encode()
    message = r"its name says 99999 shards, above the limit of 4096"
    with serving(tmp_path, answer=lambda *_: (200, {}, listing)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for url in ("hf://o/r", f"{server.url}/{name(1, 99_999)}"):
            with pytest.raises(InputError, match=message):
                open_gguf(url)
    assert len(server.requests) == 1
    write(tmp_path / name(1, 99_999), header([ARCH], []))
    with pytest.raises(InputError, match=message):
        open_gguf(tmp_path)


def test_many_missing_shards_are_not_all_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with pytest.raises(InputError, match="404 for the first 16 of 4000 shards; check the add"):
            open_gguf(f"{server.url}/{name(1, 4000)}")
        assert len(server.requests) == 16
        for number in range(1, 10):
            write(tmp_path / name(number, 4000), header([ARCH], []))
        with pytest.raises(InputError, match=r"16 of its 4000 shards are missing \(404, of the fi"):
            open_gguf(f"{server.url}/{name(1, 4000)}")
        assert len(server.requests) == 16 + 25

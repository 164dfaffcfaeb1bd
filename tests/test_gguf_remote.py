"""Remote files: the table is the local file's, only headers travel, every failure has a name."""

import socket
import time
from pathlib import Path

import pytest
from gguf_bytes import header, tensor, text_key, write
from http_server import serving
from processes import wait_for

from glm5lab.errors import InputError
from glm5lab.gguf import http
from glm5lab.gguf.reader import open_gguf


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.0)


def big_file(folder: Path, data_bytes: int = 32 << 20) -> Path:
    """A file with a small header and a large, sparse rest."""
    n = data_bytes // 4
    keys = [text_key("general.architecture", "glm-dsa"), text_key("general.name", "big")]
    path = write(folder / "big.gguf", header(keys, [tensor("a.weight", (n,), 0, 0)]))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + data_bytes)
    return path


def assert_same(model, local):
    assert model.metadata == local.metadata
    assert [(t.name, t.shape, t.type, t.offset, t.shard) for t in model.tensors.values()] == [
        (t.name, t.shape, t.type, t.offset, t.shard) for t in local.tensors.values()
    ]
    assert [p.name for p in model.shards] == [p.name for p in local.shards]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("threads", [True, False], ids=["threads", "one-connection"])
def test_any_shard_of_a_set(sample_mix, ranges, threads):
    second = sample_mix.name.replace("00001", "00002")
    with serving(sample_mix.parent, ranges=ranges, threads=threads) as server:
        model = open_gguf(f"{server.url}/{second}")
    assert_same(model, open_gguf(sample_mix))
    assert str(model.path) == f"{server.url}/{sample_mix.name}"
    with pytest.raises(InputError, match=r"only its header is read.*download it first"):
        model.raw(next(iter(model.tensors)))


@pytest.mark.parametrize("ranges", [True, False])
def test_only_the_header_travels(tmp_path, ranges):
    path = big_file(tmp_path)
    with serving(tmp_path, ranges=ranges) as server:
        model = open_gguf(f"{server.url}/{path.name}")
    assert model.nbytes == 32 << 20
    # What no range stops still fills the sockets' buffers before the connection is cut.
    assert server.sent <= (1 << 18 if ranges else 16 << 20)
    if ranges:
        assert [h["range"] for _, h in server.requests] == ["bytes=0-262143"]


def test_one_connection_for_all_shards(sample_mix):
    with serving(sample_mix.parent) as server:
        open_gguf(f"{server.url}/{sample_mix.name}")
    assert len(server.requests) == 3
    assert server.connections == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_connections_are_resumed(tmp_path, ranges):
    text = "x" * 3_000_000
    path = write(tmp_path / "long.gguf", header([text_key("general.name", text)], []))
    # From a server without ranges everything comes again, so it has to get through once.
    with serving(tmp_path, ranges=ranges, cut_after=600_000, cuts=99 if ranges else 2) as server:
        assert open_gguf(f"{server.url}/{path.name}").metadata["general.name"] == text
    assert len(server.requests) >= 3


def test_a_connection_that_always_breaks_is_given_up(tmp_path):
    path = big_file(tmp_path)  # 4 attempts bring 10 bytes each
    with (
        serving(tmp_path, cut_after=10) as server,
        pytest.raises(InputError, match=r"262104 bytes too early \(4 attempts\); try again"),
    ):
        open_gguf(f"{server.url}/{path.name}")
    assert len(server.requests) == 4


def test_header_limit(tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf", header([text_key("general.name", "x" * 3_000_000)], []))
    monkeypatch.setenv("GLM5LAB_HEADER_LIMIT", "2")
    with serving(tmp_path) as server:
        with pytest.raises(InputError, match=r"longer than 2 MiB.*GLM5LAB_HEADER_LIMIT"):
            open_gguf(f"{server.url}/{path.name}")
        assert server.sent <= 2 << 20
        monkeypatch.setenv("GLM5LAB_HEADER_LIMIT", "2.9")
        assert len(open_gguf(f"{server.url}/{path.name}").metadata["general.name"]) == 3_000_000
        for text in ("much", "1e-7", "0", "-1", "nan", "inf", "1e9"):
            monkeypatch.setenv("GLM5LAB_HEADER_LIMIT", text)
            with pytest.raises(InputError, match=rf"'{text}' is no number of MiB from 0\.001"):
                open_gguf(f"{server.url}/{path.name}")


def test_no_answer(monkeypatch):
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(InputError, match=r"no answer in time \(4 attempts\)"):
            open_gguf(f"http://127.0.0.1:{port}/a.gguf")


def test_a_dribbling_server_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "SLOW_S", 0.3)
    monkeypatch.setattr(http, "ATTEMPTS", 1)
    path = big_file(tmp_path)
    with (
        serving(tmp_path, dribble_s=0.02) as server,
        pytest.raises(InputError, match=r"it sent \d+ bytes in 0 s"),
    ):
        open_gguf(f"{server.url}/{path.name}")


@pytest.mark.parametrize("close", [True, False], ids=["close", "keep"])
@pytest.mark.parametrize(
    "kind", ["headers", "not found", "redirect", "redirects", "chunk length", "endless headers"]
)
def test_every_answer_has_an_end(tmp_path, monkeypatch, kind, close):
    """Byte by byte, each in time, but never done: headers, bodies of refusals, chunks' lengths."""
    monkeypatch.setattr(http, "ANSWER_S", 1.0)
    monkeypatch.setattr(http, "SLOW_S", 1.0)
    monkeypatch.setattr(http, "ATTEMPTS", 1)
    end = {"Connection": "close"} if close else {}
    chunks = {"Transfer-Encoding": "chunked", "Content-Range": "bytes 0-262143/400000"}
    status, headers = {
        "headers": (200, {"X-Long": "x" * 3000}),
        "endless headers": (200, {f"X-{i}": "x" * 3000 for i in range(99)}),
        "not found": (404, {}),
        "redirect": (302, {"Location": "/b.gguf"}),
        "redirects": (302, {"Location": "/a.gguf"}),
        "chunk length": (206, chunks),
    }[kind]
    head = "headers" in kind
    pause = 0.2 if kind == "redirects" else 0.02
    body = b"" if kind == "redirects" else b"0" * 60_000
    answer = (status, headers | end, body)
    start = time.monotonic()
    with (
        serving(
            tmp_path,
            answer=lambda path, _: answer if path == "/a.gguf" else None,
            dribble_s=0 if kind == "redirects" else pause,
            latency_s=pause if kind == "redirects" else 0,
            dribble_head=head,
        ) as server,
        pytest.raises(InputError, match="404" if kind == "not found" else "no answer in time"),
    ):
        open_gguf(f"{server.url}/a.gguf")
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("status", "message", "attempts"),
    [
        (404, r"the server answers 404 .*; check the address", 1),
        (401, r"answers 401 .*; check that the address is open to you", 1),
        (403, r"answers 403 .*signed address may have run out", 1),
        (410, "answers 410", 1),
        (429, r"answers 429 .*\(4 attempts\)", 4),
        (503, r"answers 503 .*\(4 attempts\); try again", 4),
        (204, "answers 204", 1),
    ],
)
def test_statuses(tmp_path, status, message, attempts):
    with (
        serving(tmp_path, answer=lambda *_: (status, {}, b"")) as server,
        pytest.raises(InputError, match=message),
    ):
        open_gguf(f"{server.url}/a.gguf")
    assert len(server.requests) == attempts


def test_a_passing_failure_passes(sample_f32):
    failures = [500, 502, 429]

    def answer(*_):
        return (failures.pop(), {"Retry-After": "0"}, b"") if failures else None

    with serving(sample_f32.parent, answer=answer) as server:
        assert_same(open_gguf(f"{server.url}/{sample_f32.name}"), open_gguf(sample_f32))


def test_web_pages(tmp_path, monkeypatch):
    page = (200, {"Content-Type": "text/html"}, b"<!DOCTYPE html><html>login</html>")
    with serving(tmp_path, answer=lambda *_: page) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for path, fix in (
            ("o/r/blob/main/a.gguf", f"replace /blob/ by /resolve/: {server.url}/o/r/resolve/main"),
            ("o/r/tree/main/Q4", "name the repository or folder as hf://o/r/Q4"),
            ("a/b/c/d/", "folders are listed as hf://OWNER/REPO/FOLDER only"),
            ("o/r", "as hf://o/r$"),
            ("a.gguf", "name the address of the file itself"),
        ):
            with pytest.raises(InputError, match=rf"a web page \(HTML\).*{fix}"):
                open_gguf(f"{server.url}/{path}")


def test_odd_servers(tmp_path):
    path = big_file(tmp_path)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "short.gguf").write_bytes(path.read_bytes()[:1000])
    with (
        serving(tmp_path, ranges=False, length=False) as server,
        pytest.raises(InputError, match="does not say how long the file is"),
    ):
        open_gguf(f"{server.url}/{path.name}")
    with serving(tmp_path) as server:
        with pytest.raises(InputError, match="the file is empty"):
            open_gguf(f"{server.url}/empty.gguf")
        with pytest.raises(InputError, match=r"truncated at 1000 bytes.*'a.weight'"):
            open_gguf(f"{server.url}/short.gguf")
        assert open_gguf(f"{server.url}/short.gguf", header_only=True).tensors.keys() == {
            "a.weight"
        }
    wrong = (206, {"Content-Range": "bytes 7-9/1000"}, b"abc")
    with (
        serving(tmp_path, answer=lambda *_: wrong) as server,
        pytest.raises(InputError, match="sends bytes from 7 on, asked was for 0"),
    ):
        open_gguf(f"{server.url}/a.gguf")
    nothing = (206, {"Content-Range": "bytes 0--5/1000"}, b"")
    backwards = (206, {"Content-Range": "bytes 0-0/1000"}, b"")
    for answer, message in ((nothing, "how long the file is"), (backwards, "too early")):
        with (
            serving(tmp_path, answer=lambda *_, answer=answer: answer) as server,
            pytest.raises(InputError, match=message),
        ):
            open_gguf(f"{server.url}/a.gguf")
    zipped = (200, {"Content-Encoding": "gzip"}, b"abc")
    with (
        serving(tmp_path, answer=lambda *_: zipped) as server,
        pytest.raises(InputError, match="compressed"),
    ):
        open_gguf(f"{server.url}/a.gguf")


def test_short_answers(tmp_path):
    """A server may send less than asked for, but not crumbs."""
    path = write(tmp_path / "a.gguf", header([text_key("general.name", "x" * 400_000)], []))
    data = path.read_bytes()

    def answer(path, headers):
        start = int(headers["Range"][6:].split("-")[0])
        part = data[start : start + most]
        return 206, {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}, part

    for most in (100_000, 1):
        with serving(tmp_path, answer=answer) as server:
            if most > 1:
                assert len(open_gguf(f"{server.url}/a.gguf").metadata["general.name"]) == 400_000
                continue
            with pytest.raises(InputError, match=r"less than it was asked for \(4 attempts\)"):
                open_gguf(f"{server.url}/a.gguf")


@pytest.mark.parametrize("ranges", [True, False])
def test_no_connection_stays_open(tmp_path, ranges):
    path = big_file(tmp_path)
    with serving(tmp_path, ranges=ranges) as server:
        model = open_gguf(f"{server.url}/{path.name}")
        assert wait_for(lambda: server.open == 0, 10)
        with pytest.raises(InputError) as caught:
            open_gguf(f"{server.url}/none.gguf")
        assert wait_for(lambda: server.open == 0, 10)
    assert (len(model.tensors), server.connections) == (1, 2)
    del caught


def test_a_file_that_changes_meanwhile(tmp_path):
    path = write(tmp_path / "a.gguf", header([text_key("general.name", "x" * 1_000_000)], []))
    with (
        serving(tmp_path, etag=lambda n: f'"{n}"') as server,
        pytest.raises(InputError, match="changed while it was being read"),
    ):
        open_gguf(f"{server.url}/{path.name}")


def test_missing_shards_are_named(sample_mix, tmp_path):
    for shard in sample_mix.parent.glob("*.gguf"):
        if "00002" not in shard.name:
            (tmp_path / shard.name).symlink_to(shard)
    second = sample_mix.name.replace("00001", "00002")
    with serving(tmp_path) as server:
        with pytest.raises(InputError, match=rf"1 of its 3 shards is missing \(404\): {second}"):
            open_gguf(f"{server.url}/{sample_mix.name}")
        with pytest.raises(InputError, match="404 for all 2 shards; check the address"):
            open_gguf(f"{server.url}/other-00001-of-00002.gguf")

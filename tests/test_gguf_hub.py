"""Files on the Hugging Face Hub (a local stand-in): names, folders, and where the token goes."""

import os
import re
import shutil
import ssl
import subprocess
import sys
import termios

import pytest
from gguf_bytes import header, text_key, write
from http_server import hub, serving

from glm5lab.__main__ import main
from glm5lab.errors import InputError
from glm5lab.gguf import http
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.url import HubPath

CPU = ["--device", "cpu"]
PLAN = ["plan", "--gpus", "1", "--gpu-memory", "24"]
TOKEN = "hf_secretsecretsecret"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def repository(tmp_path, sample_mix, sample_f32, monkeypatch):
    """A Hub with `o/r`: a set in Q4, one file in F32, and things that are no models."""
    folder = tmp_path / "repository"
    shutil.copytree(sample_mix.parent, folder / "Q4", ignore=shutil.ignore_patterns("hf"))
    (folder / "F32").mkdir()
    shutil.copy(sample_f32, folder / "F32" / "model.gguf")
    (folder / "README.md").write_text("no model")
    with serving(folder, answer=hub(folder, "o/r")) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
        yield server


def authorizations(server) -> list[str]:
    return [headers.get("authorization", "") for _, headers in server.requests]


def test_a_shard_by_name(repository, sample_mix):
    model = open_gguf(f"hf://o/r/Q4/{sample_mix.name}")
    assert len(model.shards) == 3
    assert model.tensors.keys() == open_gguf(sample_mix).tensors.keys()
    assert str(model.path) == f"hf://o/r/Q4/{sample_mix.name}"
    paths = [path for path, _ in repository.requests]
    assert paths[:2] == [
        f"/o/r/resolve/main/Q4/{sample_mix.name}",
        f"/Q4/{sample_mix.name}?signed=1",
    ]


def test_revisions(repository, sample_mix):
    open_gguf(f"hf://o/r@v1/Q4/{sample_mix.name}")
    model = open_gguf(f"hf://o/r/Q4/{sample_mix.name}@v2")
    asked = {path.split("/")[4] for path, _ in repository.requests if "/resolve/" in path}
    assert asked == {"v1", "v2"}
    assert [str(p) for p in model.shards][2].endswith("-00003-of-00003.gguf@v2")


def test_addresses_are_those_of_huggingface_hub(repository, monkeypatch):
    """Its own library builds the same addresses, and reads the same list from the stand-in."""
    library = pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("HF_ENDPOINT")
    for path, revision in (("a b/x#1.gguf", "main"), ("x.gguf", "refs/pr/3"), ("é?.gguf", "v1")):
        expected = library.hf_hub_url("o/r", path, revision=revision)
        assert HubPath("o/r", path, revision).file().url == expected
    monkeypatch.setenv("HF_ENDPOINT", repository.url)
    tree = library.HfApi(endpoint=repository.url).list_repo_tree("o/r", "Q4", recursive=True)
    listed = [file.path for file in tree]
    theirs = [path for path, _ in repository.requests]
    assert sum(path.endswith(".gguf") for path in listed) == 3
    repository.requests.clear()
    open_gguf("hf://o/r/Q4")
    ours = [path for path, _ in repository.requests if "/api/" in path]
    strip = [re.sub(r"[?&]expand=\w+|&?recursive=\w+", "", path) for path in theirs + ours]
    assert strip[: len(theirs)] == strip[len(theirs) :]


def test_folders(repository, sample_mix):
    assert len(open_gguf("hf://o/r/Q4").shards) == 3
    assert open_gguf("hf://o/r/F32/").path.name == "model.gguf"
    first = sample_mix.name.replace("-00001-of-00003", "-*-of-00003")
    with pytest.raises(InputError) as caught:
        open_gguf("hf://o/r")
    assert caught.value.cause == f"the folder holds 2 models: F32/model.gguf, Q4/{first}"
    assert caught.value.fix == "name one of them, e.g. hf://o/r/F32/model.gguf"
    with pytest.raises(InputError, match=r"hf://o/r/Q9: the folder holds no \.gguf file"):
        open_gguf("hf://o/r/Q9")
    with pytest.raises(InputError, match=r"hf://o/none: the server answers 404"):
        open_gguf("hf://o/none")
    assert len(repository.requests) > 10  # the list came in pages


def test_a_list_that_is_none(tmp_path, monkeypatch):
    for body in (b"{}", b"[1]", b"no", b"[" * 100_000, b'[{"type": "file"}]'):
        with serving(tmp_path, answer=lambda *_, body=body: (200, {}, body)) as server:
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            with pytest.raises(InputError, match="list of files is not what the Hub's is"):
                open_gguf("hf://o/r")


@pytest.mark.parametrize(
    "url", ["hf://o/r/F32/model.gguf", "{hub}/o/r/resolve/main/F32/model.gguf"]
)
def test_the_token_goes_to_the_hub_only(repository, url, monkeypatch, sample_f32):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(sample_f32.parent) as store:
        inner = repository.answer
        target = {"Location": f"{store.url}/{sample_f32.name}?signature=xyz"}
        repository.answer = lambda p, h: (302, target, b"") if "/resolve/" in p else inner(p, h)
        model = open_gguf(url.format(hub=repository.url))
    assert model.tensors
    assert authorizations(repository) == [f"Bearer {TOKEN}"]
    assert set(authorizations(store)) == {""}


def test_the_token_stays_at_home(sample_f32, repository, monkeypatch, tmp_path):
    """Another server, which even sends back to the Hub, and a netrc file with a password."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    back = {"Location": f"{repository.url}/F32/model.gguf"}
    with serving(tmp_path, answer=lambda *_: (307, back, b"")) as other:
        assert open_gguf(f"{other.url}/x.gguf").tensors
    assert set(authorizations(other) + authorizations(repository)) == {""}


def test_passwords_in_urls(sample_f32):
    with serving(sample_f32.parent) as server:
        open_gguf(server.url.replace("://", "://me:pass@") + f"/{sample_f32.name}?key=secret")
        assert set(authorizations(server)) == {"Basic bWU6cGFzcw=="}
        with pytest.raises(InputError) as caught:
            open_gguf(server.url.replace("://", "://me:pass@") + "/none.gguf?key=secret")
    assert "pass" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_gated_files(repository, monkeypatch):
    message = "Access to model o/r is restricted.\nLog in"
    repository.answer = lambda *_: (401, {"X-Error-Message": message.replace("\n", " ")}, b"")
    with pytest.raises(InputError, match=r"answers 401 Access to model o/r.* set HF_TOKEN"):
        open_gguf("hf://o/r/F32/model.gguf")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(InputError, match=r"accept the model's terms on its page") as caught:
        open_gguf("hf://o/r/F32/model.gguf")
    assert TOKEN not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "two\nlines")
    with pytest.raises(InputError, match="HF_TOKEN: is no token") as caught:
        open_gguf("hf://o/r/F32/model.gguf")
    assert "lines" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("file:///etc/passwd", "redirects to 'file:///etc/passwd', which is no web address"),
        ("http://[::1/x", "which is no web address"),
        ("/again", "more than 10 redirects"),
    ],
)
def test_redirects_that_lead_nowhere(tmp_path, target, message):
    with (
        serving(tmp_path, answer=lambda *_: (302, {"Location": target}, b"")) as server,
        pytest.raises(InputError, match=message),
    ):
        open_gguf(f"{server.url}/a.gguf")


@pytest.mark.parametrize("status", [302, 404, 503])
def test_long_bodies_of_other_answers_are_not_read(tmp_path, status):
    answer = (status, {"Location": "/none.gguf"}, bytes(64 << 20))
    with serving(tmp_path, answer=lambda path, _: answer if path == "/a.gguf" else None) as server:
        with pytest.raises(InputError, match=r"404|503"):
            open_gguf(f"{server.url}/a.gguf")
        assert server.sent < 4 * (8 << 20)


def test_an_address_that_runs_out_is_asked_for_again(tmp_path, monkeypatch):
    write(tmp_path / "a.gguf", header([text_key("general.name", "x" * 900_000)], []))
    tickets = iter(range(99))

    def answer(path, headers):
        if path.startswith("/a.gguf"):
            old = sum(p == path for p, _ in server.requests) > 1
            return (403, {}, b"") if old else None
        return 302, {"Location": f"/a.gguf?ticket={next(tickets)}"}, b""

    with serving(tmp_path, answer=answer) as server:
        model = open_gguf(f"{server.url}/file")
    assert len(model.metadata["general.name"]) == 900_000
    assert next(tickets) == 2  # one for the first part, one for the rest


def test_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for url in ("hf://o/r/a.gguf", "hf://o/r"):
        with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
            open_gguf(url)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "mirror")
    with pytest.raises(InputError, match="HF_ENDPOINT: 'mirror' is no URL"):
        open_gguf("hf://o/r")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(sample_f32, tmp_path, monkeypatch):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(sample_f32.parent, tls=context) as server:
        url = f"{server.url}/{sample_f32.name}"
        with pytest.raises(InputError, match=r"certificate is not accepted: self.signed"):
            open_gguf(url)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        assert open_gguf(url).tensors
    with serving(sample_f32.parent) as server, pytest.raises(InputError, match="no TLS conn"):
        open_gguf(server.url.replace("http:", "https:") + "/a.gguf")


def test_proxies_are_used(sample_f32, monkeypatch):
    with serving(sample_f32.parent) as proxy:
        proxy.answer = lambda path, _: (302, {"Location": f"{proxy.url}/{sample_f32.name}"}, b"")
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(InputError, match="more than 10 redirects"):
            open_gguf("http://models.invalid/a.gguf")
    assert proxy.requests[0][0] == "http://models.invalid/a.gguf"


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["map", *CPU], ["map", *CPU, "--json"], PLAN, [*PLAN, "--json"]],
)
def test_commands_read_urls(repository, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "hf://o/r/Q4"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert ("tokens" if arguments[0] == "plan" else "ffn_down_exps") in out


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_terminals_only(repository, terminal):
    theirs, ours = os.openpty() if terminal else os.pipe()
    os.set_blocking(theirs, False)
    if terminal:
        termios.tcsetwinsize(ours, (40, 100))
    command = [sys.executable, "-m", "glm5lab", "inspect", "hf://o/r/Q4"]
    environment = {**os.environ, "TERM": "xterm"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=ours, env=environment)
    try:
        shown = os.read(theirs, 1 << 16)
    except BlockingIOError:
        shown = b""
    os.close(ours)
    os.close(theirs)
    assert (b"header 1 of 3" in shown) == terminal
    assert terminal or shown == b""


@pytest.mark.parametrize("ranges", [True, False])
def test_a_whole_glm5(tmp_path, ranges):
    """455 GB in 11 shards, of which the headers travel."""
    first = write_layout(read_layouts()["glm-5-q4_k_m"], tmp_path)
    with serving(tmp_path, ranges=ranges) as server:
        model = open_gguf(f"{server.url}/{first.name}")
    assert model.nbytes > 400e9
    assert (len(model.shards), len(model.tensors)) == (11, 1809)
    assert server.sent < 64 << 20

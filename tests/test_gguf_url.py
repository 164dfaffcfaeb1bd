"""Names of remote files: what they mean, what is refused, and where URLs have no business."""

import subprocess
import sys
from pathlib import Path

import pytest

from glm5lab.__main__ import main
from glm5lab.errors import InputError
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.url import HubPath, RemoteFile, is_url, local_path, parse_url


def web_file(url: str | Path) -> RemoteFile:
    place = parse_url(url)
    assert isinstance(place, RemoteFile)
    return place


def hub_path(url: str) -> HubPath:
    place = parse_url(url)
    assert isinstance(place, HubPath)
    return place


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/a.gguf", r"127.0.0.1:1/a.gguf: the connection is refused; check"),
        ("http://no-such-host.invalid/a.gguf", "no such host"),
        ("ftp://example.org/a.gguf", "ftp:// is not supported; use https:// or hf://"),
        ("file:///tmp/a.gguf", "name the path itself"),
        ("https:///a.gguf", "no host"),
        ("https://host:99999/a.gguf", "not a URL"),
        ("https://[1/a.gguf", "not a URL"),
        ("https://ho st/a.gguf", "not a URL"),
        ("hf://owner", r"not a file on the Hub; write hf://OWNER"),
        ("hf://owner/../../x.gguf", "not a file on the Hub"),
        ("hf://ow%ner/repo/x.gguf", "no repository name"),
        ("https://h/\udcff.gguf", "https://h/\ufffd.gguf: not a URL: it is not UTF-8; write"),
        ("https://h/a.gguf?\udcff", "https://h/a.gguf: not a URL"),
        ("https://\udcff/a.gguf", "not a URL"),
        ("hf://owner/repo/\udcff.gguf", "not a file on the Hub"),
    ],
)
def test_unusable_urls(url, message):
    with pytest.raises(InputError, match=message):
        open_gguf(url)


def test_names_of_urls():
    assert is_url("https://host/a.gguf")
    assert is_url(Path("https://host/a.gguf"))
    assert is_url("hf://owner/repo")
    assert not is_url("folder/https/a.gguf")
    assert not is_url("/a:b/c.gguf")
    secret = web_file("https://me:pass@host:8443/x/a b.gguf?key=secret#frag")
    assert secret.name == "https://host:8443/x/a b.gguf"
    assert secret.url == "https://host:8443/x/a%20b.gguf?key=secret"
    assert secret.authorization == "Basic bWU6cGFzcw=="
    assert "pass" not in repr(secret)
    assert web_file(Path("https://host/a.gguf")).url == "https://host/a.gguf"
    assert secret.sister("b.gguf").url == "https://host:8443/x/b.gguf?key=secret"
    for text in ("hf://o/r@v1/Q4/x.gguf", "hf://o/r/Q4/x.gguf@v1"):
        place = hub_path(text)
        assert (place.repo, place.path, place.revision) == ("o/r", "Q4/x.gguf", "v1")
        assert place.file().url == "https://huggingface.co/o/r/resolve/v1/Q4/x.gguf"
        assert place.file().sister("y.gguf").name == "hf://o/r/Q4/y.gguf@v1"
    assert hub_path("hf://o/r/x@v1.gguf").path == "x@v1.gguf"
    with pytest.raises(InputError, match=r"hf://o/r/x.gguf: is a URL; serve needs.*download it"):
        local_path("hf://o/r/x.gguf", "serve")


@pytest.mark.parametrize("value", ["https://host:port", "https://[1", "https://h/\udcff", "hub"])
def test_unusable_endpoints(value, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", value)
    for url in ("hf://o/r/a.gguf", "https://host.invalid/a.gguf"):
        with pytest.raises(InputError, match=r"HF_ENDPOINT: .* is no URL; unset it"):
            open_gguf(url)


@pytest.mark.parametrize("command", ["prepare", "check", "serve", "demo"])
@pytest.mark.parametrize("url", ["hf://o/r/a.gguf", "https://host.invalid/a.gguf"])
def test_commands_that_need_the_weights_refuse_urls(command, url, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, url])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"glm5lab: {url}: is a URL; ")
    assert "download it first" in err


def test_importing_needs_no_network_library():
    code = "import glm5lab.gguf.remote, sys; sys.exit('requests' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)

"""Layer 5 without an engine: the leash, the first error of a log, the client's errors, the port."""

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from processes import mark, marked, wait_for

from glm5lab.errors import InputError
from glm5lab.serving import command as serving
from glm5lab.serving.client import Client, ClientError
from glm5lab.serving.process import LoggedProcess, first_error

# A program with a child of its own, as an engine has; "deaf" ignores every polite signal.
FAMILY = {
    "obedient": "sleep 300 & echo started; wait",
    "deaf": "trap '' INT TERM; sleep 300 & echo started; while :; do sleep 1; done",
}
OWNER = """
import sys, time
from pathlib import Path
from glm5lab.serving.process import LoggedProcess
with LoggedProcess(["bash", "-c", sys.argv[1]], Path(sys.argv[2]), echo=print) as child:
    while True: time.sleep(1)
"""


@pytest.mark.parametrize("kind", FAMILY)
def test_stop_ends_the_whole_family(tmp_path, kind):
    marker = mark()
    with LoggedProcess(["bash", "-c", FAMILY[kind]], tmp_path / "log", marker) as child:
        assert wait_for(lambda: "started" in child.lines, 20)
        assert len(marked(marker)) >= 3  # the leash, the program, its child
        child.stop(patience_s=0.5)
        assert not marked(marker)
        child.stop()  # harmless to repeat
    assert (tmp_path / "log").read_text() == "started\n"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_nothing_outlives_its_owner(tmp_path, signum):
    marker = mark()
    owner = subprocess.Popen(
        [sys.executable, "-uc", OWNER, FAMILY["obedient"], str(tmp_path / "log")],
        env={**os.environ, **marker},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"started\n"
    owner.send_signal(signum)
    owner.wait(20)
    owner.stdout.close()
    assert wait_for(lambda: not marked(marker), 20), marked(marker)


def test_workers_end_when_their_program_ends(tmp_path):
    marker = mark()
    code = "trap '' TERM; sleep 300 & echo started; exit 3"
    with LoggedProcess(["bash", "-c", code], tmp_path / "log", marker) as child:
        assert child.wait(20) == 3
        assert not marked(marker)


def test_the_first_error_is_the_workers():
    where = "ERROR 11-30 00:09:35 [multiproc_executor.py:953]"
    log = [
        "(APIServer pid=1) WARNING 11-30 00:09:10 [x.py:1] errors like `OSError: [Errno 24] Too`.",
        f"(Worker pid=3) {where} Traceback (most recent call last):",
        f'(Worker pid=3) {where}   File "mla.py", line 122, in __init__',
        f"(Worker pid=3) {where}     raise ValueError(",
        f"(Worker pid=3) {where} ValueError: heads: expected 4, got 5",
        "(EngineCore pid=2) RuntimeError: Worker failed",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "UserWarning: resource_tracker: There appear to be 2 leaked shared_memory objects",
    ]
    assert first_error(log) == "ValueError: heads: expected 4, got 5"


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (
            ["usage: vllm", "vllm: error: unrecognized arguments: --x"],
            "unrecognized arguments: --x",
        ),
        (
            ["KeyboardInterrupt", "glm5lab.errors.InputError: f: bad; fix"],
            "InputError: f: bad; fix",
        ),
        (["a.ValidationError: 1 validation error for M", "  Value error, too long"], "too long"),
        (["first", "(Worker pid=3) INFO 11-30 00:09:35 [a.py:1] last", ""], "last"),
        ([], "it wrote nothing"),
    ],
)
def test_first_error_of_short_logs(log, found):
    assert first_error(log).endswith(found)


def test_the_backend_line_is_kept_as_it_is():
    line = "(Worker pid=8725) INFO 11-30 00:02:42 [cpu.py:66] Using TRITON_MLA_SPARSE attention "
    lines = ["Registered new attention backend: TRITON_MLA_SPARSE", line + "backend."]
    assert serving.selected_backend(lines) == line + "backend."
    assert serving.selected_backend(lines[:1]) is None


def test_the_users_options_come_last_and_win(monkeypatch):
    monkeypatch.setattr(serving, "platform", lambda: "cpu")
    line = serving.command("f.gguf", options=["--max-model-len", "100"])
    assert line[4:6] == ["serve", "f.gguf"]
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[-4:] == ["--dtype", "float32", "--max-model-len", "100"]
    assert "float32" not in serving.command("f.gguf", options=["--dtype=bfloat16"])
    with pytest.raises(InputError, match="before `--`"):
        serving.command("f.gguf", options=["--port=1"])
    assert serving.settings({"VLLM_CPU_KVCACHE_SPACE": "9"}) == {"VLLM_NO_USAGE_STATS": "1"}
    monkeypatch.setattr(serving, "platform", lambda: "cuda")
    assert "--dtype" not in serving.command("f.gguf")


def test_ports_and_urls():
    assert serving.usable_port("127.0.0.1", 0) > 0
    assert serving.url("0.0.0.0", 8) == "http://127.0.0.1:8"
    assert serving.url("::1", 8) == "http://[::1]:8"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port}: is in use on 127.0.0.1; .*--port"):
            serving.usable_port("127.0.0.1", port)
    with pytest.raises(InputError, match="cannot be bound"):
        serving.usable_port("192.0.2.77", 8000)
    with pytest.raises(InputError, match="cannot be bound"):
        serving.usable_port("no such host", 8000)


def test_client_errors_name_the_url_and_the_status(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")  # must not be asked

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503, "Busy")
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "come back later"}}')

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{fake.server_port}", timeout_s=10)
        with pytest.raises(ClientError) as caught:
            client.models()
        assert str(caught.value) == f"GET {client.url}/v1/models: 503 Busy: come back later"
        assert caught.value.status == 503
        assert not client.healthy()
        fake.shutdown()
    with pytest.raises(ClientError, match=r"/v1/models: no answer \(.*does the server run"):
        client.models()


def test_a_folder_called_glm5lab_is_not_in_the_way(tmp_path, monkeypatch):
    """As in the folder that holds a clone."""
    (tmp_path / "glm5lab").mkdir()
    monkeypatch.chdir(tmp_path)
    with LoggedProcess([sys.executable, "-c", "print('ran')"], tmp_path / "log") as process:
        assert process.wait(20) == 0
    assert (tmp_path / "log").read_text() == "ran\n"

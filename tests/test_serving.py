"""Layer 5 with the real engine on the sample: plain `vllm serve FILE`, and `glm5lab serve FILE`.

Two servers are started in all; the rest of the tests share the first.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import mark, marked, wait_for

from glm5lab.errors import InputError
from glm5lab.serving.client import Client, ClientError
from glm5lab.serving.command import LOCAL, settings, usable_port
from glm5lab.serving.server import Server

MARK = mark()
QUESTION = [{"role": "user", "content": "Hello"}]
GLM5LAB = [sys.executable, "-m", "glm5lab"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**settings({}), **MARK, "GLM5LAB_CACHE": cache}


@pytest.fixture(scope="module")
def server(sample_f32, environment, tmp_path_factory):
    """Plain `vllm serve FILE`, as a user types it."""
    port = usable_port(LOCAL, 0)
    vllm = Path(sysconfig.get_path("scripts")) / "vllm"
    line = [str(vllm), "serve", str(sample_f32), "--dtype", "float32", "--port", str(port)]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(line, f"http://{LOCAL}:{port}", log, environment) as running:
        running.wait_ready(timeout_s=240)
        yield running
    assert running.exit_code == 0, log.read_text()[-3000:]
    assert not marked(MARK)


@pytest.fixture(scope="module")
def client(server):
    return Client(server.url, timeout_s=60)


def test_the_engine_names_our_backend(server):
    assert server.backend.endswith("Using TRITON_MLA_SPARSE attention backend.")


def test_models_lists_the_file(client, sample_f32):
    assert client.models() == [str(sample_f32)]


def test_completion_of_text_and_of_token_ids(client):
    text = client.completion("GLM-5 is", max_tokens=6, temperature=0)
    assert text
    assert client.completion("GLM-5 is", max_tokens=6, temperature=0) == text
    assert client.completion([5, 6, 7, 8], max_tokens=6, temperature=0)


def test_a_prompt_longer_than_top_k(client):
    assert client.completion(list(range(10, 110)), max_tokens=4, temperature=0)


def test_streamed_chat_equals_the_whole_answer(client):
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    pieces = list(client.stream_chat(QUESTION, **options))
    assert len(pieces) > 3
    assert "".join(pieces) == client.chat(QUESTION, **options)


def test_two_requests_at_once(client):
    # Shorter than top-k, so that sharing a batch cannot turn a near-tie of the indexer.
    prompts = ["GLM", "vLLM"]
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    alone = [client.completion(prompt, **options) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda prompt: client.completion(prompt, **options), prompts))
    assert together == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("options", "status"),
    [({"max_tokens": -1}, 400), ({"temperature": "hot"}, 400), ({"model": "another"}, 404)],
    ids=["tokens", "type", "model"],
)
def test_a_bad_request_gets_an_error_and_the_server_lives_on(client, options, status):
    with pytest.raises(ClientError, match=f"POST .*/v1/completions: {status} ") as caught:
        client.completion("x", **options)
    assert caught.value.status == status
    assert client.healthy()
    assert client.completion("x", max_tokens=1)


def test_too_long_a_prompt_gets_an_error(client):
    with pytest.raises(ClientError, match="maximum context length"):
        client.completion([5] * 5000, max_tokens=1)
    assert client.healthy()


def test_glm5lab_serve_refuses_the_port_of_a_running_server(server, sample_f32, environment):
    port = server.url.rpartition(":")[2]
    answer = subprocess.run(
        [*GLM5LAB, "serve", str(sample_f32), "--port", port],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"glm5lab: port {port}: is in use on 127.0.0.1;")
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stdout == ""


def test_vllms_benchmark_measures_it(server, tmp_path):
    out = tmp_path / "out.json"
    words = ["--concurrency", "1,3", "--prompts", "9", "--output", "4", "--requests", "3"]
    answer = subprocess.run(
        [*GLM5LAB, "bench", "server", server.url, *words, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert answer.returncode == 0, answer.stderr
    result = json.loads(out.read_text())
    assert [row["concurrency"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert (row["completed"], row["failed"]) == (3, 0)
        assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(12, rel=0.01)
        assert row["total_tokens_per_s"] * row["seconds"] == pytest.approx(39, rel=0.01)
        assert 0 < row["ttft_ms"]["median"] <= row["e2el_ms"]["median"]
    assert (result["server"]["vocabulary"], result["ok"]) == (512, True)
    assert len(answer.stdout.splitlines()) == 4


def listening(port):
    """Local addresses that listen on a port, as /proc writes them (state 0A: listening)."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [r.split() for t in tables if t.exists() for r in t.read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [address for address, its_port in places if int(its_port, 16) == port]


def start_serve(file, environment, marker, port, log):
    return subprocess.Popen(
        [*GLM5LAB, "serve", str(file), "--port", str(port)],
        env={**os.environ, **environment, **marker},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_glm5lab_serve_answers_locally_and_ctrl_c_leaves_nothing(sample_f32, environment, tmp_path):
    marker, port, log = mark(), usable_port(LOCAL, 0), tmp_path / "log"
    process = start_serve(sample_f32, environment, marker, port, log)
    try:
        ready = wait_for(lambda: "ready after" in log.read_text() or process.poll(), 240)
        assert ready is True, log.read_text()[-3000:]
        assert f"http://127.0.0.1:{port}/v1 (OpenAI API, model " in log.read_text()
        assert Client(f"http://{LOCAL}:{port}").chat(QUESTION, max_tokens=4)
        assert listening(port) == ["0100007F"]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        assert len(marked(marker)) >= 4  # glm5lab, the leash, vLLM and its engine
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 0
    assert log.read_text().splitlines()[-1] == "stopped"
    assert not marked(marker)


@pytest.mark.slow
def test_sigterm_while_the_engine_starts_leaves_nothing(sample_f32, environment, tmp_path):
    marker, port, log = mark(), usable_port(LOCAL, 0), tmp_path / "log"
    process = start_serve(sample_f32, environment, marker, port, log)
    try:
        started = wait_for(lambda: "s: engine, for" in log.read_text() or process.poll(), 120)
        assert started is True, log.read_text()[-3000:]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    assert code == 130
    assert not marked(marker)


def test_an_engine_that_cannot_start_is_reported_with_its_error(sample_f32, environment, tmp_path):
    options = ["--no-such-option"]
    server = Server.of_file(sample_f32, options=options, log=tmp_path / "log")
    server.settings |= environment
    with server, pytest.raises(InputError, match="options: unrecognized arguments: --no-such"):
        server.wait_ready(timeout_s=120)

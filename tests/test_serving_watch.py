"""Ready, failed and stuck are told apart: stages of a start, the smoke request, the watch."""

import os
import signal
import sys
import time

import pytest
from fake_openai import openai
from processes import mark, marked, wait_for

from glm5lab.errors import InputError
from glm5lab.serving.client import Client
from glm5lab.serving.command import ServerError
from glm5lab.serving.progress import STAGES, Progress
from glm5lab.serving.server import Server
from glm5lab.serving.smoke import TOKENS, smoke
from glm5lab.serving.verdict import ended
from glm5lab.serving.watch import Watch, hold

WORKER = "(Worker pid=12) INFO 11-30 08:43:42 [x.py:1] "
START = (
    ("imports", "(APIServer pid=1) INFO 11-30 08:43:24 [model.py:1] Using max model len 4096"),
    ("engine", "(EngineCore pid=2) INFO 11-30 08:43:33 [core.py:133] Initializing a V1 LLM engine"),
    ("workers", WORKER + "world_size=8 rank=0 local_rank=0 distributed_init_method=file:///x"),
    ("weights", WORKER + "Starting to load model /x..."),
    ("weights", "Dequantizing:  37%|###       | 32.5M/87.9M [00:00<00:00, 1.28GB/s]"),
    ("profiling", WORKER + "Model loading took 86.1 GiB memory and 310.1 seconds"),
    ("cache", WORKER + "Available KV cache memory: 5.1 GiB"),
    ("graphs", "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   2%|2   | 1/51 [00:01"),
    ("graphs", "(EngineCore pid=2) INFO 11-30 08:43:43 [x.py:1] GPU KV cache size: 1,024 tokens"),
    ("http", "(APIServer pid=1) INFO 11-30 08:43:44 [e.py:1] Starting vLLM server on http://x"),
)


def test_the_stages_of_a_start():
    now = [0.0]
    progress = Progress(lambda: now[0])
    for stage, line in START:
        now[0] += 10
        progress.see(line)
        assert progress.stage == stage
    assert {stage for stage, _ in START} == {name for name, _ in STAGES}
    assert progress.names == {1: "APIServer", 2: "EngineCore", 12: "Worker"}
    now[0] += 60
    assert progress.waiting() == "160 s: http, for 60 s; nothing written for 60 s"


def test_a_bar_is_part_of_where_it_is():
    now = [5.0]
    progress = Progress(lambda: now[0])
    for _, line in START[:5]:
        progress.see(line)
    now[0] += 2
    assert progress.waiting() == "2 s: weights 37 %, for 2 s"


def choice(tokens=("a",) * TOKENS, values=(-0.5,) * TOKENS):
    found = {"tokens": list(tokens), "token_logprobs": list(values)}
    return {"choices": [{"text": "".join(tokens), "logprobs": found}]}


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([choice(), choice()], ""),
        ([choice(), choice(tokens=("a",) * (TOKENS - 1) + ("b",))], "two answers at temperature 0"),
        ([choice(values=(-0.5,) * 7 + (None,))] * 2, "a log-probability is None; NaN in the"),
        ([choice(values=(-0.5,) * 7 + (-9999.0,))] * 2, "a log-probability is -9999.0"),
        ([choice(tokens=("a",), values=(-1.0,))] * 2, "8 tokens were asked for, 1 came"),
        ([{"error": {"message": "nan"}}], "the smoke request failed: POST "),
    ],
    ids=["good", "differ", "null", "nothing", "short", "refused"],
)
def test_the_smoke_request(answers, says):
    left = list(answers)

    def answer(request):
        request.body()
        content = left.pop(0)
        request.say(content, 500 if "error" in content else 200)

    with openai(answer) as url:
        if not says:
            assert smoke(Client(url)).startswith(f"smoke: {TOKENS} tokens, ")
            return
        with pytest.raises(ServerError, match=says):
            smoke(Client(url))


class Engine:
    """A fake endpoint: counters that move or not, requests that are answered or not."""

    def __init__(self):
        self.tokens, self.moves, self.works, self.counts = 0, True, True, True

    def __call__(self, request):
        request.body()
        if request.path == "/metrics":
            self.tokens += self.moves
            line = f'vllm:prompt_tokens_total{{model="x"}} {self.tokens}.0\nother 1\n'
            request.say(line if self.counts else "other 1\n")
        elif self.works:
            request.say({"choices": [{"text": "a"}]})
        else:
            request.say({"error": {"message": "dead"}}, 503)


def test_the_watch_needs_both_signs_to_be_missing():
    engine, now = Engine(), [0.0]
    with openai(engine) as url:
        watch = Watch(Client(url), 60.0, lambda: now[0])
        assert watch.able
        for moves, works in [(True, True), (True, False), (False, True)]:
            engine.moves, engine.works = moves, works
            now[0] += 100
            assert watch.check()
        engine.works = False
        now[0] += 59
        assert watch.check()
        now[0] += 2
        assert not watch.check()
        engine.counts = False
        assert not Watch(Client(url), 60.0).able


def server(code, tmp_path, url="http://127.0.0.1:9"):
    return Server([sys.executable, "-uc", code], url, tmp_path / "log", mark())


def test_an_end_while_serving_names_the_signal(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with server(code, tmp_path) as process:
        match = r"was killed by SIGKILL \(.*memory.*\) while it was serving: .*whole output: "
        with pytest.raises(ServerError, match=match):
            hold(process, Client(process.url), None)


def test_an_engine_that_dies_at_the_first_request_is_named(tmp_path):
    """It answers 500, and then the server ends; one that goes on is quoted with its log."""
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    shown = (
        f"print('INFO:     Application startup complete.'); print({error!r}); import sys, time; "
    )
    smoked = ServerError("the smoke request failed: POST /v1/completions: 500: EngineDeadError")
    with server(shown + "time.sleep(0.3); sys.exit(1)", tmp_path) as process:
        words = str(process.unsound(smoked))
    assert words.startswith("the server ended with code 1 at its first request (the smoke request")
    assert "memory: The GPU ran out of memory while serving" in words
    with server("import time; print('ready', flush=True); time.sleep(60)", tmp_path) as process:
        words = str(process.unsound(smoked))
    assert words == f"{smoked}; its whole output: {tmp_path / 'log'}"


def test_a_machine_without_the_endpoint_is_held_too(tmp_path):
    ends = pytest.raises(ServerError, match="ended with code 1 while it was serving")
    with server("import sys; sys.exit(1)", tmp_path) as process, ends:
        hold(process, None, 1.0)


def test_the_doctor_names_the_cause(tmp_path):
    """Of an error that other processes repeat, and of one in a start that does not go on."""
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    lines = [
        "(EngineCore pid=2) INFO 11-30 08:43:33 [core.py:1] Initializing a V1 LLM engine",
        f"(Worker_TP1 pid=13) ERROR 11-30 08:43:43 [multiproc_executor.py:953] {error}",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    shown = f"import sys, time; print({chr(10).join(lines)!r}); "
    found = r"memory: .*out of memory.*whole output: "
    ends = pytest.raises(ServerError, match=r"ended with code 1 before it was ready: " + found)
    with server(shown + "sys.exit(1)", tmp_path) as process, ends:
        process.wait_ready(timeout_s=20)
    with server(shown + "time.sleep(300)", tmp_path) as process:
        assert wait_for(lambda: len(process.lines) == 3, 20)
        with pytest.raises(ServerError, match=r"is stuck, .*" + found):
            process.wait_ready(timeout_s=60, stall_s=1)


def test_exit_codes_in_words():
    assert ended(1) == "ended with code 1"
    assert ended(128 + 15) == ended(-15) == "was killed by SIGTERM"


def test_an_unknown_option_is_the_users_mistake(tmp_path):
    code = "import sys; print('vllm: error: unrecognized arguments: --x'); sys.exit(2)"
    named = pytest.raises(InputError, match="vLLM's options: unrecognized arguments: --x; ")
    with server(code, tmp_path) as process, named:
        process.wait_ready(timeout_s=20)


def test_a_start_that_stalls_says_where_and_how_long(tmp_path):
    line = "(EngineCore pid=2) Initializing a V1 LLM engine"
    code = f"import time; print({line!r}); time.sleep(300)"
    with server(code, tmp_path) as process:
        match = r"is stuck, \d s after its start: it has written nothing for \d s: stage engine, fo"
        assert wait_for(lambda: process.lines, 20)
        with pytest.raises(ServerError, match=match):
            process.wait_ready(timeout_s=60, stall_s=1)
    assert not marked(process.settings)


def test_a_stopped_process_is_named(tmp_path):
    code = "import os, time; print(f'(EngineCore pid={os.getpid()}) here'); time.sleep(300)"
    with server(code, tmp_path) as process:
        assert wait_for(lambda: process.progress.names, 20)
        pid = next(iter(process.progress.names))
        os.kill(pid, signal.SIGSTOP)
        match = rf"process {pid} \(EngineCore\) is stopped by a signal; its last words: here"
        with pytest.raises(ServerError, match=match):
            process.wait_ready(timeout_s=60, stall_s=1)
        began = time.monotonic()
    assert time.monotonic() - began < 30  # a hang guard: SIGKILL reaches a stopped process
    assert not marked(process.settings)


def test_an_engine_that_stands_still_is_ended(tmp_path):
    engine = Engine()
    code = "import time; time.sleep(300)"
    with openai(engine) as url, server(code, tmp_path, url) as process:
        client = Client(url)
        engine.moves = engine.works = False
        with pytest.raises(ServerError, match=r"is stuck: for \d s no token was processed, and"):
            hold(process, client, 2.0)
    assert not marked(process.settings)


def test_a_server_that_counts_nothing_is_not_watched(tmp_path):
    engine = Engine()
    engine.counts = engine.works = False
    told: list[str] = []
    code, ends = "import time; time.sleep(2)", pytest.raises(ServerError, match="ended with code 0")
    with openai(engine) as url, server(code, tmp_path, url) as process, ends:
        hold(process, Client(url), 0.4, told.append)
    assert told == ["the server counts no tokens: an engine that stands still would not be noticed"]


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path):
    log = tmp_path / "full"
    log.symlink_to("/dev/full")
    code = "print('x' * 200_000); print('last')"
    process = Server([sys.executable, "-uc", code], "http://127.0.0.1:9", log)
    with process:
        assert process.wait(20) == 0
    assert process.lines[-1] == "last"
    assert process.log_error == "No space left on device"


def test_temporary_files_go_with_the_process(tmp_path):
    code = (
        "import pathlib, tempfile; d = pathlib.Path(tempfile.gettempdir());"
        "(d / 'vllm_dist_glm5labtest').touch();"
        "pathlib.Path('/dev/shm/vllm_dist_glm5labtest-tp:0').touch(); print(d)"
    )
    with server(code, tmp_path) as process:
        assert process.wait(20) == 0
    folder = process.lines[-1]
    assert "glm5lab-" in folder
    assert not os.path.exists(folder)
    assert not os.path.exists("/dev/shm/vllm_dist_glm5labtest-tp:0")

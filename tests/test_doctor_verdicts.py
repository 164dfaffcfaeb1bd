"""Failed, hang, degraded, healthy, unknown: which of them, where the lines alone do not say it."""

from doctor_logs import FOLDER, crash, diagnosed

HEALTHY = (FOLDER / "healthy-long-compile.txt").read_text(encoding="utf-8")
PORT = (FOLDER / "port-in-use.txt").read_text(encoding="utf-8")
READY = "INFO:     Application startup complete.\n"
POST = 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" '


def report(number: int, prompt: float, generation: float, running: int = 4) -> str:
    return (
        f"(APIServer pid=1) INFO 11-29 09:{number // 6:02}:{number % 6}0 [loggers.py:335] Engine"
        f" 000: Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {generation}"
        f" tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 22.7%\n"
    )


def stall(number: int) -> str:
    return (
        f"(EngineCore pid=30) INFO 11-29 09:{number:02}:00 [shm_broadcast.py:878] No available"
        " shared memory broadcast block found in 60 seconds. This typically happens when some"
        " processes are hanging or doing some time-consuming work.\n"
    )


def test_a_stall_that_ended_is_healthy() -> None:
    silent = "".join(report(i, 0.0, 0.0) for i in range(1, 8))
    assert diagnosed(READY + report(0, 9.0, 9.0) + silent).verdict == "hang"
    assert (
        diagnosed(READY + report(0, 9.0, 9.0) + silent + report(9, 0.0, 5.0)).verdict == "healthy"
    )


def test_a_server_with_nothing_to_do_is_healthy() -> None:
    idle = "".join(report(i, 0.0, 0.0, running=0) for i in range(1, 30))
    assert diagnosed(READY + report(0, 9.0, 9.0) + idle).verdict == "healthy"


def test_a_long_prompt_is_no_stall() -> None:
    reading = "".join(report(i, 800.0, 0.0) for i in range(1, 30))
    assert diagnosed(READY + report(0, 9.0, 9.0) + reading).verdict == "healthy"


def test_broadcast_notices() -> None:
    """Normal while compiling, and where nothing runs; a hang while requests run."""
    notices = "".join(stall(i) for i in range(1, 6))
    assert diagnosed(HEALTHY).verdict == "healthy"
    assert diagnosed(READY + report(0, 0.0, 0.0, running=0) + notices).verdict == "healthy"
    found = diagnosed(READY + report(0, 9.0, 9.0) + notices)
    assert (found.verdict, found.layer) == ("hang", "distributed")
    after = diagnosed(READY + report(0, 9.0, 9.0) + notices + report(50, 9.0, 9.0))
    assert after.verdict == "healthy"


def test_the_timeout_after_a_stall_is_its_symptom() -> None:
    notices = "".join(stall(i) for i in range(1, 6))
    dead = (
        "(EngineCore pid=30) ERROR 11-29 09:06:00 [core.py:2806] TimeoutError: RPC call to"
        " execute_model timed out.\n"
        "(EngineCore pid=30) ERROR 11-29 09:06:00 [core.py:2806] EngineCore encountered a fatal"
        " error.\n"
    )
    found = diagnosed(READY + report(0, 9.0, 9.0) + notices + dead)
    assert (found.verdict, found.layer) == ("hang", "distributed")
    assert any("RPC call" in symptom["text"] for symptom in found.symptoms)


def test_a_failure_that_ended_requests_is_no_hang() -> None:
    oom = "(EngineCore pid=30) ERROR 11-29 09:00:09 [core.py:2806] torch.OutOfMemoryError: CUDA out"
    silent = "".join(report(i, 0.0, 0.0) for i in range(1, 8))
    found = diagnosed(READY + report(0, 9.0, 9.0) + f"{oom} of memory.\n" + silent)
    assert (found.verdict, found.layer) == ("failed", "memory")


def test_the_client_s_mistake_is_healthy() -> None:
    tag = "(APIServer pid=1) ERROR 11-29 09:00:01 [serving.py:300] "
    trace = (
        f"{tag}Traceback (most recent call last):\n"
        f"{tag}ValueError: This model's maximum context length is 4096 tokens.\n"
    )
    assert diagnosed(READY + trace + POST + "400 Bad Request\n").verdict == "healthy"


def test_requests_that_fail_while_the_server_goes_on() -> None:
    found = diagnosed(READY + POST + "200 OK\n" + POST + "500 Internal Server Error\n")
    assert (found.verdict, found.layer) == ("degraded", "server")
    nan = "(EngineCore pid=3) ERROR 11-29 09:00:01 [a.py:3] RuntimeError: NaNs detected in logits\n"
    found = diagnosed(READY + nan + POST + "200 OK\n")
    assert (found.verdict, found.layer) == ("degraded", "kernel")


def test_a_key_that_some_lack() -> None:
    denied = POST + "401 Unauthorized\n"
    assert diagnosed(READY + denied * 3).verdict == "degraded"
    assert diagnosed(READY + denied + POST + "200 OK\n").verdict == "healthy"


def test_errors_of_a_shutdown_are_healthy() -> None:
    noise = (
        "INFO:     Shutting down\n"
        "(Worker_TP1 pid=4) WARNING 11-29 09:00:01 [multiproc_executor.py:1078] WorkerProc was"
        " terminated\n"
        "Traceback (most recent call last):\n"
        "asyncio.exceptions.CancelledError\n"
        "RuntimeError: NCCL error: remote process exited or there was a network error\n"
    )
    found = diagnosed(READY + POST + "200 OK\n" + noise)
    assert (found.verdict, found.stage) == ("healthy", "shutdown")


def test_restarts() -> None:
    """Failed until it runs; then degraded, with the cause of before."""
    again = PORT + PORT.replace("9001", "9002")
    found = diagnosed(again)
    assert (found.verdict, found.layer) == ("failed", "server")
    assert found.evidence is not None
    assert found.evidence["line"] == 19
    found = diagnosed(again + HEALTHY)
    assert (found.verdict, found.layer) == ("degraded", "server")
    assert "runs again" in found.cause
    unknown = PORT.replace("OSError: [Errno 98] Address already in use", "FooError: what")
    found = diagnosed(unknown + PORT)
    assert (found.verdict, found.layer) == ("failed", "server")


def test_the_earlier_exception_of_a_chain() -> None:
    found = diagnosed(
        crash(
            [
                "Traceback (most recent call last):",
                "FileNotFoundError: [Errno 2] No such file or directory: '/models/a.gguf'",
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                "Traceback (most recent call last):",
                "OSError: Can't load tokenizer for '/models'.",
            ]
        )
    )
    assert (found.layer, found.rank) == ("gguf", "Worker_TP3")
    assert any("tokenizer" in symptom["text"] for symptom in found.symptoms)


def test_what_no_rule_knows() -> None:
    """It says so, with the first exception of the first worker, and where it was raised."""
    found = diagnosed(
        crash(
            [
                "Traceback (most recent call last):",
                '  File "/x/vllm/model_executor/models/glm.py", line 1, in load_weights',
                "    frobnicate()",
                "FrobnicationError: flux too low",
            ]
        )
    )
    assert (found.verdict, found.layer, found.rank) == ("unknown", "loader", "Worker_TP3")
    assert "No rule knows" in found.cause
    assert "FrobnicationError: flux too low" in found.cause
    assert found.confidence < 0.5
    assert found.evidence is not None


def test_logs_that_say_little() -> None:
    for content in ("hello\nworld\n", "\x00\x01\x02\n", "{}\n" * 100, "Killing time\n"):
        found = diagnosed(content)
        assert (found.verdict, found.layer) == ("unknown", None)
    begun = HEALTHY.split("Loading safetensors")[0]
    found = diagnosed(begun)
    assert (found.verdict, found.stage) == ("unknown", "loading")


def test_an_error_that_the_start_survived_is_healthy() -> None:
    head, tail = HEALTHY.split("Loading safetensors", 1)
    trace = "Traceback (most recent call last):\nImportError: cannot import name 'x' from 'y'\n"
    assert diagnosed(head + trace + "Loading safetensors" + tail).verdict == "healthy"


def test_whom_a_line_without_a_process_is_about() -> None:
    """The next process that fails of the same; not one that only lost a peer."""
    said = "This kernel only supports sm120.\n" * 3
    lost = "(Worker_TP0 pid=3) RuntimeError: NCCL error: remote process exited or there was a\n"
    error = "(Worker_TP1 pid=4) torch.AcceleratorError: CUDA error: unspecified launch failure\n"
    found = diagnosed(said + lost + error)
    assert (found.layer, found.rank, found.pid) == ("kernel", "Worker_TP1", 4)
    assert found.evidence is not None
    assert found.evidence["line"] == 1
    assert diagnosed(said + lost).rank is None


def test_names_of_processes() -> None:
    for tag, name in [
        ("(VllmWorker TP3 pid=41)", "VllmWorker TP3"),
        ("(VllmWorker rank=3 pid=41)", "VllmWorker rank=3"),
        ("(Worker_TP3_EP3 pid=41)", "Worker_TP3_EP3"),
        ("(Worker pid=41) (Worker_PP1_TP3 pid=41)", "Worker_PP1_TP3"),
        ("(ServeReplica:glm:LLM pid=41)", "ServeReplica:glm:LLM"),
        ("> vllm-1  | (ApiServer_1 pid=41)", "ApiServer_1"),
        ("2026-11-29T10:11:12.123456789Z (EngineCore_DP1 pid=41)", "EngineCore_DP1"),
    ]:
        found = diagnosed(f"{tag} ERROR 11-29 09:00:01 [a.py:3] OSError: [Errno 98] Address in\n")
        assert (found.rank, found.pid) == (name, 41)


def test_what_the_front_end_survived_explains_no_end() -> None:
    """A thread for statistics, a plugin of others: the start went on, and a worker was killed."""
    head = HEALTHY.split("Loading safetensors")[0]
    before, after = head.split("(EngineCore pid=30) INFO", 1)
    killed = (
        "(EngineCore pid=30) ERROR 11-29 06:04:00 [multiproc_executor.py:380] Worker proc"
        " VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.\n"
    )
    tag = "(APIServer pid=20) ERROR 11-29 06:00:02 [__init__.py:72] "
    for noise in (
        "Exception in thread Thread-3 (_report_usage_worker):\nTraceback (most recent call last):\n"
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='stats.vllm.ai')\n",
        f"{tag}Failed to load plugin others\n{tag}ModuleNotFoundError: No module named 'boto3'\n",
        "Exception ignored in: <function f at 0x7f>\nTypeError: 'NoneType' object is no x\n",
    ):
        found = diagnosed(f"{before}{noise}(EngineCore pid=30) INFO{after}{killed}")
        assert (found.verdict, found.layer, found.rank) == ("failed", "memory", "VllmWorker-3")


def test_patience_that_ended_with_a_start_that_hangs() -> None:
    """What it stood at counts, where that takes no such time; a long load is only slow."""
    lost = (
        "(APIServer pid=20) TimeoutError: Timed out waiting for engine core processes to start."
        " This is often caused by slow weight loading. Waited 600s (configured by X).\n"
    )
    meeting = (
        "(Worker pid=41) INFO 11-29 06:00:13 [parallel_state.py:1] world_size=4 rank=0 x\n"
        "(Worker pid=41) INFO 11-29 06:00:14 [pynccl.py:148] vLLM is using nccl==2.29.7\n"
    )
    found = diagnosed(meeting + lost)
    assert (found.verdict, found.layer, found.stage) == ("hang", "distributed", "distributed")
    assert found.evidence is not None
    assert "nccl" in found.evidence["text"]
    assert "Timed out" in found.symptoms[0]["text"]
    load = "(Worker_TP0 pid=41) INFO 11-29 06:00:20 [a.py:1] Starting to load model /m...\n"
    found = diagnosed(meeting + load + lost)
    assert (found.verdict, found.rule) == ("failed", "startup-timeout")

"""Long logs: what repeats is passed over, and nothing that matters is lost with it."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from doctor_logs import CASES, diagnosed, log

READY = "INFO:     Application startup complete.\n"
T = "11-29 06:08:41"
OOM = f"(EngineCore pid=30) ERROR {T} [core.py:2806] torch.OutOfMemoryError: CUDA out of memory."
FATAL = f"(EngineCore pid=30) ERROR {T} [core.py:2806] EngineCore encountered a fatal error.\n"
POST = 'INFO:     127.0.0.1:{} - "POST /v1/completions HTTP/1.1" 200 OK\n'


def requests(rng: random.Random) -> Iterator[str]:
    yield POST.format(rng.randrange(60000))
    name = f"cmpl-{rng.getrandbits(128):032x}"
    yield f"(APIServer pid=20) INFO {T} [logger.py:63] Received request {name}: params: memory.\n"


def nccl(rng: random.Random) -> Iterator[str]:
    yield f"n7:{rng.randrange(9999)}:12 [3] NCCL INFO Channel {rng.randrange(32)} via P2P/IPC\n"


def errors(rng: random.Random) -> Iterator[str]:
    rank = rng.randrange(8)
    yield f"(Worker_TP{rank} pid={rank}) ERROR {T} [a.py:1] request {rng.random()} has no weights\n"


def tracebacks(rng: random.Random) -> Iterator[str]:
    tag = f"(Worker_TP1 pid=1) ERROR {T} [multiproc_executor.py:1189] "
    yield f"{tag}Traceback (most recent call last):\n"
    for depth in range(5):
        yield f'{tag}  File "/x/{depth}.py", line {rng.randrange(99)}, in step\n{tag}    a = b\n'
    yield f"{tag}RequestError: request {rng.getrandbits(64):x} cannot be served\n"


def debugging(rng: random.Random) -> Iterator[str]:
    yield f"(EngineCore pid=30) DEBUG {T} [core.py:9] loop {rng.random()}: shared memory free\n"


def words(rng: random.Random) -> Iterator[str]:
    yield f"step {rng.getrandbits(40):x}: weights in shared memory, nccl, {rng.random()}\n"


def noise(rng: random.Random) -> Iterator[str]:
    yield rng.randbytes(80).replace(b"\n", b"").decode("latin-1") + "\n"


Form = Callable[[str], str]
FORMS: dict[str, Form] = {
    "plain": str,
    "journald": lambda line: f"Nov 29 10:11:12 gpu-node7 vllm[4123]: {line}",
    "kubernetes": lambda line: f"2026-11-29T10:11:12.123456789Z stderr F {line}",
    "colours": lambda line: f"\x1b[36m{line[:9]}\x1b[0m{line[9:]}",
    "docker": lambda line: json.dumps({"log": line, "stream": "stderr"}) + "\n",
    "progress": lambda line: f"10%|#\r{line}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [requests, nccl, errors, tracebacks, debugging, words, noise])
@pytest.mark.parametrize("block", [777, 1 << 20])
def test_the_cause_behind_chatter(
    kind: Callable[..., Iterator[str]], form: str, block: int
) -> None:
    rng = random.Random(5)
    lines = "".join("".join(kind(rng)) for _ in range(400)).split("\n")[:-1]
    lines = [READY, *(f"{line}\n" for line in lines), f"{OOM}\n", FATAL]
    content = "".join(map(FORMS[form], lines))
    found = diagnosed(content, block)
    assert (found.verdict, found.layer, found.rank) == ("failed", "memory", "EngineCore")
    assert found.evidence is not None
    assert found.evidence["line"] == len(lines) - 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_a_log_behind_chatter(case: dict[str, Any]) -> None:
    rng = random.Random(case["file"])
    chatter = [line for kind in (nccl, debugging, words) for _ in range(200) for line in kind(rng)]
    rng.shuffle(chatter)
    for block in (555, 1 << 20):
        found = diagnosed("".join(chatter).encode() + log(case), block)
        assert (found.verdict, found.layer, found.rank) == (
            case["verdict"],
            case["layer"],
            case["rank"],
        )
        if case["line"] is not None:
            assert found.evidence is not None
            assert found.evidence["line"] == len(chatter) + case["line"]


def test_many_errors_that_a_server_survives() -> None:
    """It is degraded by them, as long as it goes on; then the next start counts."""
    rng = random.Random(1)
    survived = (
        f"{OOM} Tried to allocate {rng.random()} GiB.\n{POST.format(7)}" for _ in range(300)
    )
    content = READY + "".join(survived)
    assert diagnosed(content).verdict == "degraded"
    content += f"{OOM} Tried to allocate 1.25 GiB.\n"
    assert diagnosed(content).verdict == "failed"
    assert diagnosed(content + FATAL).verdict == "failed"
    again = f"INFO {T} [startup.py:96] non-default args: {{}}\n{READY}{POST.format(7)}"
    found = diagnosed(content + FATAL + again)
    assert (found.verdict, found.layer) == ("degraded", "memory")
    assert "runs again" in found.cause


def test_a_stage_is_dated_by_its_last_line() -> None:
    """A long load writes progress all the time; only silence behind it is a hang."""
    bar = "Loading safetensors checkpoint shards: {:3}% Completed | {}/99 [00:{:02}<00:31]\r"
    wait = (
        "(EngineCore pid=3) INFO 11-29 {:02}:{:02}:00 [shm_broadcast.py:878] No available shared"
        " memory broadcast block found in 60 seconds.\n"
    )
    load = "".join(bar.format(n, n, n % 60) + wait.format(6 + n // 60, n % 60) for n in range(99))
    head = f"INFO {T} [startup.py:96] non-default args: {{}}\n"
    assert diagnosed(head + load).verdict == "unknown"
    silence = "".join(wait.format(8 + n // 60, n % 60) for n in range(99))
    assert diagnosed(head + load + silence).verdict == "hang"

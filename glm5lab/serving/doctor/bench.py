"""How fast the doctor reads large logs, and in how much memory.

Each log is written to a file, read by the doctor in a fresh Python process, and removed. All are
deterministic, and their requests and texts differ from line to line.
"""

import os
import platform
import random
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glm5lab.env import report
from glm5lab.gguf.bench import fresh_figures

LIMIT_S_PER_GB, LIMIT_MB = 20.0, 200.0

READ = """
import json, sys, time
from glm5lab.serving.doctor import examine
wall, cpu = time.perf_counter(), time.process_time()
found = examine([sys.argv[1]])
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]
print(json.dumps({"seconds": wall, "cpu_s": cpu, "mb": int(peak) * 1024 / 1e6,
                  "verdict": found.verdict, "layer": found.layer}))
"""

TIME = "11-29 06:08:41"
READY = "INFO:     Application startup complete.\n"
OOM = (
    f"(EngineCore pid=30) ERROR {TIME} [core.py:2806] torch.OutOfMemoryError: CUDA out of memory."
    " Tried to allocate 4.00 GiB.\n"
    f"(EngineCore pid=30) ERROR {TIME} [core.py:2806] EngineCore encountered a fatal error.\n"
)


def _serving(rng: random.Random) -> Iterator[str]:
    """A healthy server's chatter, which ends out of memory."""
    yield READY
    while True:
        for _ in range(100):
            name = f"chatcmpl-{rng.getrandbits(128):032x}"
            yield (
                f'INFO:     127.0.0.1:{rng.randrange(60000)} - "POST /v1/chat/completions'
                ' HTTP/1.1" 200 OK\n'
                f"(APIServer pid=20) INFO {TIME} [logger.py:63] Received request {name}: params:"
                " SamplingParams(n=1, temperature=0.7, top_p=0.95, max_tokens=2048), lora: None.\n"
                f"(EngineCore pid=30) INFO {TIME} [async_llm.py:587] Added request {name}.\n"
            )
        yield (
            f"(APIServer pid=20) INFO {TIME} [loggers.py:335] Engine 000: Avg prompt throughput:"
            f" {rng.random() * 900 + 1:.1f} tokens/s, Avg generation throughput: 38.7 tokens/s,"
            " Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.2%\n"
        )


def _tracebacks(rng: random.Random) -> Iterator[str]:
    """Eight processes that report an error for each request, each time with other words."""
    while True:
        rank = rng.randrange(8)
        tag = f"(Worker_TP{rank} pid={500 + rank}) ERROR {TIME} [multiproc_executor.py:1189] "
        yield f"{tag}Traceback (most recent call last):\n"
        for depth in range(12):
            yield (
                f'{tag}  File "/usr/lib/python3/dist-packages/vllm/v1/worker/part{depth}.py",'
                f" line {rng.randrange(9999)}, in step_{depth}\n{tag}    result = step(inputs)\n"
            )
        yield f"{tag}RequestError: request {rng.getrandbits(64):016x} cannot be served\n"


def _restarts(rng: random.Random) -> Iterator[str]:
    """A server that a supervisor starts again and again."""
    while True:
        pid = rng.randrange(1 << 22)
        yield f"(APIServer pid={pid}) INFO {TIME} [startup.py:96] non-default args: {{'tp': 8}}\n"
        for _ in range(20):
            yield f"(APIServer pid={pid}) INFO {TIME} [model.py:744] Resolved {rng.random()}\n"
        yield "Traceback (most recent call last):\n"
        yield '  File "/usr/lib/python3/dist-packages/vllm/entrypoints/launcher.py", line 3, in f\n'
        yield "OSError: [Errno 98] Address already in use\n"
        yield "glm.service: Main process exited, code=exited, status=1/FAILURE\n"


def _nccl(rng: random.Random) -> Iterator[str]:
    """What NCCL_DEBUG=INFO writes: untagged lines that have words of many rules."""
    while True:
        pid, one, two = rng.randrange(1 << 22), rng.randrange(8), rng.randrange(8)
        yield (
            f"node7:{pid}:{pid + 9} [{one}] NCCL INFO Channel {rng.randrange(32):02}/0 :"
            f" {one}[{one}] -> {two}[{two}] via P2P/CUMEM/read, shared memory, proxy port"
            f" {rng.randrange(65536)}\n"
        )


def _errors(rng: random.Random) -> Iterator[str]:
    """Nothing but errors, of many statements, with words of many rules."""
    texts = (
        "CUDA error: {}",
        "NCCL error in weight {}",
        "KeyError: '{}'",
        "memory of port {} died",
    )
    while True:
        rank, place = rng.randrange(8), rng.randrange(100)
        yield (
            f"(Worker_TP{rank} pid={500 + rank}) ERROR {TIME} [part{place}.py:{place}] request"
            f" {rng.getrandbits(64):016x} failed: {rng.choice(texts).format(rng.random())}\n"
        )


def _long(rng: random.Random) -> Iterator[str]:
    """Prompts and answers, each a line of some kilobytes."""
    while True:
        tokens = ", ".join(str(rng.randrange(150_000)) for _ in range(16))
        level = rng.choice(("INFO", "DEBUG", "ERROR"))
        ids = ", ".join([tokens] * 60)
        yield f"(EngineCore pid=30) {level} {TIME} [core.py:9] tokens [{ids}]\n"


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[str]], str, str]] = {
    "serving": (_serving, "failed", "memory"),
    "tracebacks": (_tracebacks, "failed", "memory"),
    "restarts": (_restarts, "failed", "server"),
    "nccl": (_nccl, "failed", "memory"),
    "errors": (_errors, "failed", "memory"),
    "long": (_long, "failed", "memory"),
}


def write_log(path: Path, kind: str, size: int) -> None:
    """Write a log of `size` bytes, a little more; all but `restarts` end out of memory."""
    lines, written = KINDS[kind][0](random.Random(7)), 0
    with path.open("w", encoding="utf-8") as log:
        while written < size:
            text = "".join(next(lines) for _ in range(1000))
            written += log.write(text)
        if kind != "restarts":
            log.write(OOM)


def bench_doctor(gigabytes: float = 1.0) -> dict[str, Any]:
    """Measure the doctor on each kind of log.

    Args:
        gigabytes: size of each log, in 1e9 bytes.

    Returns:
        For each kind bytes, seconds (of the clock and of the processor), peak memory in MB and the
        verdict; `limits`, `ok`, and what was measured where and when.

    Raises:
        CheckError: the doctor's process failed.
    """
    logs = {}
    with tempfile.TemporaryDirectory(prefix="glm5lab-bench-") as folder:
        path = Path(folder) / "server.log"
        for kind in KINDS:
            write_log(path, kind, int(gigabytes * 1e9))
            logs[kind] = {"bytes": path.stat().st_size, **read(path)}
    limit = LIMIT_S_PER_GB * gigabytes
    return {
        "command": "glm5lab bench doctor",
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": report()["cpu"],
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "logs": logs,
        "limits": {"cpu_s": limit, "mb": LIMIT_MB},
        "ok": all(
            (log["verdict"], log["layer"]) == KINDS[kind][1:]
            and log["cpu_s"] < limit
            and log["mb"] < LIMIT_MB
            for kind, log in logs.items()
        ),
    }


def read(path: Path) -> dict[str, Any]:
    """Figures of the doctor on one log, in a fresh process; CheckError when that fails."""
    figures = fresh_figures(READ, [str(path)], "the doctor's", timeout_s=3600)
    return {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}


def bench_text(result: dict[str, Any]) -> str:
    """The result of `bench_doctor` in a few lines."""
    lines = [f"{'log':12}{'GB':>6}{'seconds':>9}{'CPU s':>8}{'peak MB':>9}  verdict"]
    for kind, log in result["logs"].items():
        lines.append(
            f"{kind:12}{log['bytes'] / 1e9:6.2f}{log['seconds']:9.1f}{log['cpu_s']:8.1f}"
            f"{log['mb']:9.0f}  {log['verdict']}, {log['layer']}"
        )
    limits = result["limits"]
    kept = "kept" if result["ok"] else "MISSED"
    lines.append(f"limits: {limits['cpu_s']:g} s of one core, {limits['mb']:.0f} MB: {kept}")
    return "\n".join(lines)

"""Run engine cases in child processes, several at a time, and keep their answers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from glm5lab.env import child_environment
from glm5lab.gpu_check.cases import LENGTHS, EngineCase

COMPILED = "during inference"  # vLLM's JIT monitor, after the server is ready


def run_cases(
    cases: Sequence[EngineCase],
    models: dict[str, Path],
    out: Path,
    at_once: int,
    timeout_s: float,
    extra: dict[str, Any] | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, dict[str, Any]]:
    """Answers of every case that ran; what a failed one said stands in OUT/NAME.log.

    Args:
        cases: what to run.
        models: kind -> folder.
        out: folder for cases, answers and logs.
        at_once: children side by side on the one GPU.
        timeout_s: seconds a child may take.
        extra: further entries of every case file, such as "speed".
        echo: where lines go.
    """
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        jobs = {
            case.name: pool.submit(run_case, case, models[case.kind], out, timeout_s, extra or {})
            for case in cases
        }
        found = {}
        for name, job in jobs.items():
            found[name] = job.result()
            echo(f"{name}: {found[name].get('error', 'done')}")
        return found


def run_case(
    case: EngineCase, model: Path, out: Path, timeout_s: float, extra: dict[str, Any]
) -> dict[str, Any]:
    """One child's answers, or {"error": its last lines}."""
    stem = out / case.name.replace(" ", "_")
    options = {"attention_backend": case.backend} | case.options
    document = {
        "model": str(model),
        "options": options,
        "lengths": list(LENGTHS),
        "new_tokens": 16,
        "together": case.together,
        "again": case.again,
        "sleeps": case.sleeps,
    }
    case_file, answers, log = (stem.with_suffix(s) for s in (".case", ".json", ".log"))
    case_file.write_text(json.dumps(document | extra))
    command = [sys.executable, "-m", "glm5lab.gpu_check.child", str(case_file), str(answers)]
    with log.open("w") as stream:
        child = subprocess.Popen(
            command,
            env=child_environment() | case.env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            status = child.wait()
    lines = log.read_text().splitlines()
    if status or not answers.is_file():
        return {"error": f"exit {status}, see {log}: " + " | ".join(lines[-3:])}
    compiled = [line for line in lines if COMPILED in line and "will use mode" not in line]
    return json.loads(answers.read_text()) | {"compiled": compiled}

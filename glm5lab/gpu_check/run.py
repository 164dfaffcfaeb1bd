"""Run engine cases in child processes, several at a time, and keep their answers."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5lab.env import child_environment, find_gpus
from glm5lab.gpu_check.cases import HF, LENGTHS, EngineCase
from glm5lab.gpu_check.turns import Turns

CHILD = ("-m", "glm5lab.gpu_check.child")  # what Python runs
COMPILED = "during inference"  # vLLM's JIT monitor, after the server is ready


def run_cases(
    cases: Sequence[EngineCase],
    models: dict[str, Path],
    out: Path,
    at_once: int,
    timeout_s: float,
    extra: dict[str, Any] | None = None,
    echo: Callable[[str], None] = print,
    in_turns: bool = False,
) -> dict[str, dict[str, Any]]:
    """Answers of every case that ran; what a failed one said stands in OUT/NAME.log.

    Args:
        cases: what to run.
        models: kind -> folder.
        out: folder for cases, answers and logs.
        at_once: children side by side; those for one GPU are dealt out to all there are.
        timeout_s: seconds a child may take; in turns, to start, and again for what it measures.
        extra: further entries of every case file, such as "speed".
        echo: where lines go.
        in_turns: `at_once` children start side by side, and when all of them have, they measure in
            turns, see `Turns`; then the next ones.
    """
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    gpus = dealt(cases, visible_gpus())
    size = at_once if in_turns else max(len(cases), 1)
    for first in range(0, len(cases), size):
        group = cases[first : first + size]
        with ThreadPoolExecutor(at_once) as pool, Children() as children:
            folder = out / f"turns-{first}" if in_turns else None
            turns = Turns(folder, timeout_s, children.stop) if folder else None
            jobs = {
                case.name: pool.submit(
                    run_case,
                    replace(case, env=gpus[case.name] | case.env),
                    models[case.kind],
                    out,
                    None if folder else timeout_s,
                    extra or {},
                    children,
                    folder,
                )
                for case in group
            }
            try:
                if turns is not None:
                    turns.deal({stem(case): jobs[case.name] for case in group})
                for name, job in jobs.items():
                    found[name] = job.result()
                    echo(f"{name}: {found[name].get('error', 'done')}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return found


def visible_gpus() -> list[str]:
    """The GPUs that a child may see, by number."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(number) for number in range(len(find_gpus()))]
    return [name for name in given.split(",") if name]


def dealt(cases: Sequence[EngineCase], gpus: Sequence[str]) -> dict[str, dict[str, str]]:
    """Name of a case -> the variable that names its GPUs; one GPU needs none.

    Args:
        cases: an engine for one GPU gets the next one in turn, others the first ones.
        gpus: there are.
    """
    if len(gpus) < 2:
        return {case.name: {} for case in cases}
    turn = itertools.cycle(gpus)
    return {
        case.name: {
            "CUDA_VISIBLE_DEVICES": next(turn) if case.gpus == 1 else ",".join(gpus[: case.gpus])
        }
        for case in cases
    }


class Children:
    """Running children, each with a session of its own; those left at the end are killed."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.stop(name)

    def stop(self, name: str) -> None:
        """Kill the child of a name, if it runs."""
        child = self.running.get(name)
        if child is not None:
            kill(child)

    def wait(self, name: str, child: subprocess.Popen[bytes], timeout_s: float | None) -> int:
        """Its exit status; after so many seconds, if any are given, it is killed."""
        self.running[name] = child
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill(child)
            return child.wait()
        finally:
            del self.running[name]


def kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child's session, if it is still there."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, 9)


def stem(case: EngineCase) -> str:
    """A case's name in file names."""
    return case.name.replace(" ", "_")


def run_case(
    case: EngineCase,
    model: Path,
    out: Path,
    timeout_s: float | None,
    extra: dict[str, Any],
    children: Children,
    turns: Path | None = None,
) -> dict[str, Any]:
    """One child's answers, or {"error": its last lines}; see `run_cases`."""
    files = out / stem(case)
    options = case.options
    if case.backend != HF:
        options = {"attention_backend": case.backend} | options
    document = {
        "model": str(model),
        "backend": case.backend,
        "options": options,
        "lengths": list(LENGTHS),
        "new_tokens": 16,
        "together": case.together,
        "again": case.again,
        "sleeps": case.sleeps,
        "name": stem(case),
        "turns": str(turns) if turns is not None else None,
    }
    case_file, answers, log = (files.with_suffix(s) for s in (".case", ".json", ".log"))
    case_file.write_text(json.dumps(document | extra))
    command = [sys.executable, *CHILD, str(case_file), str(answers)]
    with log.open("w") as stream:
        child = subprocess.Popen(
            command,
            env=child_environment() | case.env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = children.wait(stem(case), child, timeout_s)
    lines = log.read_text().splitlines()
    if status or not answers.is_file():
        return {"error": f"exit {status}, see {log}: " + " | ".join(lines[-3:])}
    compiled = [line for line in lines if COMPILED in line and "will use mode" not in line]
    return json.loads(answers.read_text()) | {"compiled": compiled}

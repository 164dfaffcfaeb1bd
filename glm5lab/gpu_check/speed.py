"""Time per output token and time to first token of a running engine, step by step."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median_low
from typing import Any

from glm5lab.gpu_check.child import prompt


def measure(
    llm: Any,
    wanted: dict[str, Any],
    part: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """Medians over rounds, beside every round; each entry of a list is a part.

    Args:
        llm: a running vllm.LLM.
        wanted: "requests" (how many at once), "context" (tokens of their prompts), "steps" (decode
            steps a round), "rounds", and "first": for the time to the first token a list of
            "length" (tokens of a prompt), "warm" (prompts before those that count), "rounds".
            Entries for the same number or length join their rounds.
        part: a part is measured within one of these, which may wait for other engines.

    Returns:
        "ms_per_token": requests -> ms of a decode step; "first_ms": length -> ms.
    """
    engine, rounds = llm.llm_engine, wanted["rounds"]
    steps: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {}
    for count in wanted["requests"]:
        with part():
            times = step_ms(engine, count, wanted["context"], wanted["steps"], rounds)
        steps.setdefault(str(count), []).extend(times)
    for entry in wanted["first"]:
        length, warm = entry["length"], entry["warm"]
        with part():
            times = [first_ms(engine, length, seed) for seed in range(warm + entry["rounds"])]
        first.setdefault(str(length), []).extend(times[warm:])
    return {"ms_per_token": medians(steps), "first_ms": medians(first)}


def medians(times: dict[str, list[float]]) -> dict[str, Any]:
    """All rounds of each entry, and their median."""
    return {name: {"rounds": t, "median": median_low(t)} for name, t in times.items()}


def step_ms(engine: Any, count: int, context: int, steps: int, rounds: int) -> list[float]:
    """Milliseconds of a decode step of `count` requests, one figure a round of `steps`."""
    names = submit(engine, [prompt(context, 100 + i) for i in range(count)], 4096)
    seen: set[str] = set()
    while len(seen) < count:
        seen |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    for _ in range(8):
        engine.step()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        times.append((time.perf_counter() - started) / steps * 1e3)
    engine.abort_request(names)
    drain(engine)
    return times


def first_ms(engine: Any, length: int, seed: int) -> float:
    """Milliseconds from a request to its first token."""
    prompts = [prompt(length, 7000 + seed)]
    started = time.perf_counter()
    submit(engine, prompts, 1)
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass
    elapsed = (time.perf_counter() - started) * 1e3
    drain(engine)
    return elapsed


def submit(
    engine: Any, prompts: Sequence[list[int]], tokens: int, **sampling_options: int
) -> list[str]:
    """Hand greedy requests to the engine; returns their names."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling_options
    )
    names = [f"{time.perf_counter_ns()}-{i}" for i in range(len(prompts))]
    for name, tokens_in in zip(names, prompts, strict=True):
        engine.add_request(name, {"type": "token", "prompt_token_ids": tokens_in}, sampling)
    return names


def drain(engine: Any) -> None:
    """Step until nothing is left."""
    while engine.has_unfinished_requests():
        engine.step()

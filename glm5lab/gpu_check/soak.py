"""Many requests of random lengths with random aborts, beside a fixed sample: `backends soak`."""

import random
import time
from typing import Any

from glm5lab.gpu_check.child import prompt
from glm5lab.gpu_check.speed import drain, submit

AT_ONCE = 64
LONGEST = 6000
SAMPLE = 8  # prompts below the top-k: no near-tie of the indexer changes their answers
SAMPLE_LENGTH, SAMPLE_TOKENS = 600, 24


def soak(llm: Any, requests: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Serve random requests, abort some, and compare a fixed sample before and after.

    Args:
        llm: a running vllm.LLM.
        requests: how many are sent at least.
        seconds: for how long at least.
        seed: of lengths and aborts.

    Returns:
        "finished", "aborted", "same" (whether the sample's tokens are what they were),
        "memory_mib" (reserved by PyTorch: at the start, then ten times).
    """
    import torch

    engine, draw = llm.llm_engine, random.Random(seed)
    before = sample(engine)
    memory, started, sent, aborted = [torch.cuda.memory_reserved() >> 20], time.monotonic(), 0, 0
    running: set[str] = set()
    while sent < requests or time.monotonic() - started < seconds or running:
        open_ = sent < requests or time.monotonic() - started < seconds
        while open_ and len(running) < AT_ONCE:
            length = int(LONGEST ** draw.uniform(0.2, 1.0))
            running |= set(submit(engine, [prompt(length, sent)], draw.randint(1, 128)))
            sent += 1
        running -= {output.request_id for output in engine.step() if output.finished}
        if running and draw.random() < 0.02:
            victim = draw.choice(sorted(running))
            engine.abort_request([victim])
            running.discard(victim)
            aborted += 1
        if sent * 10 // requests >= len(memory):
            memory.append(torch.cuda.memory_reserved() >> 20)
    drain(engine)
    return {
        "sent": sent,
        "finished": sent - aborted,
        "aborted": aborted,
        "seconds": time.monotonic() - started,
        "same": sample(engine) == before,
        "memory_mib": memory,
    }


def sample(engine: Any) -> list[list[int]]:
    """Greedy tokens of the fixed sample, one request after the other."""
    answers = []
    for seed in range(SAMPLE):
        submit(engine, [prompt(SAMPLE_LENGTH, 9000 + seed)], SAMPLE_TOKENS)
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
        answers.append(tokens)
    return answers


def wrong(found: dict[str, Any]) -> list[str]:
    """One line for each thing that a soak must not show."""
    lines = [] if found["same"] else ["soak: the fixed sample got other tokens afterwards"]
    settled = found["memory_mib"][len(found["memory_mib"]) // 2 :]
    if max(settled) > min(settled):
        lines.append(f"soak: memory rises from {min(settled)} to {max(settled)} MiB")
    return lines

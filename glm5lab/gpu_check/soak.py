"""Many requests of random lengths with random aborts, beside a fixed sample: `backends soak`."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5lab.gpu_check.child import prompt
from glm5lab.gpu_check.speed import drain, submit

AT_ONCE = 64
LONGEST = 6000
SAMPLE = 8  # prompts below the top-k: no near-tie of the indexer changes their answers
SAMPLE_LENGTH, SAMPLE_TOKENS = 600, 24
# Among other requests products are summed in another order, and an expert near a tie may change:
# answers part. But the token that is then taken was among the likeliest of the sequential run,
# nearly always; a row of another request's would lead anywhere.
LIKELIEST, STRANGERS = 20, 0.02


def soak(llm: Any, requests: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Serve random requests, abort some, and compare a fixed sample before, among and after.

    Args:
        llm: a running vllm.LLM.
        requests: how many are sent at least.
        seconds: for how long at least.
        seed: of lengths and aborts.

    Returns:
        "sent", "finished" and "aborted" requests, "same" (whether the sample's tokens are
        afterwards what they were), "among" (how the sample was answered among other requests, see
        `compared`), "memory_mib" (reserved by PyTorch: at the start, then at each tenth of the
        requests).
    """
    import torch

    engine, load = llm.llm_engine, Load(random.Random(seed))
    before = sample(engine)
    memory, started = [torch.cuda.memory_reserved() >> 20], time.monotonic()
    while load.running or load.sent < requests or time.monotonic() - started < seconds:
        open_ = load.sent < requests or time.monotonic() - started < seconds
        if open_:
            load.fill(engine)
        load.step(engine)
        if load.sent * 10 // requests >= len(memory):
            memory.append(torch.cuda.memory_reserved() >> 20)
            if open_:
                load.add_sample(engine)
    drain(engine)
    return {
        "sent": load.sent,
        "finished": load.sent - load.aborted,
        "aborted": load.aborted,
        "seconds": time.monotonic() - started,
        "same": [a["tokens"] for a in sample(engine)] == [a["tokens"] for a in before],
        "among": compared(before, load.answers),
        "memory_mib": memory,
    }


@dataclass
class Load:
    """Random requests in flight.

    Attributes:
        draw: of lengths and aborts.
        sent, aborted: so far.
        running: names of requests.
        fixed: those of the fixed sample among them -> number in the sample.
        answers: finished ones of the fixed sample: number, tokens.
    """

    draw: random.Random
    sent: int = 0
    aborted: int = 0
    running: set[str] = field(default_factory=set)
    fixed: dict[str, int] = field(default_factory=dict)
    answers: list[tuple[int, list[int]]] = field(default_factory=list)

    def fill(self, engine: Any) -> None:
        """Send requests until as many run as shall."""
        while len(self.running) < AT_ONCE:
            length = int(LONGEST ** self.draw.uniform(0.2, 1.0))
            tokens = self.draw.randint(1, 128)
            self.running |= set(submit(engine, [prompt(length, self.sent)], tokens))
            self.sent += 1

    def add_sample(self, engine: Any) -> None:
        """Send the fixed sample, unless it still runs."""
        if not self.fixed:
            names = submit(engine, sample_prompts(), SAMPLE_TOKENS)
            self.fixed = {name: number for number, name in enumerate(names)}
            self.running |= self.fixed.keys()

    def step(self, engine: Any) -> None:
        """One step of the engine; now and then a request is aborted."""
        for output in engine.step():
            if output.finished:
                self.running.discard(output.request_id)
                if output.request_id in self.fixed:
                    number = self.fixed.pop(output.request_id)
                    self.answers.append((number, list(output.outputs[0].token_ids)))
        victims = sorted(self.running - self.fixed.keys())
        if victims and self.draw.random() < 0.02:
            victim = self.draw.choice(victims)
            engine.abort_request([victim])
            self.running.discard(victim)
            self.aborted += 1


def sample_prompts() -> list[list[int]]:
    """The fixed sample."""
    return [prompt(SAMPLE_LENGTH, 9000 + seed) for seed in range(SAMPLE)]


def sample(engine: Any) -> list[dict[str, Any]]:
    """Greedy "tokens" of the fixed sample one request after the other, each step's "likeliest"."""
    answers = []
    for tokens in sample_prompts():
        submit(engine, [tokens], SAMPLE_TOKENS, LIKELIEST)
        last: Any = None
        while engine.has_unfinished_requests():
            last = [output.outputs[0] for output in engine.step()] or last
        (answer,) = last
        likeliest = [list(step) for step in answer.logprobs]
        answers.append({"tokens": list(answer.token_ids), "likeliest": likeliest})
    return answers


def compared(
    before: Sequence[dict[str, Any]], among: Sequence[tuple[int, list[int]]]
) -> dict[str, int]:
    """How answers among other requests relate to the sequential ones.

    Args:
        before: see `sample`.
        among: number in the sample, tokens.

    Returns:
        "answers", "equal" ones, and "strangers": answers whose first other token is not among the
        likeliest of the sequential run.
    """
    found = {"answers": len(among), "equal": 0, "strangers": 0}
    for number, tokens in among:
        known = before[number]
        at = next((i for i, t in enumerate(known["tokens"]) if tokens[i : i + 1] != [t]), None)
        if at is None:
            found["equal"] += 1
        else:
            found["strangers"] += tokens[at : at + 1] == [] or (
                tokens[at] not in known["likeliest"][at]
            )
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    """One line for each thing that a soak must not show."""
    lines = [] if found["same"] else ["soak: the fixed sample got other tokens afterwards"]
    among = found["among"]
    if among["strangers"] > STRANGERS * among["answers"]:
        lines.append(
            f"soak: {among['strangers']} of {among['answers']} answers among other requests went "
            f"where the sequential run saw none of its {LIKELIEST} likeliest tokens"
        )
    settled = found["memory_mib"][len(found["memory_mib"]) // 2 :]
    if max(settled) > min(settled):
        lines.append(f"soak: memory rises from {min(settled)} to {max(settled)} MiB")
    return lines

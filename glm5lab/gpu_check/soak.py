"""Many requests of random lengths with random aborts, beside a fixed sample: `backends soak`.

What ten minutes on an H200 showed is in data/measurements/backend_soak.json: answers among other
requests 0.032 from what their tokens have alone, the worst 0.147.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from glm5lab.gpu_check.child import prompt
from glm5lab.gpu_check.speed import drain, submit

AT_ONCE = 64
LONGEST = 6000
SAMPLE = 8  # prompts below the top-k: no near-tie of the indexer changes their answers
SAMPLE_LENGTH, SAMPLE_TOKENS = 600, 24
# What was generated among other requests is judged alone: as a prompt, its tokens have nearly the
# log-probabilities that they had. Experts near a tie change there, in vLLM's own backends by 0.034
# in the mean of a prompt of 900 tokens and by up to 1.5 at one (backend_answers.json, alone and
# together); rows of another request's would move every token by more than 1.
MEAN, WORST = 0.07, 0.5


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
        `judged`), "memory_mib" (reserved by PyTorch: at the start, then whenever another tenth of
        `requests` was sent; see `runs`).
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
        "same": sample(engine) == before,
        "among": judged(engine, before, load.answers),
        "memory_mib": runs(memory),
    }


def runs(values: Iterable[int]) -> list[list[int]]:
    """Values in their order, equal ones behind each other as one pair: value, how many."""
    return [[value, len(list(equal))] for value, equal in groupby(values)]


@dataclass(frozen=True)
class Answer:
    """An answer to the fixed sample: number in it, tokens, their log-probabilities."""

    number: int
    tokens: tuple[int, ...]
    logprobs: list[float]


@dataclass
class Load:
    """Random requests in flight.

    Attributes:
        draw: of lengths and aborts.
        sent, aborted: so far.
        running: names of requests.
        fixed: those of the fixed sample among them -> number in the sample.
        answers: finished ones of the fixed sample.
    """

    draw: random.Random
    sent: int = 0
    aborted: int = 0
    running: set[str] = field(default_factory=set)
    fixed: dict[str, int] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

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
            names = submit(engine, sample_prompts(), SAMPLE_TOKENS, logprobs=1)
            self.fixed = {name: number for number, name in enumerate(names)}
            self.running |= self.fixed.keys()

    def step(self, engine: Any) -> None:
        """One step of the engine; now and then a request is aborted."""
        for output in engine.step():
            if output.finished:
                self.running.discard(output.request_id)
                if output.request_id in self.fixed:
                    number, made = self.fixed.pop(output.request_id), output.outputs[0]
                    steps = zip(made.token_ids, made.logprobs, strict=True)
                    known = [step[token].logprob for token, step in steps]
                    self.answers.append(Answer(number, tuple(made.token_ids), known))
        victims = sorted(self.running - self.fixed.keys())
        if victims and self.draw.random() < 0.02:
            victim = self.draw.choice(victims)
            engine.abort_request([victim])
            self.running.discard(victim)
            self.aborted += 1


def sample_prompts() -> list[list[int]]:
    """The fixed sample."""
    return [prompt(SAMPLE_LENGTH, 9000 + seed) for seed in range(SAMPLE)]


def sample(engine: Any) -> list[tuple[int, ...]]:
    """Greedy tokens of the fixed sample, one request after the other."""
    return [
        tuple(alone(engine, prompt_, SAMPLE_TOKENS).outputs[0].token_ids)
        for prompt_ in sample_prompts()
    ]


def alone(engine: Any, prompt_: list[int], tokens: int, **sampling_options: int) -> Any:
    """The last output of a request while nothing else runs."""
    submit(engine, [prompt_], tokens, **sampling_options)
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    return last


def judged(
    engine: Any, before: Sequence[tuple[int, ...]], answers: Sequence[Answer]
) -> dict[str, float]:
    """How answers among other requests relate to what the engine says of them alone.

    Args:
        engine: nothing else runs.
        before: the sample's tokens of the sequential run.
        answers: made among other requests.

    Returns:
        "answers"; "equal" ones of the sequential run's tokens; "mean", of all tokens, and "worst",
        the greatest mean of an answer: distance of their log-probabilities to those which the same
        tokens have as a prompt.
    """
    prompts, known, distances = sample_prompts(), dict[tuple[int, ...], list[float]](), []
    for answer in answers:
        key = (answer.number, *answer.tokens)
        if key not in known:
            whole = [*prompts[answer.number], *answer.tokens]
            steps = alone(engine, whole, 1, prompt_logprobs=0).prompt_logprobs
            last = range(len(whole) - len(answer.tokens), len(whole))
            known[key] = [steps[at][whole[at]].logprob for at in last]
        gaps = [abs(a - b) for a, b in zip(answer.logprobs, known[key], strict=True)]
        distances.append(sum(gaps) / len(gaps))
    return {
        "answers": len(answers),
        "equal": sum(answer.tokens == before[answer.number] for answer in answers),
        "mean": sum(distances) / max(len(distances), 1),
        "worst": max(distances, default=0.0),
    }


def wrong(found: dict[str, Any]) -> list[str]:
    """One line for each thing that a soak must not show."""
    lines = [] if found["same"] else ["soak: the fixed sample got other tokens afterwards"]
    among = found["among"]
    if among["mean"] > MEAN or among["worst"] > WORST:
        lines.append(
            f"soak: answers among other requests have log-probabilities {among['mean']:.3f} from "
            f"those they have alone (at most {MEAN}), one of them {among['worst']:.3f} ({WORST})"
        )
    memory = [mib for mib, count in found["memory_mib"] for _ in range(count)]
    settled = memory[len(memory) // 2 :]
    if max(settled) > min(settled):
        lines.append(f"soak: memory rises from {min(settled)} to {max(settled)} MiB")
    return lines

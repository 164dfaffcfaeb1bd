"""Layer 5 under load, and with two workers: the same answers as one request at a time gets."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults import Victim, victim

from glm5lab.serving.client import Client, ClientError

# Prompt and answer together no longer than top-k: longer ones may differ with the batch's
# composition, where two rows nearly tie for the last place among the selected.
TOP_K, ANSWER = 16, 6
OPTIONS = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
WORKERS, REQUESTS, KINDS = 16, 200, 25


def prompts(chance: random.Random) -> list[list[int]]:
    """Token ids of the sample's text vocabulary, of every length that fits."""
    lengths = [1 + number % (TOP_K - ANSWER) for number in range(KINDS)]
    return [[chance.randrange(16, 256) for _ in range(length)] for length in lengths]


def ask(client: Client, prompt: list[int], abort: bool) -> str | None:
    """The answer; None for a request that is left after its first piece."""
    if not abort:
        return client.completion(prompt, **OPTIONS)
    stream = client.stream_completion(prompt, max_tokens=500, ignore_eos=True)
    next(stream)
    stream.close()
    return None


def keyed(server: Victim) -> Client:
    """A client with the generated key, which is shown once, logged nowhere, and demanded."""
    text = server.text()
    (key,) = re.findall(r"^API key, generated and shown only here: (\S{32,})$", text, re.M)
    assert text.count(key) == 1
    assert key not in server.log.read_text()
    for wrong in (None, key[:-1]):
        with pytest.raises(ClientError, match=r"401 .*give the server's API key"):
            Client(server.client.url, api_key=wrong).models()
    return Client(server.client.url, api_key=key)


@pytest.mark.slow
def test_200_requests_16_at_a_time_with_aborts_equal_sequential_ones(sample_f32):
    chance = random.Random(0)
    kinds = prompts(chance)
    work = [(kinds[n % KINDS], chance.random() < 0.2) for n in range(REQUESTS)]
    assert 20 < sum(abort for _, abort in work) < 60
    # Bound to every address, so that all of it is asked with the key.
    with victim(sample_f32, options=("--host", "0.0.0.0")) as server:
        server.wait_ready()
        server.client = keyed(server)
        alone = {tuple(prompt): server.client.completion(prompt, **OPTIONS) for prompt in kinds}
        assert len(set(alone.values())) > KINDS // 2
        with ThreadPoolExecutor(WORKERS) as pool:
            answers = list(pool.map(lambda item: ask(server.client, *item), work))
        for (prompt, abort), answer in zip(work, answers, strict=True):
            assert answer == (None if abort else alone[tuple(prompt)])
        assert server.works()
        assert server.interrupt() == 0
        assert server.leftovers() == []


@pytest.mark.slow
def test_two_workers_answer_as_one(sample_f32, monkeypatch):
    # Each worker would otherwise ask for a NUMA node of its own.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # The workers wait for each other by spinning; more threads than cores take minutes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kinds = prompts(random.Random(1))[:8]
    answers = []
    for ranks in ("1", "2"):
        with victim(sample_f32, options=("--tp", ranks)) as server:
            server.wait_ready()
            assert sum(role.startswith("worker") for role in server.tree()) == int(ranks)
            answers.append([server.client.completion(prompt, **OPTIONS) for prompt in kinds])
            assert server.interrupt() == 0
            assert server.leftovers() == []
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 4

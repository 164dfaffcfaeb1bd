"""One request with known properties, before anybody else's: a server can be up and wrong."""

from math import isfinite
from typing import Any

from glm5lab.serving.client import Client, ClientError
from glm5lab.serving.command import ServerError

PROMPT = "GLM-5 is"
TOKENS = 8
# vLLM gives -9999 for a probability of nothing; none of a chosen token is near that.
SMALLEST = -1000.0


def smoke(client: Client) -> str:
    """Ask twice for the same few tokens; a line that says what was seen.

    Raises:
        ServerError: no answer, a log-probability that is none, or two different answers at
            temperature 0.
    """
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "seed": 0, "logprobs": 1}
    options["ignore_eos"] = True
    try:
        first, second = (client.complete(PROMPT, **options) for _ in range(2))
    except ClientError as error:
        raise ServerError(f"the smoke request failed: {error}") from error
    problems = [*_problems(first), *_problems(second)]
    if not problems and _tokens(first) != _tokens(second):
        problems = [f"two answers at temperature 0 differ: {_tokens(first)}, {_tokens(second)}"]
    if problems:
        raise ServerError(f"the smoke request for {PROMPT!r} failed: {problems[0]}")
    return f"smoke: {TOKENS} tokens, log-probabilities finite, the same twice at temperature 0"


def _tokens(choice: dict[str, Any]) -> list[str]:
    return [str(token) for token in choice["logprobs"]["tokens"]]


def _problems(choice: dict[str, Any]) -> list[str]:
    """What is wrong with one answer."""
    found = choice.get("logprobs") or {}
    values = found.get("token_logprobs") or []
    problems = []
    if len(values) != TOKENS:
        problems.append(f"{TOKENS} tokens were asked for, {len(values)} came")
    odd = [v for v in values if v is None or not isfinite(v) or not SMALLEST < v <= 1e-6]
    if odd:
        problems.append(f"a log-probability is {odd[0]}; NaN in the model's output looks like this")
    return problems

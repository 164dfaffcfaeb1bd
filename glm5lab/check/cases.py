"""What every side of a check is asked: the same token ids, a row of log-probabilities each."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm5lab.errors import InputError

NORMAL_TOKEN = 1  # gguf.TokenType.NORMAL


@dataclass(frozen=True)
class Case:
    """Token ids given to everybody.

    Row i is the distribution of the token that follows `ids[: i + 1]`.

    Attributes:
        prompt: ids that are prefilled in one call.
        forced: ids that are then fed one by one, whatever the model itself would choose.
    """

    prompt: tuple[int, ...]
    forced: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and forced ids in order; as many as there are rows."""
        return self.prompt + self.forced


@dataclass(frozen=True)
class Candidates:
    """The engine's side of a case: log-probabilities of some or all tokens.

    Attributes:
        case: the ids they belong to.
        tokens: int64 [rows, candidates], token ids.
        logprobs: float32 [rows, candidates], natural logarithms.
        vocab_size: how many tokens the model knows.
    """

    case: Case
    tokens: np.ndarray
    logprobs: np.ndarray
    vocab_size: int

    @classmethod
    def of(cls, case: Case, logprobs: np.ndarray, top: int | None = None) -> "Candidates":
        """From rows of the whole vocabulary [rows, vocab]: all tokens, or the `top` most likely."""
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :top]
        return cls(case, order, np.take_along_axis(logprobs, order, 1), logprobs.shape[1])


def normal_tokens(metadata: Mapping[str, Any], file: str) -> list[int]:
    """Ids of the ordinary tokens (no special, unused or padding tokens) of a GGUF file."""
    types = metadata.get("tokenizer.ggml.token_type")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if types is None and tokens is None:
        raise InputError(file, "holds no tokenizer", "use a file with tokenizer.ggml.* metadata")
    if types is None:
        return list(range(len(tokens or ())))
    return [i for i, kind in enumerate(types) if kind == NORMAL_TOKEN]


def random_prompts(tokens: Sequence[int], lengths: Sequence[int], seed: int) -> list[Case]:
    """One prompt a length, drawn from `tokens`; a prompt depends on its length and seed only."""
    if not tokens:
        raise ValueError("tokens is empty: expected at least one token id to draw prompts from")
    bad = [n for n in lengths if n < 1]
    if bad or not lengths:
        raise ValueError(f"lengths must be positive numbers of tokens, got {list(lengths)}")
    cases = []
    for length in lengths:
        rng = random.Random(f"glm5lab {seed} {length}")
        cases.append(Case(tuple(rng.choices(tokens, k=length))))
    return cases


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities over the last axis, float32, summed in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x.astype(np.float32)

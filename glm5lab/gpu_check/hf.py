"""Referee: Hugging Face transformers on the GPU, with the same weights and prompts.

Attention is its plain "eager" one: every score of a prompt against every key, of which the
selected ones count. A prompt is therefore fed in chunks behind a growing cache.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5lab.errors import CheckError

if TYPE_CHECKING:
    import torch

CHUNK = 512  # tokens; the indexer's scores of 30,000 keys then take 2 GB
LIKELIEST = 5


class HfModel:
    """GLM-5 in transformers.

    Args:
        folder: config.json and safetensors.
        dtype: "bfloat16" or "float32".
        device: of torch.

    Raises:
        CheckError: the folder lacks a parameter.
    """

    def __init__(self, folder: Path, dtype: str, device: str = "cuda") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        if missing := report["missing_keys"]:
            raise CheckError(f"{folder} lacks {len(missing)} parameters: {sorted(missing)[:5]}")
        self.model = model.to(device).eval()
        self.device = device

    def answer(self, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """Greedy tokens, their log-probabilities and those of the prompt, as `child.answer`.

        Args:
            prompt: token numbers.
            new_tokens: how many to generate.
        """
        import torch

        cache: Any = None
        known: list[float] = []
        tokens: list[int] = []
        steps: list[dict[str, float]] = []
        with torch.inference_mode():
            for start in range(0, len(prompt), CHUNK):
                rows, cache = self._logprobs(prompt[start : start + CHUNK], cache)
                following = torch.tensor(prompt[start + 1 : start + CHUNK + 1], device=self.device)
                known += rows[: len(following)].gather(1, following[:, None])[:, 0].tolist()
            for _ in range(new_tokens):
                values, numbers = rows[-1].topk(LIKELIEST)
                likeliest = zip(numbers.tolist(), values.tolist(), strict=True)
                steps.append({str(number): value for number, value in likeliest})
                tokens.append(int(numbers[0]))
                rows, cache = self._logprobs(tokens[-1:], cache)
        return {"tokens": tokens, "logprobs": steps, "prompt": known, "cached": 0}

    def _logprobs(self, tokens: Sequence[int], cache: Any) -> "tuple[torch.Tensor, Any]":
        """Log-probabilities [tokens, vocabulary] behind a cache, and the cache with them."""
        import torch

        given = torch.tensor([list(tokens)], device=self.device)
        out = self.model(given, past_key_values=cache, use_cache=True, return_dict=True)
        return out.logits[0].float().log_softmax(-1), out.past_key_values

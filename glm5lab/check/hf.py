"""Referee 1: HF transformers, float32, eager attention, incremental decoding.

Beside log-probabilities it reports how close every top-k choice was (which keys the indexer keeps,
which experts the router takes), and can take the runner-up instead of the last winner at one place:
that is the proof that a differing row differs because of a near-tie and of nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5lab.check.cases import Case, log_softmax
from glm5lab.check.hf_weights import ReferenceTensors, parameters
from glm5lab.errors import CheckError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class Choice:
    """One top-k choice of the model: `kind` ("indexer" or "expert") of `layer` for `row`."""

    row: int
    layer: int
    kind: str


@dataclass
class Judgement:
    """What the referee says about one case.

    Attributes:
        logprobs: float32 [rows, vocab].
        gaps: for every choice that left something out, the distance between the last winner and
            the runner-up, relative to the largest score of that row; 0 is an exact tie.
    """

    logprobs: np.ndarray
    gaps: dict[Choice, float] = field(default_factory=dict)

    def ties(self, row: int, below: float) -> list[tuple[Choice, float]]:
        """The choices of one row that were closer than `below`, closest first."""
        close = [(c, g) for c, g in self.gaps.items() if c.row == row and g < below]
        return sorted(close, key=lambda item: item[1])


class HfReferee:
    """GLM-5 in transformers with the weights of a GGUF file.

    Args:
        path: any shard of the file.

    Raises:
        CheckError: transformers cannot be imported or does not know the architecture.
        InputError: the file cannot be used.
    """

    def __init__(self, path: str | Path) -> None:
        from glm5lab.gguf.config import hf_config
        from glm5lab.gguf.reader import open_gguf

        model = open_gguf(path)
        blocks = int(model.metadata[f"{model.architecture}.block_count"])
        self.model = build_model(hf_config(model), ReferenceTensors(model.files, blocks))

    def judge(self, case: Case, swaps: Sequence[Choice] = ()) -> Judgement:
        """Log-probabilities of every row: the prompt in one call, then token by token.

        Args:
            case: the token ids.
            swaps: choices at which the runner-up replaces the last winner.
        """
        import torch

        watch = TopkWatch(frozenset(swaps))
        rows, cache, start = [], None, 0
        steps = [case.prompt, *((token,) for token in case.forced)]
        with torch.inference_mode(), watch.attached(self.model):
            for step in steps:
                watch.first_row = start
                out = self.model(
                    torch.tensor([step]), past_key_values=cache, use_cache=True, return_dict=True
                )
                cache, start = out.past_key_values, start + len(step)
                rows.append(out.logits[0].float().numpy())
        return Judgement(log_softmax(np.concatenate(rows)), watch.gaps)


def build_model(config: dict[str, Any], tensors: ReferenceTensors) -> Any:
    """`GlmMoeDsaForCausalLM` in float32; parameters are filled one by one from an empty model."""
    import torch

    try:
        from transformers import AutoModelForCausalLM, GlmMoeDsaConfig
    except ImportError as error:
        raise CheckError(
            f"the referee hf needs transformers with GLM-5 ({error}); "
            "install transformers 5.17 or later"
        ) from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            GlmMoeDsaConfig(**config),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, value in parameters(tensors, shapes):
        model.load_state_dict({name: value}, strict=False, assign=True)
    # The rotary table is computed, never stored, so the empty model has none.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    empty = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise CheckError(f"the referee hf left {len(empty)} parameters empty: {empty[:5]}")
    return model.eval()


class TopkWatch:
    """Reads, and where asked changes, every `topk` inside HF's indexers and routers.

    HF's modules return indices, not scores; a torch function mode sees the call that turns one into
    the other, so no formula of theirs is repeated here.
    """

    def __init__(self, swaps: frozenset[Choice]) -> None:
        self.swaps = swaps
        self.gaps: dict[Choice, float] = {}
        self.first_row = 0
        self._experts = 0
        self._inside: tuple[int, str, int] | None = None  # layer, kind, k

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Watches `model` inside the `with` block."""
        from torch.overrides import TorchFunctionMode

        watch = self
        self._experts = model.config.n_routed_experts

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                if getattr(func, "__name__", "") == "topk" and watch._chooses(args[0]):
                    return watch._seen(args[0], result)
                return result

        handles = []
        for layer, block in enumerate(model.model.layers):
            if block.self_attn.indexer is not None:
                k = model.config.index_topk
                handles += self._bracket(block.self_attn.indexer, layer, "indexer", k)
            if hasattr(block.mlp, "gate"):
                k = model.config.num_experts_per_tok
                handles += self._bracket(block.mlp.gate, layer, "expert", k)
        try:
            with Mode():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _bracket(self, module: Any, layer: int, kind: str, k: int) -> list[Any]:
        def enter(*_: Any) -> None:
            self._inside = (layer, kind, k)

        def leave(*_: Any) -> None:
            self._inside = None

        before: Callable[..., Any] = module.register_forward_pre_hook
        return [before(enter), module.register_forward_hook(leave)]

    def _chooses(self, scores: "torch.Tensor") -> bool:
        """Whether this topk is a choice that leaves something out."""
        if self._inside is None or scores.shape[-1] <= self._inside[2]:
            return False
        # A router first ranks its groups, on [tokens, groups, experts] and [tokens, groups].
        return self._inside[1] == "indexer" or scores.shape == (len(scores), self._experts)

    def _seen(self, scores: "torch.Tensor", result: Any) -> Any:
        """Notes the gaps of one call on `scores` [..., n]; returns the (changed) result."""
        import torch

        assert self._inside is not None
        layer, kind, k = self._inside
        flat = scores.reshape(-1, scores.shape[-1])
        values, order = flat.topk(k + 1, dim=-1)
        # The causal mask adds float32's minimum (or -inf): such a runner-up was never a candidate.
        masked = flat < torch.finfo(flat.dtype).min / 2
        scale = flat.masked_fill(masked, 0.0).abs().amax(-1).clamp_min(1e-30)
        gaps = ((values[:, k - 1] - values[:, k]) / scale).tolist()
        nothing_left = masked.gather(-1, order[:, k:]).flatten().tolist()
        indices = result.indices.reshape(-1, k).clone()
        for at, gap in enumerate(gaps):
            if nothing_left[at]:
                continue
            choice = Choice(self.first_row + at, layer, kind)
            self.gaps[choice] = gap
            if choice in self.swaps:
                loser = indices[at] == order[at, k - 1]
                indices[at] = torch.where(loser, order[at, k], indices[at])
        return type(result)((result.values, indices.reshape(result.indices.shape)))

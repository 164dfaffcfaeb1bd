"""vLLM's model loader for GGUF files, with an audit at its end; vLLM loads this module.

Weights are dequantized and handed to the model under their Hugging Face names; vLLM's own code
fuses and slices them. The audit watches every parameter's weight loader.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import is_pp_missing_parameter

from glm5lab.errors import CheckError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading import transforms
from glm5lab.loading.names import NameMapping, hf_names
from glm5lab.loading.prepare import open_prepared
from glm5lab.loading.reconcile import require_complete

logger = init_logger("vllm.glm5lab")


class GgufModelLoader(BaseModelLoader):
    """Load format "glm5lab": a prepared folder's GGUF shards into vLLM's GLM-5 model."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download: the shards are local files."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill every parameter of the model.

        Raises:
            InputError: the folder or its shards cannot be used.
            CheckError: the audit found parameters or tensors that were not handled.
        """
        gguf = open_prepared(model_config.model)
        mappings = require_complete(gguf, hf_config(gguf)).loaded
        audit = LoadAudit(model)
        with audit.watch():
            model.load_weights(audit.announce(progress(gguf, mappings)))  # type: ignore[operator]
        audit.require_complete(expected_loads(gguf, mappings))
        logger.info(
            "Loaded %d tensors of %s into %d parameters; each parameter was filled, each tensor "
            "was used.",
            len(mappings),
            gguf.path.name,
            len(audit.parameters),
        )


def progress(
    gguf: GgufModel, mappings: Sequence[NameMapping]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`transforms.hf_weights` with a progress bar over dequantized bytes."""
    total = sum(4 * prod(gguf.tensors[m.gguf].shape) for m in mappings)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Dequantizing", mininterval=1.0) as bar:
        for name, tensor in transforms.hf_weights(gguf, mappings):
            yield name, tensor
            bar.update(tensor.nbytes)


def expected_loads(gguf: GgufModel, mappings: Sequence[NameMapping]) -> dict[str, str]:
    """Hugging Face name -> the vLLM parameter that it must reach."""
    return {
        name: mapping.vllm
        for mapping in mappings
        for name in hf_names(mapping, gguf.tensors[mapping.gguf].shape[0])
    }


class LoadAudit:
    """Records which tensor went into which parameter, and proves that nothing was left out."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.loads: Counter[tuple[str, str]] = Counter()  # (HF name, vLLM parameter)
        self.elsewhere: set[str] = set()  # experts that another rank holds
        self._current = ""

    def announce(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass weights through, remembering the one that is being loaded."""
        for name, tensor in weights:
            self._current = name
            yield name, tensor

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record every call of a parameter's weight loader while the context is open."""
        originals = {}
        for name, parameter in self.parameters.items():
            original = getattr(parameter, "weight_loader", None)
            originals[name] = original
            recorder = self._recorder(name, original or default_weight_loader)
            parameter.weight_loader = recorder  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for name, original in originals.items():
                if original is None:
                    del self.parameters[name].weight_loader  # type: ignore[attr-defined]
                else:
                    self.parameters[name].weight_loader = original  # type: ignore[attr-defined]

    def _recorder(self, name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            if result is False:  # vLLM's answer for an expert that this rank does not hold
                self.elsewhere.add(self._current)
            else:
                self.loads[self._current, name] += 1
            return result

        return record

    def problems(self, expected: dict[str, str]) -> list[str]:
        """Sentences naming every tensor and parameter that was not handled exactly once."""
        found = []
        for hf, parameter in expected.items():
            times = self.loads.pop((hf, parameter), 0)
            absent = hf in self.elsewhere or is_pp_missing_parameter(parameter, self.model)
            if times != 1 and not (times == 0 and absent):
                found.append(f"{hf}: loaded {times} times into {parameter}, expected once")
        found += [f"{hf}: loaded into {p} unexpectedly" for hf, p in self.loads]
        filled = set(expected.values())
        found += [f"{p}: no tensor fills it" for p in self.parameters if p not in filled]
        return found

    def require_complete(self, expected: dict[str, str]) -> None:
        """Raise CheckError that lists the problems, if there are any."""
        problems = self.problems(expected)
        if problems:
            raise CheckError(
                f"the load audit found {len(problems)} problems: " + "; ".join(problems[:20])
            )

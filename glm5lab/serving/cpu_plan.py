"""What a server takes of a machine's memory where a CPU computes: there all weights are plain."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from glm5lab.architecture import has_indexer
from glm5lab.gguf.memory import GIB, PAGE_TOKENS
from glm5lab.gguf.placement import DTYPE_BYTES, placements
from glm5lab.gguf.reader import GgufModel

# The cache that vllm_plugin.cpu takes where nothing is asked for.
CACHE = 1 << 30
# What the processes hold beside weights and cache, once they have imported everything: measured
# for the API server and the engine together, and for a rank (proportional set size, Linux).
SERVER, RANK = 1000 << 20, 700 << 20
NAMES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True)
class CpuPlan:
    """Bytes of a server on a CPU.

    Attributes:
        dtype: of weights and cache.
        ranks: processes that hold a part each.
        weights: of all ranks.
        cache: of all ranks.
        loading: beside the weights while they are read: the largest tensor, twice.
        context: the longest request in tokens.
        asked: whether vLLM has to be told the cache's size, the context.
    """

    dtype: str
    ranks: int
    weights: int
    cache: int
    loading: int
    context: int
    asked: tuple[bool, bool]

    @property
    def processes(self) -> int:
        """What the programs themselves take."""
        return SERVER + self.ranks * RANK

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return self.weights + self.cache + self.loading + self.processes

    def sums(self) -> str:
        """The parts and their sum, in words."""
        parts = (
            (self.weights, f"weights in {self.dtype}"),
            (self.cache, "cache"),
            (self.loading, "for loading"),
            (self.processes, "programs"),
        )
        words = " + ".join(f"{what} {size / GIB:.2f}" for size, what in parts)
        return f"{words} = {self.needed / GIB:.2f} GiB"

    def options(self) -> list[str]:
        """Options of vLLM for a cache and a context that it would not choose itself."""
        size, length = self.asked
        words = ["--kv-cache-memory-bytes", str(self.cache // self.ranks)] if size else []
        return [*words, "--max-model-len", str(self.context)] if length else words

    def instead(self, memory: int) -> str:
        """What would fit in so much memory."""
        half = self.weights // 2 + self.cache + self.loading + self.processes
        if self.dtype == "float32" and half <= memory:
            return f"`-- --dtype bfloat16` would need {half / GIB:.2f}"
        return "`glm5lab plan FILE --gpus N --gpu-memory GiB` says which GPUs hold it"


def plan_cpu(
    model: GgufModel,
    config: Mapping[str, Any],
    dtype: str = "float32",
    tp: int = 1,
    pp: int = 1,
    context: int | None = None,
    cache_bytes: int | None = None,
    machines: int = 1,
) -> CpuPlan:
    """Count a server's bytes on a CPU, those of one machine.

    Args:
        model: an open GLM-5; its header is enough.
        config: its HF configuration.
        dtype: as vLLM takes it.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        context: tokens of the longest request; None for as many as the cache holds, up to the
            model's.
        cache_bytes: of one rank; None for the plugin's own, or more where the context needs it.
        machines: that hold the ranks, evenly.

    Raises:
        InputError: `tp` or `pp` cannot be.
    """
    dtype = str(config["dtype"]) if dtype == "auto" else NAMES.get(dtype, dtype)
    itemsize = DTYPE_BYTES.get(dtype, 4)
    placed = placements(model, {**config, "dtype": dtype}, tp, pp, gpu=False)
    weights = tp * sum(part.loaded for part in placed.values()) // machines
    ranks = max(1, tp * pp // machines)
    page = PAGE_TOKENS * token_bytes(config, itemsize)
    longest = int(config["max_position_embeddings"])
    wanted = context or longest
    cache = cache_bytes or CACHE
    if context is not None and cache_bytes is None:
        cache = max(cache, -(-context // PAGE_TOKENS) * page)
    length = min(wanted, cache // page * PAGE_TOKENS) if context is None else wanted
    largest = max(prod(tensor.shape) for tensor in model.tensors.values())
    asked = (cache != (cache_bytes or CACHE), length != longest)
    return CpuPlan(dtype, ranks, weights, ranks * cache, 2 * 4 * largest, length, asked)


def token_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Cache bytes of a token on a rank that holds all layers: rows, and index keys as wide."""
    layers = int(config["num_hidden_layers"])
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    indexers = sum(has_indexer(config, layer) for layer in range(layers))
    return int(itemsize * (layers * row + indexers * config["index_head_dim"]))

"""What one GPU of a pipeline stage holds: weights, cache rows, workspace."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from glm5lab.architecture import has_indexer
from glm5lab.gguf.placement import DTYPE_BYTES, Placement

GIB = 1 << 30
MIB = 1 << 20
PAGE_TOKENS = 64  # rows a page of the cache: vLLM's page for sparse MLA
KV_DTYPES = ("bf16", "fp8_ds_mla")
UTILIZATION = 0.92  # vLLM's default gpu_memory_utilization
SCALE_GROUP = 128  # values that share one float32 scale, in fp8_ds_mla rows and in index keys
# vLLM 0.33's defaults for a server (engine/arg_utils.py, get_batch_defaults): the card's GiB from
# which on they hold, tokens of a batch, sequences.
BATCHES = ((160, 16384, 1024), (70, 8192, 1024), (0, 2048, 256))
# vLLM sizes the buffer for gathered index keys by the longest context (mla/indexer.py): 40 rows a
# token, 16 beyond 256K, and may score as many bytes of logits at once as envs.py says.
LONG_CONTEXT = 256 << 10
INDEX_ROWS = (8 * 5, 8 * 2)
INDEX_LOGITS = 512 * MIB
# Guesses, not sums: CUDA context, NCCL buffers and CUDA graphs of a rank.
RUNTIME = 1536 * MIB


def kv_row_bytes(config: Mapping[str, Any], kv_dtype: str) -> int:
    """Bytes of a token's latent and rotary key in one layer: 1152 in bf16, 656 in fp8_ds_mla.

    Every tensor-parallel rank keeps the whole row, because all heads share it.
    """
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if kv_dtype == "fp8_ds_mla":
        return int(latent + latent // SCALE_GROUP * 4 + rope * 2)
    return int((latent + rope) * DTYPE_BYTES["bfloat16"])


def index_row_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a token's index key in one layer with an indexer: 128 in fp8 and a scale, 132."""
    width = config["index_head_dim"]
    return int(width + -(-width // SCALE_GROUP) * 4)


@dataclass(frozen=True)
class Workspace:
    """Bytes beside weights and cache, by what they are for; an estimate for vLLM 0.33.

    Attributes:
        index_keys: index keys gathered for a prefill, by the longest context.
        index_logits: scores of the indexer at once.
        activations: the widest moment of a forward pass, with the top-k positions.
        logits: of the last token of every sequence (last stage only).
        runtime: CUDA context, NCCL, CUDA graphs: a guess.
    """

    index_keys: int
    index_logits: int
    activations: int
    logits: int
    runtime: int = RUNTIME

    @property
    def total(self) -> int:
        """All of it."""
        return self.index_keys + self.index_logits + self.activations + self.logits + self.runtime


def workspace(
    config: Mapping[str, Any], tp: int, context: int, gpu_memory_gib: float, last_stage: bool
) -> Workspace:
    """Estimate of what a rank needs beside weights and cache.

    Args:
        config: HF configuration.
        tp: tensor-parallel ranks.
        context: longest request in tokens (vLLM's max_model_len).
        gpu_memory_gib: decides vLLM's default batch (BATCHES). For an A100 of 80 GB and a GB10 it
            is the smallest whatever their memory; they get counted more than they need.
        last_stage: whether the rank computes logits.
    """
    tokens, sequences = next(batch[1:] for batch in BATCHES if gpu_memory_gib >= batch[0])
    hidden = config["hidden_size"]
    heads = -(-config["num_attention_heads"] // tp)
    query = heads * (config["kv_lora_rank"] * 2 + config["qk_rope_head_dim"])
    # A token's experts: gate, up and their product, then one output each, summed afterwards.
    width = -(-config["moe_intermediate_size"] // tp)
    experts = config["num_experts_per_tok"] * (3 * width + hidden)
    token_bytes = DTYPE_BYTES["bfloat16"] * (4 * hidden + max(query, experts))
    return Workspace(
        index_keys=context * INDEX_ROWS[context > LONG_CONTEXT] * index_row_bytes(config),
        index_logits=INDEX_LOGITS,
        activations=tokens * (token_bytes + 4 * config["index_topk"]),
        # Gathered in bf16, sampled from in float32.
        logits=sequences * config["vocab_size"] * 6 if last_stage else 0,
    )


@dataclass(frozen=True)
class StageWeights:
    """A pipeline stage: what each of its ranks holds.

    Attributes:
        layers: its decoder layers.
        packed: bytes of weights that stay quantized.
        plain: bytes of weights as plain numbers (dequantized, norms).
        indexers: how many of its layers choose their own top-k.
    """

    layers: range
    packed: int
    plain: int
    indexers: int

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.packed + self.plain

    def token_bytes(self, config: Mapping[str, Any], kv_dtype: str) -> int:
        """Cache bytes of one token on a rank of this stage, without context parallelism."""
        rows = len(self.layers) * kv_row_bytes(config, kv_dtype)
        return rows + self.indexers * index_row_bytes(config)


def stage_weights(
    placed: Iterable[Placement], stages: list[range], config: Mapping[str, Any]
) -> list[StageWeights]:
    """The weights of each stage's ranks, from `placement.placements`."""
    packed, plain = [0] * len(stages), [0] * len(stages)
    for placement in placed:
        if placement.stage >= 0:
            (packed if placement.kept else plain)[placement.stage] += placement.loaded
    return [
        StageWeights(
            layers,
            packed[number],
            plain[number],
            sum(has_indexer(config, layer) for layer in layers),
        )
        for number, layers in enumerate(stages)
    ]

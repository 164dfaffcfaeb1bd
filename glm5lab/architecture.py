"""The dimensions of GLM-5 (HF `GlmMoeDsaForCausalLM`, GGUF `glm-dsa`) as one frozen record."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from glm5lab.errors import brief

FULL, SHARED = "full", "shared"
# Longer contexts without `indexer.types` are GLM-5.2 files from before that key existed.
LONG_CONTEXT = 1048576
# llama.cpp's LLAMA_MAX_LAYERS; a damaged count must not become a list of that length.
MAX_BLOCKS = 512
KINDS = ("full", "share", "mtp")


@dataclass(frozen=True)
class Glm5Architecture:
    """Every size that decides tensor shapes and the forward pass.

    Sizes are counts of elements unless noted; names follow HF's GlmMoeDsaConfig.

    Attributes:
        hidden_size: width of the residual stream.
        num_hidden_layers: decoder layers, without MTP layers.
        num_nextn_predict_layers: MTP layers behind them (GGUF counts both as blocks).
        num_attention_heads: query heads; keys and values are one shared latent.
        q_lora_rank: width of the query latent.
        kv_lora_rank: width of the cached latent.
        qk_rope_head_dim: rotary part of a head, also cached once a token.
        qk_nope_head_dim: non-rotary part of a query head.
        v_head_dim: width of a value head.
        n_routed_experts, num_experts_per_tok, n_shared_experts: experts there, used, always on.
        moe_intermediate_size, intermediate_size: inner width of one expert, of a dense MLP.
        first_k_dense_replace: leading layers with a dense MLP.
        vocab_size: rows of the embedding.
        index_n_heads, index_head_dim: heads of the lightning indexer and their width.
        index_topk: tokens that attention sees at most.
        indexer_types: "full" or "shared", one a decoder layer; shared layers reuse the
            previous full layer's selection and hold no indexer weights.
        rms_norm_eps: added to the mean square.
        rope_theta: base of the rotary frequencies.
        max_position_embeddings: longest context in tokens.
        routed_scaling_factor: factor on the routed experts' sum.
        n_group, topk_group: expert groups, and groups a token may use.
        norm_topk_prob: whether the used experts' weights are normalized to sum 1.
    """

    hidden_size: int = 6144
    num_hidden_layers: int = 78
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 64
    q_lora_rank: int = 2048
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_shared_experts: int = 1
    moe_intermediate_size: int = 2048
    intermediate_size: int = 12288
    first_k_dense_replace: int = 3
    vocab_size: int = 154880
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    indexer_types: tuple[str, ...] = (FULL,) * 78
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_position_embeddings: int = 202752
    routed_scaling_factor: float = 2.5
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True

    @property
    def block_count(self) -> int:
        """Blocks in the GGUF file: decoder layers and MTP layers."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head, both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached row: latent and rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def has_indexer(self, layer: int) -> bool:
        """Whether `layer` computes a selection of its own (MTP layers always do)."""
        return layer >= self.num_hidden_layers or self.indexer_types[layer] == FULL

    @classmethod
    def glm5(cls) -> "Glm5Architecture":
        """The published GLM-5: 744B parameters, 78 layers and one MTP layer."""
        return cls()

    @classmethod
    def tiny(cls, kind: str = "full") -> "Glm5Architecture":
        """Small enough for a CPU, with the real head sizes (512 + 64, 192, 256).

        Args:
            kind: "full" (indexer on every layer), "share" (IndexShare) or "mtp".

        16 index heads: with fewer, many scores are exactly 0 and ties decide. 12 experts:
        llama.cpp's quantizer takes any model with exactly 8 for Mixtral. RMS eps 1e-6: HF
        fixes that value in two of the norms, so any other would make its results differ.
        """
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        types = (FULL, FULL, SHARED, FULL, SHARED) if kind == "share" else (FULL,) * 5
        layers = 4 if kind == "mtp" else 5
        return cls(
            hidden_size=256,
            num_hidden_layers=layers,
            num_nextn_predict_layers=5 - layers,
            num_attention_heads=4,
            q_lora_rank=256,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=256,
            intermediate_size=512,
            first_k_dense_replace=1,
            vocab_size=512,
            index_n_heads=16,
            index_topk=16,
            indexer_types=types[:layers],
            rms_norm_eps=1e-6,
            max_position_embeddings=4096,
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Glm5Architecture":
        """The dimensions that a GGUF file's metadata give.

        Args:
            metadata: GGUF keys and values; `vocab_size` falls back to the token list's length.

        Raises:
            KeyError: a required key is missing (the key is the argument).
            ValueError: a key's value contradicts another's, or has the wrong type.
        """
        get = _Keys(metadata)
        blocks, nextn = get.whole("block_count"), get.whole("nextn_predict_layers", 0, least=0)
        layers = blocks - nextn
        if layers < 1:
            raise ValueError(f"block_count {blocks} with nextn_predict_layers {nextn}")
        if blocks > MAX_BLOCKS:
            raise ValueError(f"block_count {blocks} is above llama.cpp's limit of {MAX_BLOCKS}")
        rope = get.whole("rope.dimension_count")
        kv_lora = get.whole("attention.kv_lora_rank")
        if get.whole("attention.key_length", kv_lora + rope) != kv_lora + rope:
            raise ValueError(
                f"attention.key_length {get.whole('attention.key_length')} is not kv_lora_rank "
                f"{kv_lora} + rope.dimension_count {rope}"
            )
        nope = get.whole("attention.key_length_mla") - rope
        if nope < 1:
            raise ValueError(f"attention.key_length_mla is not above rope.dimension_count {rope}")
        context = get.whole("context_length")
        tokens = metadata.get("tokenizer.ggml.tokens")
        n_tokens = len(tokens) if isinstance(tokens, list) else None
        return cls(
            hidden_size=get.whole("embedding_length"),
            num_hidden_layers=layers,
            num_nextn_predict_layers=nextn,
            num_attention_heads=get.whole("attention.head_count"),
            q_lora_rank=get.whole("attention.q_lora_rank"),
            kv_lora_rank=kv_lora,
            qk_rope_head_dim=rope,
            qk_nope_head_dim=nope,
            v_head_dim=get.whole("attention.value_length_mla"),
            n_routed_experts=get.whole("expert_count"),
            num_experts_per_tok=get.whole("expert_used_count"),
            n_shared_experts=get.whole("expert_shared_count", least=0),
            moe_intermediate_size=get.whole("expert_feed_forward_length"),
            intermediate_size=get.whole("feed_forward_length"),
            first_k_dense_replace=get.whole("leading_dense_block_count", 0, least=0),
            vocab_size=get.whole("vocab_size", n_tokens),
            index_n_heads=get.whole("attention.indexer.head_count"),
            index_head_dim=get.whole("attention.indexer.key_length"),
            index_topk=get.whole("attention.indexer.top_k"),
            indexer_types=indexer_types(get.raw("attention.indexer.types"), layers, context),
            rms_norm_eps=get.real("attention.layer_norm_rms_epsilon"),
            rope_theta=get.real("rope.freq_base"),
            max_position_embeddings=context,
            routed_scaling_factor=get.real("expert_weights_scale", 1.0),
            n_group=get.whole("expert_group_count", 1, least=0),
            topk_group=get.whole("expert_group_used_count", 1, least=0),
            norm_topk_prob=bool(get.raw("expert_weights_norm", False)),
        )


def has_indexer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a decoder layer chooses its own top-k, by HF's configuration.

    IndexShare: the other layers use the choice of the last one before them that does.
    """
    types = config.get("indexer_types")
    return types is None or types[layer] == FULL


def indexer_types(values: Any, layers: int, context: int) -> tuple[str, ...]:
    """Which decoder layers run an indexer of their own.

    Args:
        values: `attention.indexer.types` (true = full; MTP layers may follow; one value stands
            for all layers), or None.
        layers: decoder layers.
        context: context length in tokens; decides when `values` is None.
    """
    if values is None:
        if context < LONG_CONTEXT:
            return (FULL,) * layers
        # GLM-5.2: full at 0, 1, 2, then every fourth layer from 6 on.
        return tuple(FULL if i < 3 or i % 4 == 2 else SHARED for i in range(layers))
    if isinstance(values, bool):
        values = [values] * layers
    if not isinstance(values, list) or len(values) < layers:
        raise ValueError(f"attention.indexer.types is not an array of {layers} values")
    for value in values[:layers]:
        if not isinstance(value, int) or value not in (0, 1):
            raise ValueError(
                f"attention.indexer.types holds {brief(value)}, expected true or false"
            )
    types = tuple(FULL if v else SHARED for v in values[:layers])
    if types[0] != FULL:
        raise ValueError("attention.indexer.types: layer 0 is shared, it has none to share with")
    return types


class _Keys:
    """Typed access to `glm-dsa.*` keys."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def raw(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"glm-dsa.{key}", default)

    def real(self, key: str, default: float | None = None) -> float:
        value = self.raw(key, default)
        if value is None:
            raise KeyError(f"glm-dsa.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ValueError(f"glm-dsa.{key} is {brief(value)}, not a number")
        # Metadata hold float32; 1e-5 should read as 1e-5 and not as 9.999999747378752e-06.
        return float(f"{value:.7g}")

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.raw(key, default)
        # Some writers store a value a layer where all layers agree.
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None:
            raise KeyError(f"glm-dsa.{key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"glm-dsa.{key} is {brief(value)}, not a whole number of at least {least}"
            )
        return value

"""The tensors that a GLM-5 file has to hold, with their shapes, from its configuration."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from glm5lab.loading.names import INSTEAD_OF, has_indexer

Shape = tuple[int, ...]


def outside_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes (torch order) of the tensors outside the blocks."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    # GLM-5 does not tie its embeddings, and vLLM's class for it never does: `lm_head` is a
    # parameter of its own, which a file without output.weight would leave unfilled.
    return {
        "token_embd.weight": (vocabulary, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (vocabulary, hidden),
    }


def attention_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of a block's attention tensors."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    v = config["v_head_dim"]
    return {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q_a.weight": (q_lora, hidden),
        "attn_q_a_norm.weight": (q_lora,),
        "attn_q_b.weight": (heads * (nope + rope), q_lora),
        "attn_kv_a_mqa.weight": (kv_lora + rope, hidden),
        "attn_kv_a_norm.weight": (kv_lora,),
        "attn_k_b.weight": (heads, kv_lora, nope),
        "attn_v_b.weight": (heads, v, kv_lora),
        "attn_output.weight": (hidden, heads * v),
    }


def indexer_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of the lightning indexer's tensors."""
    hidden, q_lora = config["hidden_size"], config["q_lora_rank"]
    heads, width = config["index_n_heads"], config["index_head_dim"]
    return {
        "indexer.attn_q_b.weight": (heads * width, q_lora),
        "indexer.attn_k.weight": (width, hidden),
        "indexer.proj.weight": (heads, hidden),
        "indexer.k_norm.weight": (width,),
        "indexer.k_norm.bias": (width,),
    }


def feed_forward_shapes(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    """Shapes of a block's feed-forward tensors, dense or experts."""
    hidden = config["hidden_size"]
    if layer < config["first_k_dense_replace"]:
        return gate_up_down("", config["intermediate_size"], hidden)
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes: dict[str, Shape] = {
        "ffn_gate_inp.weight": (experts, hidden),
        "exp_probs_b.bias": (experts,),
    }
    shapes |= gate_up_down("_exps", width, hidden, experts)
    if config["n_shared_experts"]:
        shapes |= gate_up_down("_shexp", width * config["n_shared_experts"], hidden)
    return shapes


def gate_up_down(suffix: str, width: int, hidden: int, *stack: int) -> dict[str, Shape]:
    """Shapes of a gated feed-forward's three matrices."""
    return {
        f"ffn_gate{suffix}.weight": (*stack, width, hidden),
        f"ffn_up{suffix}.weight": (*stack, width, hidden),
        f"ffn_down{suffix}.weight": (*stack, hidden, width),
    }


def fused_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of the tensors that some files hold in place of two (`names.INSTEAD_OF`)."""
    head = config["qk_nope_head_dim"] + config["v_head_dim"]
    width, hidden = config["moe_intermediate_size"], config["hidden_size"]
    return {
        "ffn_gate_up_exps.weight": (config["n_routed_experts"], 2 * width, hidden),
        "attn_kv_b.weight": (config["num_attention_heads"] * head, config["kv_lora_rank"]),
    }


def expected_shapes(
    config: Mapping[str, Any], present: Collection[str] = (), layers: Iterable[int] | None = None
) -> dict[str, Shape]:
    """Every GGUF tensor that GLM-5 needs, with its shape, the MTP block left out.

    Args:
        config: the model's HF configuration.
        present: names in the file; where a fused tensor is among them it takes the place of the
            two that it holds.
        layers: the blocks in question; None for all.
    """
    fused = fused_shapes(config)
    expected = outside_shapes(config)
    for layer in range(config["num_hidden_layers"]) if layers is None else layers:
        block = attention_shapes(config) | feed_forward_shapes(config, layer)
        if has_indexer(layer, config):
            block |= indexer_shapes(config)
        for role, replaced in INSTEAD_OF.items():
            if f"blk.{layer}.{role}" in present and replaced[0] in block:
                block = {r: s for r, s in block.items() if r not in replaced}
                block[role] = fused[role]
        expected |= {f"blk.{layer}.{role}": shape for role, shape in block.items()}
    return expected

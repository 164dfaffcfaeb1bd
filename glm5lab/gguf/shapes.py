"""Names and shapes of GLM-5's tensors in a GGUF file, from its dimensions.

Roles are names without their block ("attn_q_a.weight" of "blk.3.attn_q_a.weight"), as llama.cpp's
converter writes them (gguf-py, architecture glm-dsa). Shapes are in torch order, [..., out, in].
"""

from glm5lab.architecture import Glm5Architecture

Shape = tuple[int, ...]


def role_shapes(arch: Glm5Architecture) -> dict[str, Shape]:
    """Shape of every role, forms that only some files have included.

    These are `ffn_gate_up_exps` (gate rows first) in place of gate and up, `attn_kv_b` in place
    of `attn_k_b` and `attn_v_b`.
    """
    return (
        outside_shapes(arch)
        | _attention(arch)
        | _indexer(arch)
        | _dense(arch)
        | _experts(arch)
        | _shared_experts(arch)
        | _nextn(arch)
        | _fused(arch)
    )


def tensor_shapes(arch: Glm5Architecture) -> dict[str, Shape]:
    """Name and shape of each tensor that the converter writes, multi-token prediction included."""
    shapes = outside_shapes(arch)
    for layer in range(arch.block_count):
        shapes |= {f"blk.{layer}.{k}": v for k, v in block_shapes(arch, layer).items()}
    return shapes


def block_shapes(arch: Glm5Architecture, layer: int) -> dict[str, Shape]:
    """Roles and shapes of one block.

    Args:
        arch: the dimensions; they decide which blocks hold an indexer, experts, or the layer of
            multi-token prediction.
        layer: block number.
    """
    shapes = _attention(arch)
    if arch.has_indexer(layer):
        shapes |= _indexer(arch)
    if layer < arch.first_k_dense_replace:
        return shapes | _dense(arch)
    shapes |= _experts(arch)
    if arch.n_shared_experts:
        shapes |= _shared_experts(arch)
    return shapes | (_nextn(arch) if layer >= arch.num_hidden_layers else {})


def outside_shapes(arch: Glm5Architecture) -> dict[str, Shape]:
    """Shapes of the tensors outside the blocks."""
    # GLM-5 does not tie its embeddings, and vLLM's class for it never does: `lm_head` is a
    # parameter of its own, which a file without output.weight would leave unfilled.
    return {
        "token_embd.weight": (arch.vocab_size, arch.hidden_size),
        "output_norm.weight": (arch.hidden_size,),
        "output.weight": (arch.vocab_size, arch.hidden_size),
    }


def _attention(arch: Glm5Architecture) -> dict[str, Shape]:
    hidden, heads = arch.hidden_size, arch.num_attention_heads
    latent = arch.kv_lora_rank
    return {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q_a.weight": (arch.q_lora_rank, hidden),
        "attn_q_a_norm.weight": (arch.q_lora_rank,),
        "attn_q_b.weight": (heads * arch.qk_head_dim, arch.q_lora_rank),
        "attn_kv_a_mqa.weight": (arch.latent_dim, hidden),
        "attn_kv_a_norm.weight": (latent,),
        # Transposed a head: llama.cpp multiplies the query by it before attention.
        "attn_k_b.weight": (heads, latent, arch.qk_nope_head_dim),
        "attn_v_b.weight": (heads, arch.v_head_dim, latent),
        "attn_output.weight": (hidden, heads * arch.v_head_dim),
    }


def _indexer(arch: Glm5Architecture) -> dict[str, Shape]:
    width = arch.index_head_dim
    return {
        "indexer.attn_q_b.weight": (arch.index_n_heads * width, arch.q_lora_rank),
        "indexer.attn_k.weight": (width, arch.hidden_size),
        "indexer.proj.weight": (arch.index_n_heads, arch.hidden_size),
        "indexer.k_norm.weight": (width,),
        "indexer.k_norm.bias": (width,),
    }


def _dense(arch: Glm5Architecture) -> dict[str, Shape]:
    return _gate_up_down("", arch.intermediate_size, arch.hidden_size)


def _experts(arch: Glm5Architecture) -> dict[str, Shape]:
    experts = arch.n_routed_experts
    router: dict[str, Shape] = {
        "ffn_gate_inp.weight": (experts, arch.hidden_size),
        "exp_probs_b.bias": (experts,),
    }
    return router | _gate_up_down("_exps", arch.moe_intermediate_size, arch.hidden_size, experts)


def _shared_experts(arch: Glm5Architecture) -> dict[str, Shape]:
    width = arch.moe_intermediate_size * arch.n_shared_experts
    return _gate_up_down("_shexp", width, arch.hidden_size)


def _gate_up_down(suffix: str, width: int, hidden: int, *stack: int) -> dict[str, Shape]:
    """The three matrices of a gated feed-forward, stacked or not."""
    return {
        f"ffn_gate{suffix}.weight": (*stack, width, hidden),
        f"ffn_up{suffix}.weight": (*stack, width, hidden),
        f"ffn_down{suffix}.weight": (*stack, hidden, width),
    }


def _nextn(arch: Glm5Architecture) -> dict[str, Shape]:
    hidden = arch.hidden_size
    return {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
        # Copies of the model's own; published files leave them out.
        "nextn.embed_tokens.weight": (arch.vocab_size, hidden),
        "nextn.shared_head_head.weight": (arch.vocab_size, hidden),
        "nextn.shared_head_norm.weight": (hidden,),
    }


def _fused(arch: Glm5Architecture) -> dict[str, Shape]:
    experts, width = arch.n_routed_experts, arch.moe_intermediate_size
    rows = arch.num_attention_heads * (arch.qk_nope_head_dim + arch.v_head_dim)
    return {
        "ffn_gate_up_exps.weight": (experts, 2 * width, arch.hidden_size),
        "attn_kv_b.weight": (rows, arch.kv_lora_rank),
    }

"""Which quantization type each tensor of a sample has."""

from glm5lab.gguf.ggml_types import (
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    Q2_K,
    Q4_0,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
)
from glm5lab.gguf.quantize_rules import FALLBACK, K_BLOCK, quantized_type

TYPES = ("f32", "f16", "q8_0", "q4_k_m", "mix", "q2_k", "iq4_xs")

# A file as llama-quantize and publishers mix them: types differ inside the layers that vLLM
# fuses (q_a and kv_a, gate and up, wk and weights_proj), and from layer to layer.
MIX = {
    "token_embd": (Q4_K,),
    "output": (Q6_K,),
    "attn_q_a": (Q8_0,),
    "attn_q_b": (Q4_K,),
    "attn_kv_a_mqa": (Q6_K,),
    "attn_k_b": (Q4_K,),
    "attn_v_b": (Q5_K,),
    "attn_output": (Q5_K, Q4_K),
    "indexer.attn_q_b": (Q5_K,),
    "indexer.attn_k": (Q8_0,),
    "indexer.proj": (Q4_K,),
    "ffn_gate": (Q4_K,),
    "ffn_up": (Q6_K,),
    "ffn_down": (Q6_K,),
    "ffn_gate_exps": (Q4_K, IQ4_XS),
    "ffn_up_exps": (Q4_K, Q5_K),
    "ffn_down_exps": (Q6_K, Q4_K),
    "ffn_gate_shexp": (Q8_0,),
    "ffn_up_shexp": (Q5_K,),
    "ffn_down_shexp": (Q8_0, Q6_K),
}
UNIFORM = {"f32": F32, "f16": F16, "q8_0": Q8_0}
# Nearly uniform, as llama-quantize's files of these names are: what most tensors have, and those
# whose rows hold no block of 256. Its output matrix has Q6_K.
LIKE = {"q2_k": (Q2_K, Q4_0), "iq4_xs": (IQ4_XS, IQ4_NL)}
# llama.cpp keeps these F32 in every file: routing and norms are sensitive and small.
ALWAYS_F32 = ("ffn_gate_inp", "exp_probs_b")


def tensor_type(name: str, shape: tuple[int, ...], types: str, blocks: int) -> int:
    """GGML type number of one tensor.

    Args:
        name: GGUF name.
        shape: torch order.
        types: one of TYPES.
        blocks: blocks of the model; "q4_k_m" follows llama-quantize, which counts them.
    """
    if types == "q4_k_m":
        return quantized_type(name, shape, blocks, types)
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "blk" else 0
    role = ".".join(parts[2:-1] if parts[0] == "blk" else parts[:-1])
    if len(shape) < 2 or role in ALWAYS_F32:
        return F32
    if types in LIKE:
        if role == "output":
            return Q6_K
        return LIKE[types][bool(shape[-1] % K_BLOCK)]
    if types != "mix":
        # The converter keeps the indexer's head weights F32; only llama-quantize changes them.
        return F32 if role == "indexer.proj" else UNIFORM[types]
    choice = MIX.get(role, (Q4_K,))
    wanted = choice[layer % len(choice)]
    return FALLBACK.get(wanted, wanted) if shape[-1] % K_BLOCK else wanted

"""Which kernel multiplies a tensor of a given type, on a GPU and on the CPU.

On a GPU, weights stay quantized and vllm-gguf-plugin's kernels use them. Source: version 0.0.5,
quantization/utils.py (the lists of types), linear.py (few rows: MMVQ, a matrix by vector product;
more rows: MMQ, or dequantize and multiply), vocal_embeds.py and fused_moe.py (up to 64 tokens and
above). vLLM builds some layers without quantization; their tensors, and those of a type that no
kernel takes, are dequantized while loading. On the CPU that goes for every tensor.
"""

from functools import cache

from glm5lab.gguf.byte_order import PLAIN_BYTES

# Matrices that vLLM needs as plain numbers: kv_b joined from k and v and absorbed into queries,
# the index keys' projection and MTP's built without quantization, the router in full precision.
DEQUANTIZED = (
    "attn_k_b",
    "attn_v_b",
    "attn_kv_b",
    "indexer.attn_k",
    "indexer.proj",
    "ffn_gate_inp",
    "nextn.eh_proj",
)
UNQUANTIZED = frozenset({"F32", "F16", "BF16"})
STANDARD = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1"})
K_TYPES = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
I_TYPES = frozenset(
    {
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
        *("IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL"),
    }
)
# Types that the plugin's CUDA code reads wrongly, so that its slower Triton code is called. IQ3_S
# (ggml-common.h): an old table has 62 where the format says 60, of numbers that go up to 60.
TRITON = frozenset({"IQ3_S"})
MMQ = STANDARD | K_TYPES
QUANTIZED = MMQ | I_TYPES


def role_name(role: str) -> str:
    """A role without its last component: "attn_k_b.weight" -> "attn_k_b"."""
    return role.removesuffix(".weight").removesuffix(".bias")


def kernel(type_name: str, role: str, gpu: bool) -> str:
    """What computes with a tensor; "" where nothing can.

    Args:
        type_name: GGML type, such as "Q4_K".
        role: name inside its block ("ffn_up_exps.weight"), or the whole name outside the blocks.
        gpu: a GPU with vllm-gguf-plugin's kernels, or the CPU.

    Returns:
        "unquantized" (plain numbers, vLLM's own kernels), "dequantized" (while loading),
        "MMVQ + MMQ", "MMVQ + dequantize", "MoE MMVQ + MMQ", "MoE MMVQ", "Triton + dequantize",
        "MoE Triton", "dequantize rows", or "".
    """
    name = role_name(role)
    if type_name in UNQUANTIZED:
        return "unquantized"
    if not gpu or name in DEQUANTIZED or type_name not in QUANTIZED:
        return "dequantized" if can_dequantize(type_name) else ""
    if name == "token_embd":
        return "dequantize rows"
    if type_name in TRITON:
        return "MoE Triton" if name.endswith("_exps") else "Triton + dequantize"
    if name.endswith("_exps"):
        return "MoE MMVQ + MMQ" if type_name in MMQ else "MoE MMVQ"
    return "MMVQ + MMQ" if type_name in MMQ else "MMVQ + dequantize"


def is_packed(type_name: str, role: str, dimensions: int) -> bool:
    """Whether a tensor stays quantized on a GPU.

    Args:
        type_name: GGML type.
        role: as for `kernel`.
        dimensions: of its shape; vectors never are.
    """
    return dimensions > 1 and type_name in QUANTIZED and role_name(role) not in DEQUANTIZED


@cache
def can_dequantize(type_name: str) -> bool:
    """Whether the installed gguf package turns a type into numbers; asked, not listed."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    if type_name in PLAIN_BYTES:
        return True
    kind = getattr(GGMLQuantizationType, type_name, None)
    if kind not in GGML_QUANT_SIZES:
        return False
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, ValueError):
        return False
    return True


def gpu_here() -> bool:
    """Whether vLLM would run on a GPU on this machine."""
    from glm5lab.env import engine_distribution, engine_platform, find_gpus

    # Without vLLM a GPU still says what the file is meant for.
    return engine_platform(engine_distribution() or "vllm", find_gpus()) == "cuda"

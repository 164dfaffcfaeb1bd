"""Which type llama-quantize itself gives each tensor of a GLM-5 file.

Read from llama.cpp's src/llama-quant.cpp (commit 007dbbf); the tensor's name and shape, the
number of blocks and the requested file type decide.
"""

from glm5lab.gguf.ggml_types import F16, F32, IQ4_NL, IQ4_XS, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

K_BLOCK, SMALL_BLOCK = 256, 32

# File type -> type of most tensors, type of ffn_down in the layers that get more bits.
FILE_TYPES = {
    "q4_k_m": (Q4_K, Q6_K),
    "q5_k_m": (Q5_K, Q6_K),
    "q6_k": (Q6_K, Q6_K),
    "q8_0": (Q8_0, Q8_0),
}
# Where rows hold no whole block of 256: attn_k_b has rows of 192.
FALLBACK = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0, IQ4_XS: IQ4_NL}


def more_bits(layer: int, blocks: int) -> bool:
    """Whether a layer's ffn_down gets the larger type: both ends, and every third between.

    Args:
        layer: block number.
        blocks: blocks in the file, MTP blocks included.
    """
    first = blocks // 8
    return layer < first or layer >= 7 * blocks // 8 or (layer - first) % 3 == 2


def quantized_type(name: str, shape: tuple[int, ...], blocks: int, file_type: str) -> int:
    """GGML type number of one tensor.

    Args:
        name: GGUF name.
        shape: torch order, [..., out, in].
        blocks: blocks in the file, MTP blocks included.
        file_type: one of FILE_TYPES.

    Returns:
        F32 for what is never quantized: vectors, norms, the router.
    """
    parts = name.split(".")
    in_block = parts[0] == "blk"
    role = parts[2] if in_block else parts[0]
    if len(shape) < 2 or parts[-1] != "weight" or role == "ffn_gate_inp":
        return F32
    kind, larger = FILE_TYPES[file_type]
    if name == "output.weight":
        kind = Q6_K if kind in FALLBACK and shape[-1] % K_BLOCK == 0 else Q8_0
    elif in_block and role.startswith("ffn_down") and more_bits(int(parts[1]), blocks):
        kind = larger
    if kind in FALLBACK and shape[-1] % K_BLOCK:
        kind = FALLBACK[kind]
    return kind if shape[-1] % SMALL_BLOCK == 0 else F16

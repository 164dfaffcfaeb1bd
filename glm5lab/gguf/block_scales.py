"""Where the scales lie in quantized blocks, to find damaged ones without dequantizing.

A scale that is infinite or not a number makes a whole block so, and with it everything the model
says; no quantizer writes one. Source: the block structures of ggml-common.h.
"""

from functools import cache
from typing import Any

import numpy as np

from glm5lab.gguf.parts import block_of
from glm5lab.gguf.tensors import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Type -> places of the half floats (scale, minimum) in a block, in bytes.
HALF_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q8_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Plain numbers: bits that are all set in infinities and NaN, as the type that holds them.
EXPONENT: dict[str, tuple[str, int]] = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}
HALF = EXPONENT["F16"][1]


def broken_block(data: Bytes, tensor: Tensor) -> int | None:
    """The first block whose scale is infinite or not a number.

    Args:
        data: uint8, whole blocks of the tensor, little-endian, contiguous.
        tensor: what they belong to.

    Returns:
        The block's number in `data`, or None; also for types whose scales are not listed here.
    """
    if tensor.type in EXPONENT:
        kind, mask = EXPONENT[tensor.type]
        return _first((data.reshape(-1).view(kind) & mask) == mask)
    if not can_check(tensor.type):
        return None
    blocks = data.reshape(-1, block_of(tensor)[1])
    if tensor.type == "MXFP4":  # a power of two in one byte, 255 for NaN
        return _first(blocks[:, 0] == 0xFF)
    if tensor.type == "IQ1_M":
        return _first((_iq1_m_scale(blocks) & HALF) == HALF)
    found = [_first((_halves(blocks, at) & HALF) == HALF) for at in HALF_SCALES[tensor.type]]
    return min((number for number in found if number is not None), default=None)


@cache
def can_check(type_name: str) -> bool:
    """Whether `broken_block` knows where a type's scales lie."""
    return type_name in HALF_SCALES or type_name in EXPONENT or type_name in ("MXFP4", "IQ1_M")


def _halves(blocks: Bytes, at: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The 16 bits at one place of every block."""
    low, high = blocks[:, at].astype(np.uint16), blocks[:, at + 1].astype(np.uint16)
    return low | (high << np.uint16(8))


def _iq1_m_scale(blocks: Bytes) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """IQ1_M's scale: its four hex digits are the top digits of four 16-bit words."""
    digits = [_halves(blocks, 48 + 2 * i) >> np.uint16(12) << np.uint16(4 * i) for i in range(4)]
    return digits[0] | digits[1] | digits[2] | digits[3]


def _first(where: np.ndarray[Any, np.dtype[np.bool_]]) -> int | None:
    return int(np.argmax(where)) if where.any() else None

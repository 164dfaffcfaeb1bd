"""Weights of big-endian files, in the little-endian order that every kernel expects.

Such files are made for s390x, by `gguf-convert-endian` or by llama.cpp running there. Numbers of
more than one byte are swapped, also those inside quantized blocks.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from glm5lab.errors import InputError

if TYPE_CHECKING:
    from glm5lab.gguf.tensors import Tensor

# Types that are plain numbers: GGML type name -> bytes a number.
PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
# Where the half floats lie in a block; everything else in it is single bytes. These are the block
# types that gguf-convert-endian (gguf 0.19) knows; source: its byteswap functions.
HALF_FLOATS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
}


def little_endian(data: np.ndarray[Any, Any], tensor: "Tensor") -> np.ndarray[Any, Any]:
    """A big-endian tensor's bytes in little-endian order.

    Args:
        data: uint8 [..., bytes], whole numbers or blocks of the tensor.
        tensor: what they belong to.

    Returns:
        A copy, of the same shape.

    Raises:
        InputError: a type whose blocks nobody writes in this order.
    """
    from glm5lab.gguf.tensors import type_sizes

    if tensor.type in PLAIN_BYTES:
        width = PLAIN_BYTES[tensor.type]
        swapped = np.ascontiguousarray(data).reshape(-1, width)[:, ::-1]
        return np.ascontiguousarray(swapped).reshape(data.shape)
    if tensor.type not in HALF_FLOATS:
        raise InputError(
            tensor.path,
            f"tensor {tensor.name!r} of type {tensor.type} in a big-endian file cannot be read; "
            f"expected {', '.join((*PLAIN_BYTES, *HALF_FLOATS))}",
            "get the little-endian file of the model",
        )
    block = type_sizes()[tensor.type_id][2]
    blocks = np.array(data, order="C").reshape(-1, block)
    for at in HALF_FLOATS[tensor.type]:
        blocks[:, [at, at + 1]] = blocks[:, [at + 1, at]]
    return blocks.reshape(data.shape)

"""Quantize weights: plain types in numpy, K and IQ types by llama.cpp's own quantizer."""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from glm5lab.errors import Glm5labError
from glm5lab.gguf.ggml_types import BF16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

# Types that the gguf package quantizes itself.
IN_NUMPY = (F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16)


def quantize(values: npt.NDArray[np.float32], type_id: int) -> npt.NDArray[Any]:
    """Values as GGUF stores them.

    Args:
        values: float32, rows along the last axis.
        type_id: GGML type number.

    Returns:
        float32 or float16 of the same shape, or uint8 with rows of blocks.

    Raises:
        ValueError: rows do not divide into the type's blocks.
        Glm5labError: the type needs llama.cpp's quantizer and xllamacpp is not installed.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType(type_id)
    values = np.ascontiguousarray(values, np.float32)
    if type_id == F32:
        return values
    if type_id == F16:
        return values.astype(np.float16)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if values.shape[-1] % block:
        raise ValueError(f"values: rows of {values.shape[-1]} hold no whole {kind.name} blocks")
    if type_id in IN_NUMPY:
        out: npt.NDArray[Any] = quants.quantize(values, kind)
        return out
    return _quantize_chunk(values, type_id, values.shape[-1] // block * block_bytes)


def dequantize(data: npt.NDArray[Any], type_id: int) -> npt.NDArray[np.float32]:
    """What `quantize` returned, as float32 values again."""
    from gguf import GGMLQuantizationType, quants

    return np.asarray(quants.dequantize(data, GGMLQuantizationType(type_id)), np.float32)


def _quantize_chunk(
    values: npt.NDArray[np.float32], type_id: int, row_bytes: int
) -> npt.NDArray[np.uint8]:
    lib = _library()
    rows, columns = values.size // values.shape[-1], values.shape[-1]
    out = np.empty((*values.shape[:-1], row_bytes), np.uint8)
    importance = None
    if lib.ggml_quantize_requires_imatrix(type_id):
        # Some types want each column's importance; its mean square is what calibration measures.
        importance = np.square(values.reshape(rows, columns)).mean(axis=0) + np.float32(1e-6)
    written = lib.ggml_quantize_chunk(
        type_id,
        values.ctypes.data,
        out.ctypes.data,
        0,
        rows,
        columns,
        None if importance is None else importance.ctypes.data,
    )
    if written != out.nbytes:
        raise Glm5labError(f"llama.cpp wrote {written} bytes of type {type_id}, not {out.nbytes}")
    return out


@cache
def _library() -> ctypes.CDLL:
    """llama.cpp as the xllamacpp package ships it; its extension exports the C functions."""
    try:
        import xllamacpp.xllamacpp as extension

        lib = ctypes.CDLL(extension.__file__)
        lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    except (ImportError, OSError, AttributeError) as error:
        raise Glm5labError(
            "K and IQ types need llama.cpp's quantizer from the xllamacpp package, which cannot "
            f"be loaded ({error}): install it with `pip install xllamacpp`, or use other types"
        ) from error
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, pointer, pointer, number, number, number, pointer
    ]  # fmt: skip
    lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    lib.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    return lib

"""Random GGUF blocks of any type, and reference products with them."""

import zlib
from typing import Any

import gguf
import numpy as np
import torch

from glm5lab.gguf.block_scales import HALF_SCALES
from glm5lab.gguf.kernels import QUANTIZED
from glm5lab.gguf.tensors import type_sizes

# Q8_1 is a type of activations; no file has it, and gguf-py cannot dequantize it.
KINDS = sorted(QUANTIZED - {"Q8_1"})
# Where a block has its scale and its minimum, and what multiple makes numbers average to zero, as
# weights do: otherwise results hang on little more than the sum of the activations.
MINIMA = {
    "Q4_1": (0, 2, -7.5),
    "Q5_1": (0, 2, -15.5),
    "Q2_K": (80, 82, 1.5),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
}


def type_id(kind: str) -> int:
    """A type's number."""
    return int(gguf.GGMLQuantizationType[kind])


def random_blocks(
    kind: str, shape: tuple[int, ...], seed: int = 0, deviation: float = 0.05
) -> torch.Tensor:
    """Weights of about this standard deviation: uint8 [..., bytes] for [..., columns]."""
    rng = np.random.default_rng(seed)
    _, elements, nbytes = type_sizes()[type_id(kind)]
    count = int(np.prod(shape)) // elements
    data = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    if kind == "IQ1_M":
        data[:, 49::2] &= 0x0F
        data[:, 53] |= 0x10  # half float 0x2100, about 0.01
        data[:, 55] |= 0x20
    for at in HALF_SCALES.get(kind, ()):
        halves = (rng.random(count) * 0.01 + 0.005).astype("<f2")
        data[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind in MINIMA:
        scale, minimum, multiple = MINIMA[kind]
        halves = (data[:, scale : scale + 2].copy().view("<f2") * multiple).astype("<f2")
        data[:, minimum : minimum + 2] = halves.view(np.uint8)
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    factor = np.float16(deviation / max(1e-6, float(np.std(np.asarray(values)))))
    for at in HALF_SCALES.get(kind, ()):
        halves = (data[:, at : at + 2].copy().view("<f2") * factor).astype("<f2")
        data[:, at : at + 2] = halves.view(np.uint8)
    return torch.from_numpy(data.reshape(*shape[:-1], shape[-1] // elements * nbytes))


def random_quantizer(
    values: np.ndarray[Any, Any], number: int, row_bytes: int
) -> np.ndarray[Any, Any]:
    """In place of llama.cpp's quantizer, where that is not installed: blocks as wide as values."""
    kind, seed = type_sizes()[number][0], zlib.crc32(values.tobytes())
    return random_blocks(kind, values.shape, seed, float(values.std())).numpy()


def numbers(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """What blocks stand for, float64."""
    values = gguf.quants.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.asarray(values, np.float64))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    expected = expected.to(found.device)
    difference: Any = (found.double() - expected).norm() / expected.norm()
    return float(difference)

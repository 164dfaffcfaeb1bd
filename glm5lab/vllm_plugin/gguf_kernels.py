"""Products with weights that stay as GGUF blocks: the one place that knows vllm-gguf-plugin.

On a GPU its kernels are called (0.0.5: ops.py). Those in CUDA quantize the activations to Q8_1, 8
bits in groups of 32, on the way; one type goes through those in Triton. On the CPU the gguf package
dequantizes the blocks for each product, which is slow and exact: for tests, and for layers whose
experts are spread over CPU ranks.

Known limits of the kernels, respected here (csrc/gguf): a grid has 65,535 rows at most, so tokens
are taken in chunks; moe.cuh multiplies an expert's number by its bytes in 32 bits, so stacks above
2 GiB are taken in groups of experts; moe_vec.cuh reads whatever an expert's number says, so those
of other ranks become 0 and their weight is 0 as well.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from glm5lab.errors import Glm5labError
from glm5lab.gguf.kernels import MMQ, TRITON
from glm5lab.gguf.tensors import type_sizes

# Tokens up to which a matrix by vector product a token is called, for matrices of few and of many
# rows, by whether there is a kernel for more (linear.py of the plugin).
FEW_TOKENS = {True: (6, 2), False: (16, 8)}
MANY_ROWS = 5120
# Tokens up to which the kernel for more is called. It takes 730 to 1050 us for 64 tokens of the
# attention's output on an H200 and 16 times that for 1024; numbers made for the product and
# multiplied by cuBLAS take 360 and 560 (data/measurements/gguf_weights.json).
MORE_TOKENS = 24
# Numbers that are made at once: 128 MiB in bf16.
NUMBERS = 64 << 20
# From more tokens on experts' products go through the kernel that sorts tokens by expert: at 32
# it takes 0.66 to 0.87 of the time, at 8 between 1.05 and 1.29 (gate, up and down of 8 of 256
# experts on an H200, data/measurements/gguf_weights.json).
FEW_EXPERT_TOKENS = 16
GRID = 65535
INT32 = (1 << 31) - 1


@cache
def plugin(triton: bool = False) -> Any:
    """vllm-gguf-plugin's operations; Glm5labError where they cannot be loaded.

    Args:
        triton: those in Triton instead of those in CUDA.
    """
    try:
        from vllm_gguf_plugin import ops

        if triton:
            return _triton_operations()
    except Exception as error:
        raise Glm5labError(
            f"quantized weights on a GPU need vllm-gguf-plugin's kernels, which cannot be loaded "
            f"({type(error).__name__}: {error}); run `pip install vllm-gguf-plugin==0.0.5`"
        ) from error
    return ops


def _triton_operations() -> Any:
    """The plugin's Triton code under the names of `ops`."""
    from vllm_gguf_plugin.triton.dequantize.interface import ggml_dequantize_triton
    from vllm_gguf_plugin.triton.fused_moe.interface import ggml_moe_a8_triton
    from vllm_gguf_plugin.triton.fused_moe.utils import get_triton_moe_block_m
    from vllm_gguf_plugin.triton.gemm.interface import ggml_mul_mat_a8_triton

    return SimpleNamespace(
        ggml_dequantize=ggml_dequantize_triton,
        ggml_mul_mat_vec_a8=ggml_mul_mat_a8_triton,
        ggml_moe_a8=ggml_moe_a8_triton,
        ggml_moe_get_block_size=get_triton_moe_block_m,
    )


def operations(type_id: int) -> Any:
    """The plugin's operations for a type."""
    return plugin(triton=type_sizes()[type_id][0] in TRITON)


def on_gpu(x: torch.Tensor) -> bool:
    """Whether the plugin's kernels take a tensor."""
    return x.is_cuda


def columns_of(weight: torch.Tensor, type_id: int) -> int:
    """Numbers in a row of blocks."""
    _, elements, nbytes = type_sizes()[type_id]
    return weight.shape[-1] // nbytes * elements


def dequantize(weight: torch.Tensor, type_id: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of blocks as numbers.

    Args:
        weight: uint8 [rows, bytes].
        type_id: GGML type number.
        dtype: of the result, [rows, columns].
    """
    if on_gpu(weight):
        shape = (weight.shape[0], columns_of(weight, type_id))
        ops = operations(type_id)
        out: torch.Tensor = ops.ggml_dequantize(weight.contiguous(), type_id, *shape, dtype)
        return out
    from gguf import GGMLQuantizationType, quants

    values = quants.dequantize(weight.numpy(), GGMLQuantizationType(type_id))
    return torch.from_numpy(np.asarray(values, np.float32)).to(dtype)


def matmul(x: torch.Tensor, weight: torch.Tensor, type_id: int) -> torch.Tensor:
    """Activations times a matrix of blocks, transposed.

    Args:
        x: [tokens, columns].
        weight: uint8 [rows, bytes of a row].
        type_id: GGML type number.

    Returns:
        [tokens, rows] in the dtype of x.
    """
    tokens, rows = x.shape[0], weight.shape[0]
    if tokens == 0:
        return x.new_empty(0, rows)
    if not on_gpu(x):
        return functional.linear(x, dequantize(weight, type_id, x.dtype))
    sorting = type_sizes()[type_id][0] in MMQ
    few = FEW_TOKENS[sorting][rows > MANY_ROWS]
    x = x.contiguous()
    if tokens <= few or (sorting and tokens <= MORE_TOKENS):
        ops = operations(type_id)
        product = ops.ggml_mul_mat_vec_a8 if tokens <= few else ops.ggml_mul_mat_a8
        out: torch.Tensor = product(weight, x, type_id, rows)
        return out
    step = max(1, NUMBERS // x.shape[1])
    parts = [
        functional.linear(x, dequantize(some, type_id, x.dtype)) for some in weight.split(step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, type_id: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a table of blocks, [*ids, columns] in `dtype`."""
    rows = torch.index_select(weight, 0, ids.flatten())
    found = dequantize(rows, type_id, dtype) if len(rows) else rows.new_empty(0, 0, dtype=dtype)
    return found.view(*ids.shape, columns_of(weight, type_id))


class Routing:
    """Which experts of this rank take which tokens.

    Args:
        topk_ids: [tokens, k] experts of the whole model.
        experts: how many those are.
        expert_map: int32 [experts], their numbers here or -1; None where all are here.
    """

    def __init__(
        self, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
    ) -> None:
        self.topk_ids, self.experts = topk_ids.to(torch.int32).contiguous(), experts
        self.expert_map = expert_map
        local = self.topk_ids if expert_map is None else expert_map[self.topk_ids.long()]
        self.here = local >= 0  # [tokens, k]
        self.local = local.clamp(min=0).to(torch.int32).contiguous()
        self._aligned: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def aligned(self, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens sorted by expert in blocks: (their numbers, expert of each block, count)."""
        if block not in self._aligned:
            from vllm.model_executor.layers.fused_moe.moe_align_block_size import (
                moe_align_block_size,
            )

            self._aligned[block] = moe_align_block_size(
                self.topk_ids, block, self.experts, self.expert_map
            )
        return self._aligned[block]


def expert_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    type_id: int | None,
    routing: Routing,
    shared: bool,
    few: int = FEW_EXPERT_TOKENS,
) -> torch.Tensor:
    """Each token times the matrices of its experts.

    Args:
        x: [tokens, columns] where the experts of a token share its row, else [tokens * k, columns].
        weight: uint8 [experts here, rows, bytes], or numbers [experts here, rows, columns].
        type_id: GGML type number; None for numbers.
        routing: of these tokens; tokens * k at most 65,535.
        shared: which of the two x is.
        few: tokens up to which they are not sorted by expert.

    Returns:
        [tokens * k, rows]; rows of experts that are elsewhere are finite and say nothing.
    """
    tokens, k = routing.topk_ids.shape
    if type_id is None or not on_gpu(x):
        return _each_expert(x, weight, type_id, routing, shared)
    x, top_k = x.contiguous(), k if shared else 1
    kind, rows, ops = type_sizes()[type_id][0], weight.shape[1], operations(type_id)
    vectors = kind not in MMQ or tokens <= few
    if vectors and kind not in TRITON:
        out: torch.Tensor = ops.ggml_moe_a8_vec(
            x, weight, routing.local, top_k, type_id, rows, x.shape[0]
        )
        return out
    ids, experts, count = routing.aligned(ops.ggml_moe_get_block_size(type_id))
    step = max(1, INT32 // weight.stride(0))
    total: torch.Tensor | None = None
    for first in range(0, weight.shape[0], step):
        group = weight[first : first + step]
        numbers = experts
        if len(group) < weight.shape[0]:
            inside = (experts >= first) & (experts < first + len(group))
            numbers = torch.where(inside, experts - first, -1)
        out = ops.ggml_moe_a8(x, group, ids, numbers, count, type_id, rows, top_k, x.shape[0])
        # Rows of other experts are zero.
        total = out if total is None else total.add_(out)
    assert total is not None
    return total


def _each_expert(
    x: torch.Tensor, weight: torch.Tensor, type_id: int | None, routing: Routing, shared: bool
) -> torch.Tensor:
    """`expert_matmul` without a kernel of its own."""
    tokens, k = routing.topk_ids.shape
    wide = x.repeat_interleave(k, 0) if shared else x
    pairs = routing.local.flatten().long()
    out = x.new_zeros(tokens * k, weight.shape[1])
    if on_gpu(x):
        # Fixed shapes, for CUDA graphs: the matrix of each pair is fetched, a few at a time.
        for first in range(0, tokens * k, k):
            some = slice(first, first + k)
            out[some] = torch.bmm(weight[pairs[some]], wide[some].unsqueeze(-1)).squeeze(-1)
        return out
    here = routing.here.flatten()
    for expert in pairs[here].unique().tolist():
        mine = (pairs == expert) & here
        matrix = weight[expert]
        if type_id is not None:
            matrix = dequantize(matrix, type_id, x.dtype)
        out[mine] = functional.linear(wide[mine], matrix)
    return out

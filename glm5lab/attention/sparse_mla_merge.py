"""Merge of the parts of a split token list; `sparse_mla` launches it behind every form."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import Parts, Problem
from glm5lab.attention.tiles import MERGE_TILES, Device, merge_tile


@triton.jit(do_not_specialize=["heads", "parts"])
def _merge_kernel(
    part_out_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    heads,
    parts,
    stride_ot,
    stride_oh,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge parts: out = sum_p exp(lse_p - lse) out_p, lse = log sum_p exp(lse_p).

    One program a token, head and block of columns. A part without a row has lse -inf; what lies in
    its place counts for nothing.
    """
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_p = tl.arange(0, BLOCK_P)
    o_part = (i_t * parts + o_p) * heads + i_h
    if EARLY:
        # The next call's kernel may take its place; it waits for this one.
        gdc_launch_dependents()
        gdc_wait()
    m_p = o_p < parts
    b_lse = tl.load(part_lse_ptr + o_part, mask=m_p, other=float("-inf"))
    # Asked for before the weights are known: one wait in place of two. [BLOCK_P, BLOCK_D]
    m_x = m_p[:, None] & (o_d < D_V)[None, :]
    b_x = tl.load(part_out_ptr + o_part[:, None] * D_V + o_d[None, :], mask=m_x, other=0.0)
    b_max = tl.max(b_lse, 0)
    b_ref = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_w = tl.exp(b_lse - b_ref)
    b_sum = tl.sum(b_w, 0)
    m_any = b_sum != 0  # NaN is no empty list
    b_x = tl.where((b_w != 0)[:, None], b_x * b_w[:, None], 0.0)
    b_out = tl.sum(b_x, 0) / tl.where(m_any, b_sum, 1.0)
    p_out = out_ptr + i_t * stride_ot + i_h.to(tl.int64) * stride_oh + o_d
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=o_d < D_V)
    b_total = tl.where(m_any, b_ref + tl.log(tl.where(m_any, b_sum, 1.0)), float("-inf"))
    tl.store(lse_ptr + i_t * heads + i_h, b_total, mask=tl.program_id(2) == 0)


def merge(problem: Problem, split: Parts, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch the kernel.

    Args:
        problem: checked arguments.
        split: the parts.
        out: [T, H, d_v], written.
        lse: [T, H] float32, written.
    """
    capacity, columns, warps = merge_tile(split.count)
    block_d = min(columns, triton.next_power_of_2(problem.d_v))
    grid = (problem.tokens, problem.heads, triton.cdiv(problem.d_v, block_d))
    _merge_kernel[grid](
        split.out,
        split.lse,
        out,
        lse,
        problem.heads,
        split.count,
        out.stride(0),
        out.stride(1),
        D_V=problem.d_v,
        BLOCK_D=block_d,
        BLOCK_P=capacity,
        EARLY=split.early,
        num_warps=warps,
        **split.options,
    )


def compilations(device: Device) -> list[Compilation]:
    """Every capacity, for GLM-5's values."""
    pointers = {"part_out_ptr": "*fp32", "part_lse_ptr": "*fp32", "lse_ptr": "*fp32"}
    pointers["out_ptr"] = "*bf16"
    constants = {"D_V": 512, "EARLY": device.dependent_launch}
    return [
        Compilation(
            f"merge of {parts} parts",
            "_merge_kernel",
            pointers,
            constants | {"BLOCK_D": columns, "BLOCK_P": parts},
            warps,
        )
        for parts, columns, warps in MERGE_TILES
    ]

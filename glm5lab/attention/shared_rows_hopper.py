"""Shared rows on Hopper: attention of one group of tokens to its union, in Triton's Gluon.

Triton's own pipeline waits for a block of rows right after asking for it, or needs a third buffer,
for which there is no shared memory. Written out in Gluon, two buffers suffice: while a block is
multiplied (wgmma, 64 rows of (token, head) pairs), the next one is on its way. On an H200 that
takes 919 us where the best plain Triton form takes 1118 (data/measurements/shared_rows_tiles.json).
"""

from itertools import product

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import LN2, Lists, Problem
from glm5lab.attention.shared_rows_union import group_sizes
from glm5lab.attention.tiles import Device

PAIRS = 64  # rows of a wgmma
ROWS = 64
WARPS = 8
# Triton 3.6 names it otherwise than 3.8.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _row_pointers(kv_ptr, b_slot, page_size, stride_page, stride_row, PAGED: gl.constexpr):
    b_row = b_slot.to(gl.int64)
    if PAGED:
        b_row = (b_row // page_size) * stride_page + (b_row % page_size) * stride_row
    else:
        b_row = b_row * stride_row
    return (kv_ptr + b_row)[:, None]


@gluon.jit
def _copy_rows(p_kv, o_v, o_r, s_v, s_r, D_V: gl.constexpr, D_ROPE: gl.constexpr):
    async_copy.async_copy_global_to_shared(s_v, p_kv + o_v)
    if D_ROPE > 0:
        async_copy.async_copy_global_to_shared(s_r, p_kv + D_V + o_r)


@gluon.jit(do_not_specialize=["tokens", "heads", "page_size", "capacity"])
def _attend_hopper_kernel(
    q_ptr,
    kv_ptr,
    slots_ptr,
    members_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    tokens,
    heads,
    page_size,
    capacity,
    stride_qt,
    stride_qh,
    stride_page,
    stride_row,
    stride_ot,
    stride_oh,
    D_V: gl.constexpr,
    D_ROPE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PAGED: gl.constexpr,
):
    """One program a group and block of its (token, head) pairs, which are the tile's rows.

    Two warpgroups: each takes half of a block's rows for the scores, and half of the columns for
    the result, 128 accumulators a thread.
    """
    L_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_K // 2, 16])
    L_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D_V // 2, 16])
    L_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    s_q = gl.allocate_shared_memory(dtype, [BLOCK_M, D_V], L_SHARED)
    s_v = gl.allocate_shared_memory(dtype, [2, BLOCK_K, D_V], L_SHARED)
    s_w = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_K], L_SHARED)
    # Without rope these are never used, and Triton drops them.
    s_qr = gl.allocate_shared_memory(dtype, [BLOCK_M, 64], L_SHARED)
    s_r = gl.allocate_shared_memory(dtype, [2, BLOCK_K, 64], L_SHARED)
    o_v = gl.arange(0, D_V, layout=gl.SliceLayout(0, L_COPY))[None, :]
    o_r = gl.arange(0, 64, layout=gl.SliceLayout(0, L_COPY))[None, :]
    o_row = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, L_COPY))

    i_g = gl.program_id(0)
    count = gl.load(counts_ptr + i_g)
    p_s = slots_ptr + i_g.to(gl.int64) * capacity
    p_b = members_ptr + i_g.to(gl.int64) * capacity
    # Behind the end of the list stands its last slot again, which no token's bits name. An empty
    # list copies row 0 and never looks at it.
    o_place = gl.minimum(o_row, count - 1)
    b_slot = gl.load(p_s + o_place, mask=o_place >= 0, other=0)
    p_kv = _row_pointers(kv_ptr, b_slot, page_size, stride_page, stride_row, PAGED)
    _copy_rows(p_kv, o_v, o_r, s_v.index(0), s_r.index(0), D_V, D_ROPE)
    async_copy.commit_group()
    o_place = gl.minimum(BLOCK_K + o_row, count - 1)
    b_slot = gl.load(p_s + o_place, mask=o_place >= 0, other=0)

    o_m = gl.program_id(1) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L_COPY))
    o_token = (i_g * GROUP + o_m // heads).to(gl.int64)
    m_m = ((o_m // heads < GROUP) & (o_token < tokens))[:, None]
    p_q = q_ptr + (o_token * stride_qt + (o_m % heads).to(gl.int64) * stride_qh)[:, None]
    s_q.store(gl.load(p_q + o_v, mask=m_m, other=0.0))
    if D_ROPE > 0:
        s_qr.store(gl.load(p_q + D_V + o_r, mask=m_m, other=0.0))

    o_k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L_S))
    o_s = gl.program_id(1) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L_S))
    b_bits = gl.load(p_b + o_k, mask=o_k < count, other=0)
    b_member = 1 << gl.minimum(o_s // heads, 31)
    b_max = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, L_S))
    b_zero = gl.zeros([BLOCK_M, BLOCK_K], gl.float32, layout=L_S)
    # Sums stay apart for each place of a block until the end: no reduction in the loop.
    b_sum = b_zero
    b_acc = gl.zeros([BLOCK_M, D_V], gl.float32, layout=L_OUT)
    i_buffer = 0
    for start in range(0, count, BLOCK_K):
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        s_block = s_v.index(i_buffer)
        t_s = warpgroup_mma(s_q, s_block.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        if D_ROPE > 0:
            s_rope = s_r.index(i_buffer).permute((1, 0))
            t_s = warpgroup_mma(s_qr, s_rope, t_s, is_async=True)
        i_buffer = 1 - i_buffer
        if start + BLOCK_K < count:
            p_kv = _row_pointers(kv_ptr, b_slot, page_size, stride_page, stride_row, PAGED)
            _copy_rows(p_kv, o_v, o_r, s_v.index(i_buffer), s_r.index(i_buffer), D_V, D_ROPE)
        async_copy.commit_group()
        # Slots two blocks ahead and bits one: neither is waited for.
        b_slot = gl.load(p_s + gl.minimum(start + 2 * BLOCK_K + o_row, count - 1))
        m_s = (b_bits.to(gl.int32)[None, :] & b_member[:, None]) != 0
        o_next = start + BLOCK_K + o_k
        b_bits = gl.load(p_b + o_next, mask=o_next < count, other=0)

        b_s = warpgroup_mma_wait(0, deps=(t_s,))
        b_s = gl.where(m_s, b_s * scale_log2, float("-inf"))
        b_new = gl.maximum(b_max, gl.max(b_s, 1))
        b_ref = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = gl.exp2(b_s - b_ref[:, None])
        b_old = gl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old[:, None] + b_p
        b_max = b_new
        s_w.store(b_p.to(dtype))
        b_acc = b_acc * gl.convert_layout(b_old, gl.SliceLayout(1, L_OUT))[:, None]
        fence_async_shared()
        _barrier()
        t_acc = warpgroup_mma(s_w, s_block, b_acc, is_async=True)
        # Left in flight over the loop's end, ptxas would run all of them one by one.
        b_acc = warpgroup_mma_wait(0, deps=(t_acc,))
    async_copy.wait_group(0)

    b_total = gl.sum(b_sum, 1)
    m_any = b_total != 0  # NaN too
    b_total = gl.where(m_any, b_total, 1.0)
    b_lse = gl.where(m_any, (b_max + gl.log2(b_total)) * LN2, float("-inf"))
    o_stoken = (i_g * GROUP + o_s // heads).to(gl.int64)
    m_lse = (o_s // heads < GROUP) & (o_stoken < tokens)
    gl.store(lse_ptr + o_stoken * heads + o_s % heads, b_lse, mask=m_lse)
    # Through shared memory, so that a row is written in one piece.
    b_scale = gl.convert_layout(1.0 / b_total, gl.SliceLayout(1, L_OUT))
    _barrier()
    s_q.store((b_acc * b_scale[:, None]).to(dtype))
    _barrier()
    p_out = out_ptr + (o_token * stride_ot + (o_m % heads).to(gl.int64) * stride_oh)[:, None] + o_v
    gl.store(p_out, s_q.load(L_COPY), mask=m_m)


def fits_hopper(problem: Problem, device: Device) -> bool:
    """Whether the kernel takes these arguments: GLM-5's rows of 16-bit numbers, aligned."""
    pages = problem.pages
    return (
        device.capability == 90
        and problem.q.dtype in (torch.bfloat16, torch.float16)
        and problem.d_v == 512
        and problem.rope in (0, 64)
        and pages.numel() > 0
        # Copies move 16 bytes; Triton knows multiples of 16 numbers.
        and pages.data_ptr() % 16 == 0
        and pages.stride(0) % 16 == 0
        and pages.stride(1) % 16 == 0
    )


def attend_hopper(problem: Problem, lists: Lists, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch the kernel.

    Args:
        problem: arguments for which `fits_hopper` holds.
        lists: unions of groups of at most PAIRS / heads tokens, or of one.
        out: [T, H, 512], written.
        lse: [T, H] float32, written.
    """
    grid = (len(lists.counts), triton.cdiv(lists.group * problem.heads, PAIRS))
    _attend_hopper_kernel[grid](
        *lists.arguments(problem, out, lse),
        D_V=problem.d_v,
        D_ROPE=problem.rope,
        GROUP=lists.group,
        BLOCK_M=PAIRS,
        BLOCK_K=ROWS,
        PAGED=problem.paged,
        num_warps=WARPS,
    )


def compilations(device: Device) -> list[Compilation]:
    """What `attend_hopper` launches for bfloat16 rows of 8, 16, 32 and 64 or more heads.

    Rows without a rotary part for 8 heads alone.
    """
    if device.capability != 90:
        return []
    types = {"slots_ptr": "*i32", "members_ptr": "*u8", "counts_ptr": "*i32"}
    types |= {"q_ptr": "*bf16", "kv_ptr": "*bf16", "out_ptr": "*bf16", "lse_ptr": "*fp32"}
    types["scale_log2"] = "fp32"
    found = []
    groups = group_sizes(PAIRS)
    for rope, paged, group in product((64, 0), (False, True), groups):
        if not rope and group != groups[-1]:
            continue
        constants = {"D_V": 512, "D_ROPE": rope, "GROUP": group}
        constants |= {"BLOCK_M": PAIRS, "BLOCK_K": ROWS, "PAGED": paged}
        name = f"shared rows hopper rope {rope}{' paged' if paged else ''} by {group}"
        found.append(Compilation(name, "_attend_hopper_kernel", types, constants, WARPS))
    return found

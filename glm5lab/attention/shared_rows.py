"""Sparse MLA for the tokens of a prompt: neighbours, whose top-k overlap, share loaded rows.

A group of up to eight neighbouring tokens attends to the union of their slots. A first kernel lists
the union and, for every slot in it, one bit a token; a second one loads each row once and
multiplies it with all queries of the group; Hopper has a form of its own for that. With 80 % of
the slots in common, eight tokens load 2.3 lists instead of 8. Where nothing overlaps it costs more
than `sparse_mla`, which gives the same result: the caller, who knows that tokens are neighbours,
chooses.
"""

from itertools import product

import torch
import triton
import triton.language as tl

from glm5lab.attention import triton_interpreted
from glm5lab.attention.arguments import check_tensors, on_device_of
from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import LN2, Lists, Problem
from glm5lab.attention.shared_rows_hopper import PAIRS, attend_hopper, fits_hopper
from glm5lab.attention.shared_rows_union import MAX_GROUP, group_sizes, list_unions
from glm5lab.attention.sparse_mla import checked_problem
from glm5lab.attention.sparse_mla_arguments import Query
from glm5lab.attention.tiles import INTERPRETER, Device, Tile, device_of, shared_rows_tile


@triton.jit(do_not_specialize=["tokens", "heads", "page_size", "capacity"])
def _attend_shared_kernel(
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
    D_V: tl.constexpr,
    D_ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """One program a group and block of its (token, head) pairs, which are the tile's rows."""
    i_g = tl.program_id(0)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_member = o_m // heads
    o_token = (i_g * GROUP + o_member).to(tl.int64)
    o_head = o_m % heads
    m_m = (o_member < GROUP) & (o_token < tokens)
    o_v = tl.arange(0, BLOCK_V)
    o_r = tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, BLOCK_K)
    m_v0 = o_v[None, :] < D_V
    m_v1 = o_v[None, :] + BLOCK_V < D_V
    m_r = o_r[None, :] < D_ROPE
    count = tl.load(counts_ptr + i_g)
    p_s = slots_ptr + i_g.to(tl.int64) * capacity
    p_b = members_ptr + i_g.to(tl.int64) * capacity
    b_slot = tl.load(p_s + o_k, mask=o_k < count, other=-1)
    b_bits = tl.load(p_b + o_k, mask=o_k < count, other=0)

    p_q = q_ptr + (o_token * stride_qt + o_head.to(tl.int64) * stride_qh)[:, None]
    b_q0 = tl.load(p_q + o_v[None, :], mask=m_m[:, None] & m_v0, other=0.0)
    b_q1 = tl.load(p_q + BLOCK_V + o_v[None, :], mask=m_m[:, None] & m_v1, other=0.0)
    if DOT_FP32:
        b_q0, b_q1 = b_q0.to(tl.float32), b_q1.to(tl.float32)
    if D_ROPE > 0:
        b_qr = tl.load(p_q + D_V + o_r[None, :], mask=m_m[:, None] & m_r, other=0.0)
        if DOT_FP32:
            b_qr = b_qr.to(tl.float32)

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc0 = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_acc1 = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for block in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        m_k = b_slot >= 0
        b_row = tl.where(m_k, b_slot, 0).to(tl.int64)
        if PAGED:
            b_row = (b_row // page_size) * stride_page + (b_row % page_size) * stride_row
        else:
            b_row = b_row * stride_row
        p_kv = kv_ptr + b_row[:, None]
        b_v0 = tl.load(p_kv + o_v[None, :], mask=m_k[:, None] & m_v0, other=0.0)
        b_v1 = tl.load(p_kv + BLOCK_V + o_v[None, :], mask=m_k[:, None] & m_v1, other=0.0)
        if DOT_FP32:
            b_v0, b_v1 = b_v0.to(tl.float32), b_v1.to(tl.float32)
        b_s = tl.dot(b_q0, tl.trans(b_v0), input_precision="ieee")
        b_s = tl.dot(b_q1, tl.trans(b_v1), b_s, input_precision="ieee")
        if D_ROPE > 0:
            b_r = tl.load(p_kv + D_V + o_r[None, :], mask=m_k[:, None] & m_r, other=0.0)
            if DOT_FP32:
                b_r = b_r.to(tl.float32)
            b_s = tl.dot(b_qr, tl.trans(b_r), b_s, input_precision="ieee")
        m_s = ((b_bits.to(tl.int32)[None, :] >> o_member[:, None]) & 1) != 0
        o_next = block + BLOCK_K + o_k
        b_slot = tl.load(p_s + o_next, mask=o_next < count, other=-1)
        b_bits = tl.load(p_b + o_next, mask=o_next < count, other=0)

        b_s = tl.where(m_s, b_s * scale_log2, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_old = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_w = b_p.to(b_v0.dtype)
        b_acc0 = tl.dot(b_w, b_v0, b_acc0 * b_old[:, None], input_precision="ieee")
        b_acc1 = tl.dot(b_w, b_v1, b_acc1 * b_old[:, None], input_precision="ieee")
        b_max = b_new

    m_any = b_sum != 0  # NaN too
    b_scale = (1.0 / tl.where(m_any, b_sum, 1.0))[:, None]
    b_lse = tl.where(m_any, (b_max + tl.log2(tl.where(m_any, b_sum, 1.0))) * LN2, float("-inf"))
    p_out = (
        out_ptr + (o_token * stride_ot + o_head.to(tl.int64) * stride_oh)[:, None] + o_v[None, :]
    )
    tl.store(p_out, (b_acc0 * b_scale).to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_v0)
    tl.store(
        p_out + BLOCK_V, (b_acc1 * b_scale).to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_v1
    )
    tl.store(lse_ptr + o_token * heads + o_head, b_lse, mask=m_m)


def sparse_mla_shared(
    q: Query,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None = None,
    d_v: int = 512,
    out: torch.Tensor | None = None,
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_mla` for neighbouring tokens: same arguments, same result.

    Three differences: kv has q's dtype (no fp8_ds_mla rows); a token's slots are distinct, as a
    top-k's are (a slot that a token names twice counts once); and a row with NaN or infinity makes
    the output of its whole group NaN, not of the tokens alone that name it (their LSE stays right).

    Args:
        q: [T, H, D], or its parts [T, H, d_v] and [T, H, D - d_v]; float32, bfloat16 or float16.
        kv: [S, D], or pages [P, page_size, D] with any strides between pages and rows, a row's
            elements contiguous; in q's dtype.
        indices: [T, K] int32 or int64 slots, -1 for an empty place; a slot outside kv counts as
            one.
        scale: factor on the scores.
        lengths: [T] int32 or int64, or None; token t attends to its first lengths[t] places only.
        d_v: width of the values, at most 512; D is at most 64 more.
        out: as for `sparse_mla`.
        check: compare every slot with the cache's size first, which waits for the device.

    Returns:
        out [T, H, d_v] in q's dtype, and the LSE [T, H] float32.

    Raises:
        ValueError: as `sparse_mla`; kv is uint8.
    """
    check_tensors(kv=kv)
    if kv.dtype == torch.uint8:
        raise ValueError("kv: expected rows in the dtype of q, got uint8; sparse_mla takes those")
    problem, out, lse = checked_problem(q, kv, indices, scale, lengths, d_v, out, check)
    problem = problem.whole
    if problem.tokens:
        device = INTERPRETER if triton_interpreted() else device_of(problem.q.device.index or 0)
        with on_device_of(problem.q):
            launch_shared(problem, out, lse, device, hopper=fits_hopper(problem, device))
    return out, lse


def launch_shared(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, device: Device, hopper: bool
) -> None:
    """List the unions, then attend to them.

    Args:
        problem: checked arguments.
        out: [T, H, d_v], written.
        lse: [T, H] float32, written.
        device: decides the tile, and how many groups are listed at a time.
        hopper: attend by `attend_hopper`, which takes what `fits_hopper` says.
    """
    if hopper:
        lists = list_unions(problem, min(MAX_GROUP, PAIRS // problem.heads), device)
        attend_hopper(problem, lists, out, lse)
        return
    tile = shared_rows_tile(device, problem.heads, problem.q.dtype.itemsize)
    lists = list_unions(problem, min(MAX_GROUP, tile.heads // problem.heads), device)
    _attend_shared(problem, lists, out, lse, tile)


def _attend_shared(
    problem: Problem, lists: Lists, out: torch.Tensor, lse: torch.Tensor, tile: Tile
) -> None:
    blocks = triton.cdiv(lists.group * problem.heads, tile.heads)
    _attend_shared_kernel[(len(lists.counts), blocks)](
        *lists.arguments(problem, out, lse),
        D_V=problem.d_v,
        D_ROPE=problem.rope,
        GROUP=lists.group,
        BLOCK_M=tile.heads,
        BLOCK_V=problem.block_v,
        BLOCK_R=problem.block_r,
        BLOCK_K=tile.rows,
        STAGES=tile.stages,
        PAGED=problem.paged,
        DOT_FP32=triton_interpreted() or problem.q.dtype == torch.float32,
        num_warps=tile.warps,
        **tile.options,
    )


def compilations(device: Device) -> list[Compilation]:
    """What `sparse_mla_shared` launches on a device for 8, 16 and 32 or more heads of GLM-5.

    bfloat16 rows with a rotary part; for 8 heads fp32 rows, and bfloat16 ones without it, too.
    """
    found = []
    for dtype, itemsize, ropes in (("bf16", 2, (64, 0)), ("fp32", 4, (64,))):
        tile = shared_rows_tile(device, 8, itemsize)
        groups = group_sizes(tile.heads)
        for rope, group in product(ropes, groups):
            if group != groups[-1] and (dtype, rope) != ("bf16", 64):
                continue
            constants = {
                "D_V": 512,
                "D_ROPE": rope,
                "GROUP": group,
                "BLOCK_M": tile.heads,
                "BLOCK_V": 256,
                "BLOCK_R": max(16, rope),
                "BLOCK_K": tile.rows,
                "STAGES": tile.stages,
                "PAGED": True,
                "DOT_FP32": itemsize == 4,
            }
            types = {"slots_ptr": "*i32", "members_ptr": "*u8", "counts_ptr": "*i32"}
            types |= dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), f"*{dtype}")
            types |= {"lse_ptr": "*fp32", "scale_log2": "fp32"}
            name = f"shared rows {dtype} {tile.name} rope {rope} by {group}"
            kernel = "_attend_shared_kernel"
            found.append(Compilation.of_tile(tile, name, kernel, types, constants))
    return found

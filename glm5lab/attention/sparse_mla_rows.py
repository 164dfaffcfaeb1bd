"""Sparse MLA over rows in the queries' own dtype, the plain form; `sparse_mla` launches it.

A program gathers its part of a token's rows block by block and keeps a running softmax.
"""

from itertools import product

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm5lab.attention import triton_interpreted
from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import ANYWHERE, LN2, RUNTIME, Parts, Problem
from glm5lab.attention.tiles import Device, Tile, sparse_mla_tiles

MOST_PLACES = 8192  # of a list, which a program holds whole while it looks up pages


@triton.jit
def _look_up(p_i, p_slot, start, end, p_page, pages, page_size, SCAN: tl.constexpr):
    """Write the slots of a part's places, each page number looked up; returns the part's end.

    Every program does so for its own part, once: within the loop over blocks each thread would
    look up all rows that it helps to load, at 22 to 87 registers more.
    """
    o_k = start + tl.arange(0, SCAN)
    b_at = tl.load(p_i + o_k, mask=o_k < end, other=-1)
    b_page = b_at // page_size
    m_k = (b_at >= 0) & (b_page < pages)
    b_page = tl.load(p_page + b_page, mask=m_k, other=-1)
    b_slot = tl.where(m_k, b_page * page_size + b_at % page_size, -1)
    tl.store(p_slot + o_k, b_slot, mask=o_k < end)
    tl.debug_barrier()
    # A short context fills the list's beginning: what lies behind its last place costs nothing.
    return tl.max(tl.where(m_k, o_k + 1, start), 0)


@triton.jit(
    do_not_specialize=[*RUNTIME, "stride_table", "request_pages"],
    do_not_specialize_on_alignment=[*ANYWHERE, "table_ptr", "request_ptr"],
)
def _attend_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    heads,
    top_k,
    slots,
    page_size,
    part,
    parts,
    stride_qt,
    stride_qh,
    stride_page,
    stride_row,
    stride_it,
    stride_ot,
    stride_op,
    stride_oh,
    q_rope_ptr,
    stride_rt,
    stride_rh,
    table_ptr,
    request_ptr,
    slots_ptr,
    request_pages,
    stride_table,
    D_V: tl.constexpr,
    D_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    SCAN: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attend to rows in q's own dtype.

    The values' columns lie in two halves of BLOCK_V, which needs fewer registers than one tile
    (198 a thread instead of 255, compiled for sm_90). With a table the list holds places in the
    token's request, whose pages the table has.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    i_p = tl.program_id(2)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_head = o_h.to(tl.int64)  # q may be [H, T, D] in memory, with large strides
    o_v = tl.arange(0, BLOCK_V)
    o_r = tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, BLOCK_K)
    m_h = o_h[:, None] < heads
    m_v0 = o_v[None, :] < D_V
    m_v1 = o_v[None, :] + BLOCK_V < D_V
    m_r = o_r[None, :] < D_ROPE

    length = top_k
    if HAS_LENGTHS:
        length = tl.minimum(top_k, tl.load(lengths_ptr + i_t))
    start = i_p * part
    end = tl.minimum(start + part, length)
    p_i = indices_ptr + i_t * stride_it
    if HAS_TABLE:
        p_page = table_ptr + tl.load(request_ptr + i_t).to(tl.int64) * stride_table
        p_slot = slots_ptr + i_t * top_k
        end = _look_up(p_i, p_slot, start, end, p_page, request_pages, page_size, SCAN)
        p_i = p_slot
    # The next block's slots are loaded a step ahead: a load inside the gather's own step would keep
    # Triton from pipelining the gather.
    b_slot = tl.load(p_i + start + o_k, mask=start + o_k < end, other=-1)

    # [BLOCK_H, BLOCK_V] twice and [BLOCK_H, BLOCK_R]
    p_q = q_ptr + i_t * stride_qt + o_head[:, None] * stride_qh
    b_q0 = tl.load(p_q + o_v[None, :], mask=m_h & m_v0, other=0.0)
    b_q1 = tl.load(p_q + BLOCK_V + o_v[None, :], mask=m_h & m_v1, other=0.0)
    if DOT_FP32:
        b_q0, b_q1 = b_q0.to(tl.float32), b_q1.to(tl.float32)
    if D_ROPE > 0:
        p_qr = q_rope_ptr + i_t * stride_rt + o_head[:, None] * stride_rh
        b_qr = tl.load(p_qr + o_r[None, :], mask=m_h & m_r, other=0.0)
        if DOT_FP32:
            b_qr = b_qr.to(tl.float32)

    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_acc0 = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    b_acc1 = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for block in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        m_k = (b_slot >= 0) & (b_slot < slots)
        # A cache may exceed 2**31 bytes: slots become int64 before they are multiplied.
        b_row = tl.where(m_k, b_slot, 0).to(tl.int64)
        if PAGED:
            b_row = (b_row // page_size) * stride_page + (b_row % page_size) * stride_row
        else:
            b_row = b_row * stride_row
        p_kv = kv_ptr + b_row[:, None]
        # [BLOCK_K, BLOCK_V] twice and [BLOCK_K, BLOCK_R]; empty places read nothing
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
        o_next = block + BLOCK_K + o_k
        b_slot = tl.load(p_i + o_next, mask=o_next < end, other=-1)

        b_s = tl.where(m_k[None, :], b_s * scale_log2, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # While every place so far is empty the maximum is -inf, and -inf - -inf is NaN.
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_old = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_w = b_p.to(b_v0.dtype)
        b_acc0 = tl.dot(b_w, b_v0, b_acc0 * b_old[:, None], input_precision="ieee")
        b_acc1 = tl.dot(b_w, b_v1, b_acc1 * b_old[:, None], input_precision="ieee")
        b_max = b_new

    m_any = b_sum != 0  # NaN too: what is wrong shows
    b_scale = (1.0 / tl.where(m_any, b_sum, 1.0))[:, None]
    b_lse = tl.where(m_any, (b_max + tl.log2(tl.where(m_any, b_sum, 1.0))) * LN2, float("-inf"))
    p_out = out_ptr + i_t * stride_ot + i_p * stride_op + o_head[:, None] * stride_oh + o_v[None, :]
    tl.store(p_out, (b_acc0 * b_scale).to(out_ptr.dtype.element_ty), mask=m_h & m_v0)
    tl.store(p_out + BLOCK_V, (b_acc1 * b_scale).to(out_ptr.dtype.element_ty), mask=m_h & m_v1)
    tl.store(lse_ptr + (i_t * parts + i_p) * heads + o_h, b_lse, mask=o_h < heads)


def attend_rows(problem: Problem, parts: Parts, tile: Tile) -> None:
    """Launch the kernel.

    Args:
        problem: checked arguments; queries in two parts and places with a table are taken as they
            are.
        parts: where the results go.
        tile: blocks, warps, stages.
    """
    if problem.top_k > MOST_PLACES:
        problem = problem.in_slots
    q, pages = problem.q, problem.pages
    # Without a rotary part nothing is read; strides of an empty tensor would compile anew.
    q_rope = problem.rope_part if problem.rope else q
    slots = table = requests = problem.indices
    if problem.table is not None:
        table, requests = problem.table
        slots = problem.indices.new_empty(problem.indices.shape)
    _attend_kernel[parts.grid(problem, tile)](
        q,
        pages,
        *parts.arguments(problem, problem.page_stride, pages.stride(1)),
        q_rope,
        q_rope.stride(0),
        q_rope.stride(1),
        table,
        requests,
        slots,
        table.shape[1],
        table.stride(0),
        D_V=problem.d_v,
        D_ROPE=problem.rope,
        BLOCK_H=tile.heads,
        BLOCK_V=problem.block_v,
        BLOCK_R=problem.block_r,
        BLOCK_K=tile.rows,
        STAGES=tile.stages,
        **parts.constants(problem),
        HAS_TABLE=problem.table is not None,
        SCAN=triton.next_power_of_2(max(problem.top_k, 1)) if problem.table else 1,
        # Triton's interpreter multiplies bfloat16 wrongly, and its dot accumulates in fp32 anyway.
        DOT_FP32=triton_interpreted() or q.dtype == torch.float32,
        num_warps=tile.warps,
        **parts.options,
        **tile.options,
    )


# What else decides about the machine code: queries, columns behind the values, whether lists are
# split, and the places of a list whose pages are looked up (0: slots are given).
_SERVED = tuple(product(("bf16",), (64, 0), (True, False), (0, 2048)))
_GREATEST_LIST = (("bf16", 64, True, MOST_PLACES),)
_FP16 = (("fp16", 64, True, 0), ("fp16", 64, False, 0))
_FP32 = (("fp32", 64, True, 0), ("fp32", 64, False, 0))


def compilations(device: Device) -> list[Compilation]:
    """Every tile that a device can get, in the forms that serve GLM-5 and in some others.

    bfloat16 rows with and without a rotary part, split and whole, slots and pages looked up for
    2048 places, and once for the most that a program holds; fp16 and fp32 rows with a rotary part,
    slots.
    """
    found = []
    for itemsize, forms in ((2, (*_SERVED, *_GREATEST_LIST, *_FP16)), (4, _FP32)):
        tiles = [t for t in sparse_mla_tiles(device, itemsize) if not t.hopper]
        found += [_compilation(device, tile, *form) for tile in tiles for form in forms]
    return found


def _compilation(
    device: Device, tile: Tile, dtype: str, rope: int, split: bool, places: int
) -> Compilation:
    name = "sparse_mla" if dtype == "bf16" else f"sparse_mla {dtype}"
    name += f" {tile.name} rope {rope} {'split' if split else 'whole'}"
    if places:
        name += " pages" if places == 2048 else f" pages of {places}"
    types = dict.fromkeys(("q_ptr", "q_rope_ptr", "kv_ptr"), f"*{dtype}")
    types |= {"indices_ptr": "*i32", "lengths_ptr": "*i32", "lse_ptr": "*fp32"}
    types |= {"table_ptr": "*i32", "request_ptr": "*i32", "slots_ptr": "*i32"}
    types |= {"out_ptr": "*fp32" if split else f"*{dtype}", "scale_log2": "fp32"}
    constants = {
        "D_V": 512,
        "D_ROPE": rope,
        "BLOCK_H": tile.heads,
        "BLOCK_V": 256,
        "BLOCK_R": max(16, rope),
        "BLOCK_K": tile.rows,
        "STAGES": tile.stages,
        "PAGED": True,
        "HAS_LENGTHS": not places,  # as the backend calls it
        "EARLY": split and device.dependent_launch,
        "HAS_TABLE": bool(places),
        "SCAN": max(places, 1),
        "DOT_FP32": dtype == "fp32",
    }
    return Compilation.of_tile(tile, name, "_attend_kernel", types, constants)

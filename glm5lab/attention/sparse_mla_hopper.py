"""Sparse MLA on Hopper over rows of 16-bit numbers, for more heads than one small product holds.

A program attends with 64 heads. One warpgroup gathers rows into shared memory by asynchronous
copies, two others multiply them (wgmma): each computes half of a block's scores, they exchange the
probabilities, and each accumulates half of the values' columns. So rows arrive while others are
multiplied, and a row is read once from memory though it is both key and value. Barriers in shared
memory (mbarrier) say which block is full and which is free.

Written in Gluon, Triton's language below the tile: Triton itself leaves loads, products and softmax
of such a tile one after the other (1,307 us at 1024 tokens against 745,
data/measurements/sparse_mla_64_heads_designs.json).
"""

from itertools import product

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import ANYWHERE, LN2, RUNTIME, Parts, Problem
from glm5lab.attention.tiles import Device, Tile, sparse_mla_tiles

HEADS = gl.constexpr(64)  # heads a program: the rows of one wgmma
BLOCK_K = gl.constexpr(64)  # cached rows a step
D_V = gl.constexpr(512)
CHUNK = gl.constexpr(64)  # columns of one copy: 128 bytes a row, the width of the swizzle
HALF = gl.constexpr(256)
STAGES = gl.constexpr(2)
GATHER_WARPS = gl.constexpr(4)


@gluon.jit
def load_slots(p_i, o_place, end, slots):
    """Slots of a list's places; -1 behind its end, and in place of a slot outside the cache."""
    b_slot = gl.load(p_i + o_place, mask=o_place < end, other=-1)
    return gl.where(b_slot < slots, b_slot, -1)


@gluon.jit
def row_offsets(b_slot, page_size, stride_page, stride_row, PAGED: gl.constexpr):
    """Offsets of slots' rows in units of 16 bytes, int64; an empty slot counts as slot 0."""
    b_row = gl.where(b_slot >= 0, b_slot, 0).to(gl.int64)
    if PAGED:
        b_page = b_row // page_size
        return b_page * stride_page + (b_row - b_page * page_size) * stride_row
    return b_row * stride_row


@gluon.jit
def _copy(p_source, mask, s_target, COLUMNS: gl.constexpr):
    """Start copying [rows, COLUMNS] from pointers to the first CHUNK columns; zeros if masked."""
    for i in gl.static_range(COLUMNS // CHUNK):
        s_chunk = s_target.slice(i * CHUNK, CHUNK, dim=1)
        async_copy.async_copy_global_to_shared(s_chunk, p_source + i * CHUNK, mask=mask)


@gluon.jit
def _gather(
    p_q,
    stride_qh,
    heads,
    kv_ptr,
    p_i,
    start,
    end,
    slots,
    page_size,
    stride_page,
    stride_row,
    s_q,
    s_qr,
    s_v,
    s_r,
    q_full,
    full,
    empty,
    D_ROPE: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Copy the queries, then block after block as soon as a stage is free."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [GATHER_WARPS, 1], [1, 0])
    o_k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout))
    o_c = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    # The next block's slots are loaded a step ahead, as their rows' addresses depend on them.
    b_slot = load_slots(p_i, start + o_k, end, slots)
    p_row = p_q + o_k.to(gl.int64)[:, None] * stride_qh + o_c[None, :]
    m_row = (o_k < heads)[:, None] & (o_c >= 0)[None, :]
    _copy(p_row, m_row, s_q, D_V)
    if D_ROPE > 0:
        _copy(p_row + D_V, m_row, s_qr, D_ROPE)
    async_copy.mbarrier_arrive(q_full, increment_count=False)
    stage = 0
    phase = 1
    for block in range(start, end, BLOCK_K):
        m_row = (b_slot >= 0)[:, None] & (o_c >= 0)[None, :]
        b_row = row_offsets(b_slot, page_size, stride_page, stride_row, PAGED)
        p_row = kv_ptr + (b_row * 8)[:, None] + o_c[None, :]
        b_slot = load_slots(p_i, block + BLOCK_K + o_k, end, slots)
        mbarrier.wait(empty.index(stage), phase)
        # Two barriers a block: its first half is multiplied while the second still arrives.
        s_rows = s_v.index(stage)
        _copy(p_row, m_row, s_rows.slice(0, HALF, dim=1), HALF)
        async_copy.mbarrier_arrive(full.index(stage * 2), increment_count=False)
        _copy(p_row + HALF, m_row, s_rows.slice(HALF, HALF, dim=1), HALF)
        if D_ROPE > 0:
            _copy(p_row + D_V, m_row, s_r.index(stage), D_ROPE)
        async_copy.mbarrier_arrive(full.index(stage * 2 + 1), increment_count=False)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _store(
    b_acc,
    b_max,
    b_sum,
    p_out,
    stride_oh,
    p_lse,
    heads,
    s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):
    """Store the output, b_acc / b_sum, and the LSE."""
    head: gl.constexpr = gl.SliceLayout(1, s_layout)
    head_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    m_any = b_sum != 0  # NaN too
    b_total = gl.where(m_any, b_sum, 1.0)
    o_h = gl.arange(0, HEADS, layout=head)
    b_lse = gl.where(m_any, (b_max + gl.log2(b_total)) * LN2, float("-inf"))
    gl.store(p_lse + o_h, b_lse, mask=o_h < heads)
    b_acc = b_acc * gl.convert_layout(1.0 / b_total, head_o)[:, None]
    o_h = gl.arange(0, HEADS, layout=head_o)
    o_d = gl.arange(0, D_V, layout=gl.SliceLayout(0, o_layout))
    m_o = (o_h < heads)[:, None] & (o_d >= 0)[None, :]
    p_o = p_out + o_h.to(gl.int64)[:, None] * stride_oh + o_d[None, :]
    gl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_o)


@gluon.jit
def _attend(
    p_out,
    stride_oh,
    p_lse,
    heads,
    scale_log2,
    p_i,
    start,
    end,
    slots,
    s_q,
    s_qr,
    s_v,
    s_r,
    q_full,
    full,
    empty,
    D_ROPE: gl.constexpr,
):
    """Two warpgroups: scores split by cached rows, values by columns."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_K // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF, 16])
    head: gl.constexpr = gl.SliceLayout(1, s_layout)
    head_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    o_k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, s_layout))
    b_max = gl.full([HEADS], float("-inf"), gl.float32, head)
    # Summed along rows at the end: a sum a step would cost three barriers.
    b_sum = gl.zeros([HEADS, BLOCK_K], gl.float32, s_layout)
    b_acc = gl.zeros([HEADS, D_V], gl.float32, o_layout)
    b_zero = gl.zeros([HEADS, BLOCK_K], gl.float32, s_layout)
    stage = 0
    phase = 0
    mbarrier.wait(q_full, 0)
    fence_async_shared()
    for block in range(start, end, BLOCK_K):
        s_rows = s_v.index(stage)
        mbarrier.wait(full.index(stage * 2), phase)
        # Copied rows are read by wgmma's own path to memory.
        fence_async_shared()
        b_slot = load_slots(p_i, block + o_k, end, slots)
        s_keys = s_rows.slice(0, HALF, dim=1).permute((1, 0))
        b_s = warpgroup_mma(s_q.slice(0, HALF, dim=1), s_keys, b_zero, use_acc=False, is_async=True)
        mbarrier.wait(full.index(stage * 2 + 1), phase)
        fence_async_shared()
        s_keys = s_rows.slice(HALF, HALF, dim=1).permute((1, 0))
        b_s = warpgroup_mma(s_q.slice(HALF, HALF, dim=1), s_keys, b_s, is_async=True)
        if D_ROPE > 0:
            b_s = warpgroup_mma(s_qr, s_r.index(stage).permute((1, 0)), b_s, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[b_s])

        b_s = gl.where((b_slot >= 0)[None, :], b_s * scale_log2, float("-inf"))
        b_new = gl.maximum(b_max, gl.max(b_s, 1))
        # While every place so far is empty the maximum is -inf, and -inf - -inf is NaN.
        b_ref = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = gl.exp2(b_s - b_ref[:, None])
        b_old = gl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old[:, None] + b_p
        b_max = b_new
        b_w = gl.convert_layout(b_p.to(s_q.dtype), gl.DotOperandLayout(0, o_layout, 2))
        b_acc = b_acc * gl.convert_layout(b_old, head_o)[:, None]
        b_acc = warpgroup_mma(b_w, s_rows, b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        mbarrier.arrive(empty.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    b_sum = gl.sum(b_sum, 1)
    _store(b_acc, b_max, b_sum, p_out, stride_oh, p_lse, heads, s_layout, o_layout)


@gluon.jit(
    do_not_specialize=[*RUNTIME, "stride_page", "stride_row"],
    do_not_specialize_on_alignment=ANYWHERE,
)
def _attend_64_kernel(
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
    D_ROPE: gl.constexpr,
    PAGED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    EARLY: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr,
):
    """Attend to rows in q's own dtype; strides of rows and pages count 16 bytes."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i_t = gl.program_id(0).to(gl.int64)
    i_p = gl.program_id(2)
    i_h = gl.program_id(1) * HEADS
    o_head = gl.program_id(1).to(gl.int64) * HEADS  # times a stride that may be large
    length = top_k
    if HAS_LENGTHS:
        length = gl.minimum(top_k, gl.load(lengths_ptr + i_t))
    start = i_p * part
    end = gl.minimum(start + part, length)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    s_q = gl.allocate_shared_memory(dtype, [HEADS, D_V], shared)
    s_qr = gl.allocate_shared_memory(dtype, [HEADS, CHUNK], shared)
    s_v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, D_V], shared)
    s_r = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, CHUNK], shared)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Copies arrive thread by thread, the warpgroups that multiply arrive together.
    mbarrier.init(q_full, count=GATHER_WARPS * 32)
    for i in gl.static_range(STAGES * 2):
        mbarrier.init(full.index(i), count=GATHER_WARPS * 32)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
    p_i = indices_ptr + i_t * stride_it
    p_q = q_ptr + i_t * stride_qt + o_head * stride_qh
    p_out = out_ptr + i_t * stride_ot + i_p * stride_op + o_head * stride_oh
    p_lse = lse_ptr + (i_t * parts + i_p) * heads + i_h
    left = heads - i_h
    # fmt: off
    gl.warp_specialize([
        (_attend, (p_out, stride_oh, p_lse, left, scale_log2, p_i, start, end, slots,
                   s_q, s_qr, s_v, s_r, q_full, full, empty, D_ROPE)),
        (_gather, (p_q, stride_qh, left, kv_ptr, p_i, start, end, slots, page_size, stride_page,
                   stride_row, s_q, s_qr, s_v, s_r, q_full, full, empty, D_ROPE, PAGED)),
    ], [GATHER_WARPS], [GATHER_REGISTERS])
    # fmt: on


# Registers a thread that gathers; the others share the rest, 232 each.
_GATHER_REGISTERS = 40


def attend_hopper(problem: Problem, parts: Parts, tile: Tile) -> None:
    """Launch the kernel. The problem is one that `Problem.copies_whole_chunks`."""
    q, pages = problem.q, problem.pages
    _attend_64_kernel[parts.grid(problem, tile)](
        q,
        pages,
        *parts.arguments(problem, problem.page_stride // 8, pages.stride(1) // 8),
        D_ROPE=problem.rope,
        **parts.constants(problem),
        GATHER_REGISTERS=_GATHER_REGISTERS,
        num_warps=tile.warps,
        **parts.options,
        **tile.options,
    )


def compilations(device: Device) -> list[Compilation]:
    """Everything that `sparse_mla` can launch on a device in this form."""
    types = {"q_ptr": "*bf16", "kv_ptr": "*bf16", "scale_log2": "fp32"}
    types |= {"indices_ptr": "*i32", "lengths_ptr": "*i32", "lse_ptr": "*fp32"}
    found = []
    for tile in [t for t in sparse_mla_tiles(device, itemsize=2) if t.hopper]:
        for rope, split in product((64, 0), (True, False)):
            constants = {
                "D_ROPE": rope,
                "PAGED": True,
                "HAS_LENGTHS": True,
                "EARLY": split,
                "GATHER_REGISTERS": _GATHER_REGISTERS,
            }
            out = {"out_ptr": "*fp32" if split else "*bf16"}
            name = f"sparse_mla {tile.name} rope {rope} {'split' if split else 'whole'}"
            kernel = "_attend_64_kernel"
            found.append(Compilation.of_tile(tile, name, kernel, types | out, constants))
    return found

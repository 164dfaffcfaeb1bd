"""Sparse MLA on Hopper over fp8_ds_mla rows: values become fp16 once a row, for all heads.

Two warpgroups gather in turn: they load a block's e4m3 words into registers and store them as fp16,
which holds e4m3 exactly, into shared memory, where a third warpgroup multiplies them (wgmma). Each
group of 128 values has products of its own: its scale multiplies the scores in float32, so that
they are as exact as the rows, and the probabilities before they become fp16.

Heads lie along the columns of the products, so that rows and values fill the 64 rows of a wgmma,
and nothing is padded at 8 heads.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm5lab.attention.compile import Compilation
from glm5lab.attention.hopper_fp8_rows import GROUP, TINY, WARPS, gather_fp8, store_queries
from glm5lab.attention.problem import ANYWHERE, LN2, RUNTIME, Parts, Problem
from glm5lab.attention.sparse_mla_hopper import (
    BLOCK_K,
    CHUNK,
    D_V,
    STAGES,
    load_slots,
)
from glm5lab.attention.tiles import Device, Tile, sparse_mla_tiles


@gluon.jit
def _scores(s_rows, s_queries, b_zero):
    return warpgroup_mma(s_rows, s_queries.permute((1, 0)), b_zero, use_acc=False, is_async=True)


@gluon.jit
def _add(s_rows, s_weights, b_acc):
    return warpgroup_mma(s_rows.permute((1, 0)), s_weights.permute((1, 0)), b_acc, is_async=True)


@gluon.jit
def _times(b_s, b_scale):
    return b_s * b_scale[:, None]


@gluon.jit
def _attend(
    p_q,
    stride_qh,
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
    s_p,
    s_v,
    s_r,
    s_scale,
    full,
    empty,
    HEADS: gl.constexpr,
):
    """HEADS along the columns: scores [BLOCK_K, HEADS], four outputs [GROUP, HEADS]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    head: gl.constexpr = gl.SliceLayout(0, layout)
    line: gl.constexpr = gl.SliceLayout(1, layout)
    # Every warp holds all scales of a block: their maximum needs no barrier.
    flat: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    b_q_unit = gl.convert_layout(store_queries(p_q, stride_qh, heads, s_q, s_qr, HEADS), head)
    o_k = gl.arange(0, BLOCK_K, layout=line)
    b_max = gl.full([HEADS], float("-inf"), gl.float32, head)
    b_sum = gl.full([HEADS], 0.0, gl.float32, head)
    b_zero = gl.zeros([BLOCK_K, HEADS], gl.float32, layout)
    b_acc0 = gl.zeros([GROUP, HEADS], gl.float32, layout)
    b_acc1 = b_acc0
    b_acc2 = b_acc0
    b_acc3 = b_acc0
    unit = TINY
    stage = 0
    phase = 0
    for block in range(start, end, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        b_slot = load_slots(p_i, block + o_k, end, slots)
        s_0 = s_v.index(stage).slice(0, GROUP, dim=1)
        s_1 = s_v.index(stage).slice(GROUP, GROUP, dim=1)
        s_2 = s_v.index(stage).slice(2 * GROUP, GROUP, dim=1)
        s_3 = s_v.index(stage).slice(3 * GROUP, GROUP, dim=1)
        b_s0 = _scores(s_0, s_q.slice(0, GROUP, dim=1), b_zero)
        b_s1 = _scores(s_1, s_q.slice(GROUP, GROUP, dim=1), b_zero)
        b_s2 = _scores(s_2, s_q.slice(2 * GROUP, GROUP, dim=1), b_zero)
        b_s3 = _scores(s_3, s_q.slice(3 * GROUP, GROUP, dim=1), b_zero)
        b_r = _scores(s_r.index(stage), s_qr, b_zero)
        s_factors = s_scale.index(stage)
        b_f0 = s_factors.slice(0, BLOCK_K, dim=0).load(line)
        b_f1 = s_factors.slice(BLOCK_K, BLOCK_K, dim=0).load(line)
        b_f2 = s_factors.slice(2 * BLOCK_K, BLOCK_K, dim=0).load(line)
        b_f3 = s_factors.slice(3 * BLOCK_K, BLOCK_K, dim=0).load(line)
        top = gl.max(s_factors.load(flat), 0)
        b_s0, b_s1, b_s2, b_s3, b_r = warpgroup_mma_wait(0, deps=[b_s0, b_s1, b_s2, b_s3, b_r])
        b_s = _times(b_s0, b_f0) + _times(b_s1, b_f1) + _times(b_s2, b_f2) + _times(b_s3, b_f3)
        b_s = (b_s * b_q_unit[None, :] + b_r) * scale_log2
        b_s = gl.where((b_slot >= 0)[:, None], b_s, float("-inf"))
        b_new = gl.maximum(b_max, gl.max(b_s, 0))
        b_ref = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = gl.exp2(b_s - b_ref[None, :])
        b_old = gl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old + gl.sum(b_p, 0)
        b_max = b_new
        # Probabilities times scales count in the largest scale of all groups so far, as they do in
        # the largest score: 256 at most, and exact enough in fp16 down to 2**-22 of that. Values
        # whose scales are smaller still hardly show in their row.
        new_unit = gl.maximum(unit, top * 0.00390625)
        per_unit = 1.0 / new_unit
        s_p.index(0).store(_times(b_p, b_f0 * per_unit).to(gl.float16).trans())
        s_p.index(1).store(_times(b_p, b_f1 * per_unit).to(gl.float16).trans())
        s_p.index(2).store(_times(b_p, b_f2 * per_unit).to(gl.float16).trans())
        s_p.index(3).store(_times(b_p, b_f3 * per_unit).to(gl.float16).trans())
        fence_async_shared()
        b_old = (b_old * (unit * per_unit))[None, :]
        unit = new_unit
        b_acc0 = _add(s_0, s_p.index(0), b_acc0 * b_old)
        b_acc1 = _add(s_1, s_p.index(1), b_acc1 * b_old)
        b_acc2 = _add(s_2, s_p.index(2), b_acc2 * b_old)
        b_acc3 = _add(s_3, s_p.index(3), b_acc3 * b_old)
        b_acc0, b_acc1, b_acc2, b_acc3 = warpgroup_mma_wait(
            0, deps=[b_acc0, b_acc1, b_acc2, b_acc3]
        )
        mbarrier.arrive(empty.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    m_any = b_sum != 0  # NaN too
    b_total = gl.where(m_any, b_sum, 1.0)
    o_h = gl.arange(0, HEADS, layout=head)
    o_d = gl.arange(0, GROUP, layout=line)
    b_lse = gl.where(m_any, (b_max + gl.log2(b_total)) * LN2, float("-inf"))
    gl.store(p_lse + o_h, b_lse, mask=o_h < heads)
    p_o = p_out + o_h.to(gl.int64)[None, :] * stride_oh + o_d[:, None]
    m_o = (o_h < heads)[None, :] & (o_d >= 0)[:, None]
    b_unit = (unit / b_total)[None, :]
    dtype: gl.constexpr = p_out.dtype.element_ty
    gl.store(p_o, (b_acc0 * b_unit).to(dtype), mask=m_o)
    gl.store(p_o + GROUP, (b_acc1 * b_unit).to(dtype), mask=m_o)
    gl.store(p_o + 2 * GROUP, (b_acc2 * b_unit).to(dtype), mask=m_o)
    gl.store(p_o + 3 * GROUP, (b_acc3 * b_unit).to(dtype), mask=m_o)


@gluon.jit(do_not_specialize=[*RUNTIME, "stride_page"], do_not_specialize_on_alignment=ANYWHERE)
def _attend_hopper_fp8_kernel(
    q_ptr,
    word_ptr,
    scale_ptr,
    rope_ptr,
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
    stride_it,
    stride_ot,
    stride_op,
    stride_oh,
    HEADS: gl.constexpr,
    PAGED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    EARLY: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Attend to fp8_ds_mla rows, one cache under three pointers; page strides count 16 bytes."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i_t = gl.program_id(0).to(gl.int64)
    i_p = gl.program_id(2)
    i_h = gl.program_id(1) * HEADS
    length = top_k
    if HAS_LENGTHS:
        length = gl.minimum(top_k, gl.load(lengths_ptr + i_t))
    start = i_p * part
    end = gl.minimum(start + part, length)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_q = gl.allocate_shared_memory(gl.float16, [HEADS, D_V], shared)
    s_qr = gl.allocate_shared_memory(gl.bfloat16, [HEADS, CHUNK], shared)
    s_v = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_K, D_V], shared)
    s_r = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, CHUNK], shared)
    s_p = gl.allocate_shared_memory(gl.float16, [D_V // GROUP, HEADS, BLOCK_K], shared)
    s_scale = gl.allocate_shared_memory(gl.float32, [STAGES, D_V // GROUP * BLOCK_K], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    p_i = indices_ptr + i_t * stride_it
    p_q = q_ptr + i_t * stride_qt + i_h * stride_qh
    p_out = out_ptr + i_t * stride_ot + i_p * stride_op + i_h * stride_oh
    p_lse = lse_ptr + (i_t * parts + i_p) * heads + i_h
    left = heads - i_h
    # fmt: off
    gl.warp_specialize([
        (_attend, (p_q, stride_qh, p_out, stride_oh, p_lse, left, scale_log2, p_i, start, end,
                   slots, s_q, s_qr, s_p, s_v, s_r, s_scale, full, empty, HEADS)),
        (gather_fp8, (word_ptr, scale_ptr, rope_ptr, p_i, start, end, slots, page_size,
                      stride_page, s_v, s_r, s_scale, full, empty, PAGED, 0)),
        (gather_fp8, (word_ptr, scale_ptr, rope_ptr, p_i, start, end, slots, page_size,
                      stride_page, s_v, s_r, s_scale, full, empty, PAGED, 1)),
    ], [WARPS, WARPS], [REGISTERS, REGISTERS])
    # fmt: on


_REGISTERS = 168  # a thread, of all three warpgroups


def attend_hopper_fp8(problem: Problem, parts: Parts, tile: Tile) -> None:
    """Launch the kernel over uint8 rows of 656 bytes. The problem `copies_whole_chunks`.

    Head strides of q and out are below `problem.FAR`: int64 offsets would spill registers.
    """
    q, pages = problem.q, problem.pages
    _attend_hopper_fp8_kernel[parts.grid(problem, tile)](
        q,
        pages.view(torch.int32),
        pages.view(torch.float32),
        pages.view(torch.bfloat16),
        *parts.arguments(problem, problem.page_stride // 16),
        HEADS=tile.heads,
        **parts.constants(problem),
        REGISTERS=_REGISTERS,
        num_warps=tile.warps,
        **parts.options,
        **tile.options,
    )


def compilations(device: Device) -> list[Compilation]:
    """Everything that `sparse_mla` can launch on a device in this form."""
    types = {"q_ptr": "*bf16", "word_ptr": "*i32", "scale_ptr": "*fp32", "rope_ptr": "*bf16"}
    types |= {"indices_ptr": "*i32", "lengths_ptr": "*i32", "lse_ptr": "*fp32"}
    found = []
    for tile in [t for t in sparse_mla_tiles(device, itemsize=2, fp8=True) if t.hopper]:
        for split in (True, False):
            constants = {
                "HEADS": tile.heads,
                "PAGED": True,
                "HAS_LENGTHS": True,
                "EARLY": split,
                "REGISTERS": _REGISTERS,
            }
            out = {"out_ptr": "*fp32" if split else "*bf16", "scale_log2": "fp32"}
            name = f"sparse_mla fp8 {tile.name} {'split' if split else 'whole'}"
            kernel = "_attend_hopper_fp8_kernel"
            found.append(Compilation.of_tile(tile, name, kernel, types | out, constants))
    return found

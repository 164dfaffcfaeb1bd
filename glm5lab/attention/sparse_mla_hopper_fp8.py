"""Sparse MLA on Hopper over fp8_ds_mla rows: values become fp16 once a row, for all heads.

Warpgroups that gather load a block's e4m3 words into registers, multiply them by their group's
scale and store fp16 into shared memory, where others multiply them (wgmma). The scales of a block
are divided by a power of two, its unit, which keeps every value within fp16; the unit multiplies
scores and probabilities instead. Rope columns stay bfloat16.

Up to 16 heads: heads lie along the columns of the products, so that rows and values fill the 64
rows of a wgmma, and nothing is padded at 8 heads. Two warpgroups gather in turn, one multiplies.
More heads: as in `sparse_mla_hopper`.
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
from glm5lab.attention.hopper_fp8_rows import TINY, gather_fp8, store_queries
from glm5lab.attention.problem import ANYWHERE, LN2, RUNTIME, Parts, Problem
from glm5lab.attention.sparse_mla_hopper import (
    BLOCK_K,
    CHUNK,
    D_V,
    STAGES,
    load_slots,
    store_64,
)
from glm5lab.attention.tiles import Device, Tile, sparse_mla_tiles


@gluon.jit
def _unit(s_unit, stage, WARPS: gl.constexpr):
    return gl.max(s_unit.index(stage).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


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
    s_unit,
    full,
    empty,
    HEADS: gl.constexpr,
):
    """HEADS along the columns: scores [BLOCK_K, HEADS], output [D_V, HEADS]; one warpgroup."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    head: gl.constexpr = gl.SliceLayout(0, layout)
    line: gl.constexpr = gl.SliceLayout(1, layout)
    b_q_unit = gl.convert_layout(store_queries(p_q, stride_qh, heads, s_q, s_qr, HEADS, 4), head)
    o_k = gl.arange(0, BLOCK_K, layout=line)
    b_max = gl.full([HEADS], float("-inf"), gl.float32, head)
    b_sum = gl.full([HEADS], 0.0, gl.float32, head)
    b_acc = gl.zeros([D_V, HEADS], gl.float32, layout)
    b_zero = gl.zeros([BLOCK_K, HEADS], gl.float32, layout)
    unit = TINY * 0.015625
    stage = 0
    phase = 0
    for block in range(start, end, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        b_slot = load_slots(p_i, block + o_k, end, slots)
        s_rows = s_v.index(stage)
        b_s = warpgroup_mma(s_rows, s_q.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_r = warpgroup_mma(
            s_r.index(stage), s_qr.permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        block_unit = _unit(s_unit, stage, 4)
        b_s, b_r = warpgroup_mma_wait(0, deps=[b_s, b_r])
        b_s = (b_s * (b_q_unit * block_unit)[None, :] + b_r) * scale_log2
        b_s = gl.where((b_slot >= 0)[:, None], b_s, float("-inf"))
        b_new = gl.maximum(b_max, gl.max(b_s, 0))
        b_ref = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = gl.exp2(b_s - b_ref[None, :])
        b_old = gl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old + gl.sum(b_p, 0)
        b_max = b_new
        # Probabilities count in the largest unit so far, as they do in the largest score.
        new_unit = gl.maximum(unit, block_unit)
        s_p.store((b_p * (block_unit / new_unit)).to(gl.float16).trans())
        fence_async_shared()
        b_acc = b_acc * (b_old * (unit / new_unit))[None, :]
        unit = new_unit
        b_acc = warpgroup_mma(s_rows.permute((1, 0)), s_p.permute((1, 0)), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        mbarrier.arrive(empty.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    m_any = b_sum != 0  # NaN too
    b_total = gl.where(m_any, b_sum, 1.0)
    o_h = gl.arange(0, HEADS, layout=head)
    o_d = gl.arange(0, D_V, layout=line)
    b_lse = gl.where(m_any, (b_max + gl.log2(b_total)) * LN2, float("-inf"))
    gl.store(p_lse + o_h, b_lse, mask=o_h < heads)
    p_o = p_out + o_h.to(gl.int64)[None, :] * stride_oh + o_d[:, None]
    m_o = (o_h < heads)[None, :] & (o_d >= 0)[:, None]
    b_acc = b_acc * (unit / b_total)[None, :]
    gl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_o)


@gluon.jit
def _attend_64(
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
    s_v,
    s_r,
    s_unit,
    full,
    empty,
    HEADS: gl.constexpr,
):
    """HEADS along the rows; two warpgroups, scores split by cached rows, values by columns."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_K // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D_V // 2, 16])
    head: gl.constexpr = gl.SliceLayout(1, s_layout)
    head_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    b_q_unit = gl.convert_layout(store_queries(p_q, stride_qh, heads, s_q, s_qr, HEADS, 8), head)
    o_k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, s_layout))
    b_max = gl.full([HEADS], float("-inf"), gl.float32, head)
    b_sum = gl.full([HEADS], 0.0, gl.float32, head)
    b_acc = gl.zeros([HEADS, D_V], gl.float32, o_layout)
    b_zero = gl.zeros([HEADS, BLOCK_K], gl.float32, s_layout)
    unit = TINY * 0.015625
    stage = 0
    phase = 0
    for block in range(start, end, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        b_slot = load_slots(p_i, block + o_k, end, slots)
        s_rows = s_v.index(stage)
        b_s = warpgroup_mma(s_q, s_rows.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_r = warpgroup_mma(
            s_qr, s_r.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        block_unit = _unit(s_unit, stage, 8)
        b_s, b_r = warpgroup_mma_wait(0, deps=[b_s, b_r])
        b_s = (b_s * (b_q_unit * block_unit)[:, None] + b_r) * scale_log2
        b_s = gl.where((b_slot >= 0)[None, :], b_s, float("-inf"))
        b_new = gl.maximum(b_max, gl.max(b_s, 1))
        b_ref = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = gl.exp2(b_s - b_ref[:, None])
        b_old = gl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old + gl.sum(b_p, 1)
        b_max = b_new
        new_unit = gl.maximum(unit, block_unit)
        b_w = (b_p * (block_unit / new_unit)).to(gl.float16)
        b_w = gl.convert_layout(b_w, gl.DotOperandLayout(0, o_layout, 2))
        b_acc = b_acc * gl.convert_layout(b_old * (unit / new_unit), head_o)[:, None]
        unit = new_unit
        b_acc = warpgroup_mma(b_w, s_rows, b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        mbarrier.arrive(empty.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    store_64(b_acc, b_max, b_sum, unit, p_out, stride_oh, p_lse, heads, s_layout, o_layout)


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
    s_unit = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
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
    if HEADS == 64:
        gl.warp_specialize([
            (_attend_64, (p_q, stride_qh, p_out, stride_oh, p_lse, left, scale_log2, p_i, start,
                          end, slots, s_q, s_qr, s_v, s_r, s_unit, full, empty, HEADS)),
            (gather_fp8, (word_ptr, scale_ptr, rope_ptr, p_i, start, end, slots, page_size,
                       stride_page, s_v, s_r, s_unit, full, empty, PAGED, 4, 0, 1, 2)),
        ], [4], [REGISTERS])
    else:
        s_p = gl.allocate_shared_memory(gl.float16, [HEADS, BLOCK_K], shared)
        gl.warp_specialize([
            (_attend, (p_q, stride_qh, p_out, stride_oh, p_lse, left, scale_log2, p_i, start, end,
                       slots, s_q, s_qr, s_p, s_v, s_r, s_unit, full, empty, HEADS)),
            (gather_fp8, (word_ptr, scale_ptr, rope_ptr, p_i, start, end, slots, page_size,
                       stride_page, s_v, s_r, s_unit, full, empty, PAGED, 4, 0, 2, 4)),
            (gather_fp8, (word_ptr, scale_ptr, rope_ptr, p_i, start, end, slots, page_size,
                       stride_page, s_v, s_r, s_unit, full, empty, PAGED, 4, 1, 2, 4)),
        ], [4, 4], [REGISTERS, REGISTERS])
    # fmt: on


def _registers(tile: Tile) -> int:
    """Registers a thread that gathers; the others share the rest."""
    return 112 if tile.heads == 64 else 168


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
        REGISTERS=_registers(tile),
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
                "REGISTERS": _registers(tile),
            }
            out = {"out_ptr": "*fp32" if split else "*bf16", "scale_log2": "fp32"}
            name = f"sparse_mla fp8 {tile.name} {'split' if split else 'whole'}"
            found.append(
                Compilation(
                    name,
                    "_attend_hopper_fp8_kernel",
                    types | out,
                    constants,
                    tile.warps,
                    tile.options,
                )
            )
    return found

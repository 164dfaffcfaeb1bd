"""Sparse MLA as Triton kernels: one program a query token, block of heads and part of its rows.

Same signature as `reference.sparse_mla`. A program walks its part of the token's list of slots in
blocks, gathers the latent rows and keeps a running softmax (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018); where a token's list is split among programs, a second
kernel merges their results ("Flash-Decoding", 2023). Runs on GPUs, and on CPUs under
TRITON_INTERPRET=1.
"""

from collections.abc import Callable
from itertools import product

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm5lab.attention import triton_interpreted
from glm5lab.attention.arguments import check_kernels_run_on, on_device_of
from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import ANYWHERE, FAR, LN2, RUNTIME, Parts, Problem
from glm5lab.attention.reference import Query, Table, check_sparse_mla_arguments
from glm5lab.attention.sparse_mla_fp8 import attend_fp8
from glm5lab.attention.tiles import (
    INTERPRETER,
    MAX_PARTS,
    Device,
    Tile,
    device_of,
    sparse_mla_parts,
    sparse_mla_tile,
    sparse_mla_tiles,
)

# What a program has shared memory and registers for.
MAX_D_V, MAX_ROPE = 512, 64


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

    One program a token, head and block of columns. A part without a row has lse -inf and is not
    read.
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
    b_lse = tl.load(part_lse_ptr + o_part, mask=o_p < parts, other=float("-inf"))
    b_max = tl.max(b_lse, 0)
    b_ref = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_w = tl.exp(b_lse - b_ref)
    b_sum = tl.sum(b_w, 0)
    m_any = b_sum != 0  # NaN is no empty list
    # [BLOCK_P, BLOCK_D]
    m_part = (b_w != 0)[:, None] & (o_d < D_V)[None, :]
    b_x = tl.load(part_out_ptr + o_part[:, None] * D_V + o_d[None, :], mask=m_part, other=0.0)
    b_out = tl.sum(b_x * b_w[:, None], 0) / tl.where(m_any, b_sum, 1.0)
    p_out = out_ptr + i_t * stride_ot + i_h.to(tl.int64) * stride_oh + o_d
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=o_d < D_V)
    b_total = tl.where(m_any, b_ref + tl.log(tl.where(m_any, b_sum, 1.0)), float("-inf"))
    tl.store(lse_ptr + i_t * heads + i_h, b_total, mask=tl.program_id(2) == 0)


def sparse_mla(
    q: Query,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None = None,
    d_v: int = 512,
    out: torch.Tensor | None = None,
    check: bool = False,
    table: Table | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query token over its own list of cached latent rows.

    Arguments, result and errors are those of `reference.sparse_mla`, with two differences: q and
    out are float32, bfloat16 or float16 and of one dtype with kv, unless kv is uint8 (fp8_ds_mla
    rows, q then bfloat16 or float16); and the LSE is float32.

    Args:
        q: [T, H, D], or its parts [T, H, d_v] and [T, H, D - d_v]; the plain kernel over 16-bit
            rows reads them where they are, the others a copy in one tensor.
        kv: [S, D], or pages [P, page_size, D] with any strides between pages and rows; uint8 rows
            of 656 bytes stand for fp8_ds_mla.
        indices: [T, K] int32 slots, -1 for an empty place; a slot outside kv counts as one.
        scale: factor on the scores.
        lengths: [T] integers, or None.
        d_v: width of the values.
        out: [T, H, d_v], written in place when given.
        check: compare every slot with the cache's size first, which waits for the device.
        table: [R, pages] int32 and [T] int32; the plain kernel over 16-bit rows looks places up by
            itself, before the others their slots are computed. Page numbers beyond kv and places
            beyond a request's pages count as empty.

    Raises:
        ValueError: an argument does not fit; with `check`, a slot outside the cache too.
    """
    problem, out, lse = checked_problem(q, kv, indices, scale, lengths, d_v, out, check, table)
    if problem.tokens:
        device = INTERPRETER if triton_interpreted() else device_of(problem.q.device.index or 0)
        tile = sparse_mla_tile(
            device,
            problem.tokens,
            problem.heads,
            problem.q.dtype.itemsize,
            problem.fp8,
            problem.copies_whole_chunks and (not problem.fp8 or out.stride(1) < FAR),
        )
        parts = sparse_mla_parts(device, tile, problem.tokens, problem.heads, problem.top_k)
        with on_device_of(problem.q):
            launch(problem, out, lse, device, tile, parts)
    return out, lse


def checked_problem(
    q: Query,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None,
    d_v: int,
    out: torch.Tensor | None,
    check: bool,
    table: Table | None = None,
) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """The arguments of `sparse_mla` as its kernels need them, the output and the LSE.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    check_sparse_mla_arguments(q, kv, indices, lengths, d_v, out, check, table)
    q, q_rope = q if isinstance(q, tuple) else (q, None)
    _check_dtypes(q, kv, indices, lengths, out)
    rope = q.shape[2] - d_v if q_rope is None else q_rope.shape[2]
    if d_v > MAX_D_V or rope > MAX_ROPE:
        raise ValueError(
            f"d_v: expected at most {MAX_D_V} columns of values and {MAX_ROPE} behind them, "
            f"got {d_v} of a width of {d_v + rope}"
        )
    check_kernels_run_on("q", q)
    out = q.new_empty(*q.shape[:2], d_v) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    problem = Problem(
        q if q.stride(-1) == 1 else q.contiguous(),
        kv,
        indices if indices.stride(-1) == 1 else indices.contiguous(),
        None if lengths is None else lengths.contiguous(),
        scale,
        d_v,
        q_rope if q_rope is None or q_rope.stride(-1) == 1 else q_rope.contiguous(),
        None if table is None else (table[0].contiguous(), table[1].contiguous()),
    )
    return problem, out, lse


def launch(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    device: Device,
    tile: Tile,
    parts: int,
) -> None:
    """Run the kernels with a given tile and number of parts.

    Args:
        problem: checked arguments.
        out: [T, H, d_v], written.
        lse: [T, H] float32, written.
        device: decides whether the merge may be launched early.
        tile: blocks, warps, stages.
        parts: programs that share a token's list; 1 writes the result at once.
    """
    attend = _form(problem, tile)
    problem = problem if attend is _attend else problem.whole.in_slots
    blocks = triton.cdiv(max(problem.top_k, 1), tile.rows)
    places = triton.cdiv(blocks, parts) * tile.rows
    parts = triton.cdiv(blocks * tile.rows, places)
    if parts == 1:
        strides = (out.stride(0), 0, out.stride(1))
        attend(problem, Parts(out, lse, strides, 1, places, False), tile)
        return
    shape = (problem.tokens, parts, problem.heads)
    part_out = out.new_empty(*shape, problem.d_v, dtype=torch.float32)
    part_lse = lse.new_empty(shape)
    strides = (part_out.stride(0), part_out.stride(1), part_out.stride(2))
    split = Parts(part_out, part_lse, strides, parts, places, device.dependent_launch)
    attend(problem, split, tile)
    _merge(problem, split, out, lse)


def _form(problem: Problem, tile: Tile) -> Callable[[Problem, Parts, Tile], None]:
    """What launches the kernel of a tile."""
    if not tile.hopper:
        return attend_fp8 if problem.fp8 else _attend
    # Gluon is imported where its kernels run.
    if problem.fp8:
        from glm5lab.attention.sparse_mla_hopper_fp8 import attend_hopper_fp8

        return attend_hopper_fp8
    from glm5lab.attention.sparse_mla_hopper import attend_hopper

    return attend_hopper


def _merge(problem: Problem, split: Parts, out: torch.Tensor, lse: torch.Tensor) -> None:
    block_d = min(256, triton.next_power_of_2(problem.d_v))
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
        # Two capacities, so that another number of parts compiles nothing.
        BLOCK_P=8 if split.count <= 8 else MAX_PARTS,
        EARLY=split.early,
        num_warps=4,
        **split.options,
    )


def _attend(problem: Problem, parts: Parts, tile: Tile) -> None:
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


def _check_dtypes(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q: expected float32, bfloat16 or float16, got {q.dtype}")
    if kv.dtype == torch.uint8:
        if q.dtype == torch.float32 and not triton_interpreted():
            raise ValueError("q: expected bfloat16 or float16 beside fp8_ds_mla rows, got float32")
    elif kv.dtype != q.dtype:
        raise ValueError(f"kv: expected {q.dtype} (the dtype of q) or uint8, got {kv.dtype}")
    if out is not None and out.dtype != q.dtype:
        raise ValueError(f"out: expected {q.dtype} (the dtype of q), got {out.dtype}")
    if out is not None and out.stride(-1) != 1:
        raise ValueError("out: the last dimension must be contiguous")
    named = {"kv": kv, "indices": indices, "lengths": lengths, "out": out}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} (that of q), got {tensor.device}")


def compilations(device: Device) -> list[Compilation]:
    """Everything that `sparse_mla` can launch on a device for GLM-5's rows of 16-bit numbers."""
    types = {"q_ptr": "*bf16", "q_rope_ptr": "*bf16", "kv_ptr": "*bf16"}
    types |= {"indices_ptr": "*i32", "lengths_ptr": "*i32", "lse_ptr": "*fp32"}
    types |= {"table_ptr": "*i32", "request_ptr": "*i32", "slots_ptr": "*i32"}
    found = []
    tiles = [t for t in sparse_mla_tiles(device, itemsize=2) if not t.hopper]
    for tile in tiles:
        for rope, split, table in product((64, 0), (True, False), (False, True)):
            name = f"sparse_mla {tile.name} rope {rope} {'split' if split else 'whole'}"
            name += " pages looked up" if table else ""
            constants = {
                "D_V": 512,
                "D_ROPE": rope,
                "BLOCK_H": tile.heads,
                "BLOCK_V": 256,
                "BLOCK_R": max(16, rope),
                "BLOCK_K": tile.rows,
                "STAGES": tile.stages,
                "PAGED": True,
                "HAS_LENGTHS": True,
                "EARLY": split and device.dependent_launch,
                "HAS_TABLE": table,
                "SCAN": 2048 if table else 1,
                "DOT_FP32": False,
            }
            out = {"out_ptr": "*fp32" if split else "*bf16", "scale_log2": "fp32"}
            found.append(
                Compilation(
                    name, "_attend_kernel", types | out, constants, tile.warps, tile.options
                )
            )
    for parts in (8, MAX_PARTS):
        constants = {"D_V": 512, "BLOCK_D": 256, "BLOCK_P": parts, "EARLY": device.dependent_launch}
        pointers = {"part_out_ptr": "*fp32", "part_lse_ptr": "*fp32", "lse_ptr": "*fp32"}
        pointers["out_ptr"] = "*bf16"
        found.append(Compilation(f"merge of {parts} parts", "_merge_kernel", pointers, constants))
    return found

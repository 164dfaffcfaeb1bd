"""Lightning-indexer logits against a paged key cache (decode) as a Triton kernel.

Same signature as `reference.paged_mqa_logits`. As in `indexer`, a block of keys is multiplied with
all heads of a request's queries; a program walks a share of one request's keys page by page.
"""

import torch
import triton
import triton.language as tl

from glm5lab.attention.arguments import (
    check_kernels_run_on,
    check_paged_mqa_logits_arguments,
    int32_bounds,
    on_device_of,
)
from glm5lab.attention.compile import Compilation
from glm5lab.attention.indexer import (
    Tile,
    check_dtypes,
    column_blocks,
    compiled_forms,
    fill,
    kernel_device,
    kernel_operands,
    operand,
    tile_logits,
    with_rows,
)
from glm5lab.attention.reference import page_parts
from glm5lab.attention.tiles import Device

RUNTIME = ["queries", "width", "visible", "chunk", "stride_end", "each", "stride_table"]
RUNTIME += ["stride_out"]


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=["end_ptr"])
def _paged_mqa_logits_kernel(
    q_ptr,
    key_ptr,
    scale_ptr,
    weights_ptr,
    end_ptr,
    table_ptr,
    out_ptr,
    queries,
    width,
    visible,
    chunk,
    stride_end,
    each,
    stride_qt,
    stride_qh,
    stride_page,
    stride_row,
    stride_scale_page,
    stride_w,
    stride_table,
    stride_out,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    CLEAN: tl.constexpr,
    DECODE: tl.constexpr,
    DOT_FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, width)
    i_b = tl.program_id(1)
    i_n = tl.program_id(2) * BLOCK_T
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_T * BLOCK_H)
    o_nt = i_n + o_n // BLOCK_H
    o_nh = o_n % BLOCK_H
    o_t = i_n + tl.arange(0, BLOCK_T)
    o_h = tl.arange(0, BLOCK_H)
    m_t = o_t < queries
    m_d = o_d < DIM
    # Rows of q, weights and out: request after request.
    i_row = i_b.to(tl.int64) * queries

    # Ends of each query (each = 1), or a request's length (0), which its last query sees wholly.
    b_end = tl.load(end_ptr + i_b * stride_end + o_t * each, mask=m_t, other=0)
    b_back = (queries - 1 - o_t) * (1 - each)
    b_end = tl.where(m_t, tl.maximum(b_end, 0) - b_back, 0)
    high = tl.minimum(tl.maximum(tl.max(b_end, 0), first), tl.minimum(last, visible))
    p_out = out_ptr + (i_row + o_t)[None, :] * stride_out
    if high > first:
        # [BLOCK_T * BLOCK_H, BLOCK_D]
        p_q = q_ptr + (i_row + o_nt)[:, None] * stride_qt + o_nh[:, None] * stride_qh
        m_n = (o_nt < queries) & (o_nh < HEADS)
        b_q = tl.load(p_q + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_q = operand(b_q, DECODE, DOT_FP32)
        # [BLOCK_T, BLOCK_H]
        p_w = weights_ptr + (i_row + o_t)[:, None] * stride_w + o_h[None, :]
        b_w = tl.load(p_w, mask=m_t[:, None] & (o_h < HEADS)[None, :], other=0.0)

        p_table = table_ptr + i_b.to(tl.int64) * stride_table
        o_s = first + tl.arange(0, BLOCK_S)
        b_page = tl.load(p_table + o_s // PAGE, mask=o_s < high, other=0)
        for i_s in tl.range(first, high, BLOCK_S, num_stages=STAGES):
            o_s = i_s + tl.arange(0, BLOCK_S)
            m_s = o_s < high
            # A cache may exceed 2**31 bytes: pages become int64 before they are multiplied.
            b_p = b_page.to(tl.int64)
            o_r = o_s % PAGE
            # [BLOCK_S, BLOCK_D]
            p_k = key_ptr + (b_p * stride_page + o_r * stride_row)[:, None] + o_d[None, :]
            b_k = tl.load(p_k, mask=m_s[:, None] & m_d[None, :], other=0.0)
            if HAS_SCALE:
                b_scale = tl.load(scale_ptr + b_p * stride_scale_page + o_r, mask=m_s, other=0.0)
            # The next block's pages are fetched a step ahead of the keys that need them.
            o_next = o_s + BLOCK_S
            b_page = tl.load(p_table + o_next // PAGE, mask=o_next < high, other=0)
            b_s = tile_logits(b_k, b_q, b_w, BLOCK_S, BLOCK_T, BLOCK_H, DECODE, DOT_FP32)
            if HAS_SCALE:
                b_s = b_s * b_scale[:, None]
            m_seen = m_s[:, None] & (o_s[:, None] < b_end[None, :])
            b_s = tl.where(m_seen, b_s, float("-inf"))
            tl.store(p_out + o_s[:, None], b_s, mask=(o_s < last)[:, None] & m_t[None, :])
    if CLEAN:
        done = first + (high - first + BLOCK_S - 1) // BLOCK_S * BLOCK_S
        fill(p_out, m_t, done, last, BLOCK_S)


# By bytes a value. fp8: the best of nine, each with 2, 4 and 8 programs a multiprocessor, for 8
# requests at 128K on an H200 (torch 2.11, Triton 3.6). What it takes now is in kernels.json.
DECODE = {
    1: Tile(keys=128, columns=128, warps=4, stages=3),
    2: Tile(keys=64, columns=128, warps=4, stages=2),
    4: Tile(keys=32, columns=32, warps=4, stages=1),
}
PROGRAMS_A_PROCESSOR = 4


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    clean: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Lightning-indexer scores of the newest queries of several requests against paged keys.

    As `reference.paged_mqa_logits`, where q may have other dtypes than the keys.

    Args:
        q: [B, N, H, D] float8_e4m3fn beside a uint8 cache, else float8_e4m3fn, bfloat16, float16 or
            float32: N query tokens of each of B requests.
        cache: [P, page_size, D + 4] uint8 (fp8 keys and scales; see `page_parts`), or
            [P, page_size, D] in q's dtype.
        weights: [B * N, H] or [B, N, H] floating point.
        context_lens: [B] or [B, N] integers; see `reference.context_ends`.
        block_table: [B, pages] integers, the cache's page for each page of a request. Those within
            a request's context are not checked: each must be from 0 to P - 1, since the kernel
            reads whatever memory it points to. Those behind it are not read.
        max_len: columns of the result; longer contexts are cut off there.
        clean: as in `mqa_logits`.
        tile: how the work is cut (default: DECODE).

    Returns:
        [B * N, max_len] float32, -inf past each query's context.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_paged_mqa_logits_arguments(q, cache, weights, context_lens, block_table, max_len)
    check_kernels_run_on("q", q)
    max_len = int(max_len)  # Triton knows no numpy integers
    requests, queries, heads, dim = q.shape
    keys, scales = page_parts(cache, dim)
    check_dtypes(q, "cache", keys)
    out = torch.empty(requests * queries, max_len, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    tile = tile or DECODE[q.itemsize]
    page = cache.shape[1]
    (q, keys), flags = kernel_operands(q.flatten(0, 1).contiguous(), keys)
    weights = with_rows(weights.float().reshape(-1, heads))
    ends = int32_bounds(context_lens)
    each = int(ends.dim() == 2)
    table = with_rows(block_table)
    blocks = column_blocks(tile, queries, heads, dim)
    chunk = _decode_chunk(requests, max_len, tile, kernel_device(q))
    grid = (triton.cdiv(max_len, chunk), requests, triton.cdiv(queries, blocks["BLOCK_T"]))
    with on_device_of(q):
        _paged_mqa_logits_kernel[grid](
            q,
            keys,
            keys if scales is None else scales,
            weights,
            ends,
            table,
            out,
            queries,
            max_len,
            table.shape[1] * page,
            chunk,
            ends.stride(0),
            each,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            keys.stride(1),
            0 if scales is None else scales.stride(0),
            weights.stride(0),
            table.stride(0),
            out.stride(0),
            PAGE=page,
            HAS_SCALE=scales is not None,
            CLEAN=clean,
            num_warps=tile.warps,
            **blocks,
            **flags,
        )
    return out


def _decode_chunk(requests: int, max_len: int, tile: Tile, device: Device) -> int:
    """Keys a program walks so that one wave of programs covers the longest possible contexts."""
    programs = device.multiprocessors * PROGRAMS_A_PROCESSOR
    share = triton.cdiv(requests * max_len, programs)
    return max(1, triton.cdiv(share, tile.keys)) * tile.keys


def compilations(device: Device) -> list[Compilation]:
    """What `paged_mqa_logits` launches on pages of 64; see `compiled_forms`."""
    flags = {"PAGE": 64, "CLEAN": True}
    return compiled_forms(device, "_paged_mqa_logits_kernel", DECODE, flags)

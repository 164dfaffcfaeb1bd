"""Plain PyTorch statements of sparse MLA, the lightning indexer and top-k.

Those of storing and gathering rows stand in `row_formats` and are found here too.

They run on any device, and in float64 too; the Triton kernels have the same signatures and are
tested against them. Sources: DeepSeek-V3.2-Exp's technical report
(DeepSeek sparse attention), and Hugging Face transformers' GlmMoeDsa model.
"""

import torch

from glm5lab.attention.arguments import (
    check_integer,
    check_mqa_logits_arguments,
    check_paged_mqa_logits_arguments,
    check_top_k_arguments,
)
from glm5lab.attention.row_arguments import FP8_LATENT as FP8_LATENT
from glm5lab.attention.row_arguments import FP8_ROPE as FP8_ROPE
from glm5lab.attention.row_arguments import FP8_ROW_BYTES as FP8_ROW_BYTES
from glm5lab.attention.row_formats import gather as gather
from glm5lab.attention.row_formats import gather_rows as gather_rows
from glm5lab.attention.row_formats import pack_fp8_rows as pack_fp8_rows
from glm5lab.attention.row_formats import page_parts as page_parts
from glm5lab.attention.row_formats import store_index_keys as store_index_keys
from glm5lab.attention.row_formats import store_rows as store_rows
from glm5lab.attention.row_formats import unpack_fp8_rows as unpack_fp8_rows
from glm5lab.attention.sparse_mla_arguments import Query as Query
from glm5lab.attention.sparse_mla_arguments import Table as Table
from glm5lab.attention.sparse_mla_arguments import check_sparse_mla_arguments


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
    tokens_at_once: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query token over its own list of cached latent rows.

    out[t, h] = sum_k softmax_k(scale * q[t, h] . kv[indices[t, k]]) * kv[indices[t, k], :d_v]

    Args:
        q: [T, H, D] queries in latent space, D = latent + rope (576 for GLM-5); or the two parts
            [T, H, d_v] and [T, H, D - d_v], as a tuple. float64, float32, bfloat16 or float16.
        kv: cached rows [S, D], or pages [P, page_size, D]; slot s is row s, or
            page s // page_size, row s % page_size. In q's dtype; beside float64 in any that
            q may have. Or fp8_ds_mla: uint8, rows of 656 bytes. The last dimension is contiguous.
        indices: [T, K] int32 or int64 slots; -1 marks an empty place, anywhere in the row, and a
            slot outside kv counts as one.
        scale: factor on the scores, below 2**127; (nope + rope) ** -0.5 for GLM-5.
        lengths: [T] int32 or int64; token t attends to its first lengths[t] places only.
        d_v: width of the values, the first d_v columns of a row (512 for GLM-5).
        out: [T, H, d_v] in q's dtype, written in place when given; no two elements share memory.
        check: raise when a slot lies outside kv.
        table: where indices are not slots but positions in each token's request: page numbers
            [R, pages] of the requests and the request [T] of each token, int32; a position behind
            the pages is an empty place. kv is then in pages. Request numbers are not checked: each
            must be from 0 to R - 1.
        tokens_at_once: query tokens whose rows are gathered together, to bound memory.

    Returns:
        out [T, H, d_v] in q's dtype, and the natural logarithm of the sum of exponentials
        [T, H] (float32, or float64 for float64 queries). A token with no place gets 0 and -inf.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_sparse_mla_arguments(q, kv, indices, scale, lengths, d_v, out, check, table)
    check_integer("tokens_at_once", tokens_at_once, 1)
    q = torch.cat(q, -1) if isinstance(q, tuple) else q
    tokens, heads, _ = q.shape
    slots = kv[..., 0].numel()
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    result = q.new_empty(tokens, heads, d_v) if out is None else out
    lse = torch.empty(tokens, heads, dtype=compute, device=q.device)
    if not slots:  # every place is empty, and row 0, which stands for those below, is missing
        return result.zero_(), lse.fill_(float("-inf"))
    if table is not None:
        indices = request_slots(indices, table, kv.shape[1])
    place = torch.arange(indices.shape[1], device=q.device)
    for start in range(0, tokens, tokens_at_once):
        part = slice(start, start + tokens_at_once)
        filled = (indices[part] >= 0) & (indices[part] < slots)
        if lengths is not None:
            filled &= place < lengths[part, None]
        rows = gather_rows(kv, indices[part].masked_fill(~filled, 0))
        rows = unpack_fp8_rows(rows, compute) if rows.dtype == torch.uint8 else rows.to(compute)
        # An empty place gathers row 0, which may hold anything, NaN included.
        rows = rows.masked_fill(~filled[..., None], 0.0)
        scores = torch.einsum("thd,tkd->thk", q[part].to(compute), rows) * scale
        scores.masked_fill_(~filled[:, None, :], float("-inf"))
        lse[part] = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[part].clamp_min(torch.finfo(compute).min)[..., None])
        result[part] = torch.einsum("thk,tkv->thv", weights, rows[..., :d_v]).to(result.dtype)
    return result, lse


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lightning-indexer scores against contiguous keys.

    logits[t, s] = k_scale[s] * sum_h weights[t, h] * ReLU(q[t, h] . k[s])

    Args:
        q: [T, H, D] index queries (GLM-5: 32 heads of 128), float64, float32, bfloat16, float16 or
            float8_e4m3fn; the scale of an fp8 query, like every constant factor, is part of the
            head weights.
        k: [S, D] index keys, one head, in any dtype that q may have.
        weights: [T, H] head weights, floating point.
        start: [T] integers; token t sees keys s >= start[t] (default: all).
        end: [T] integers; token t sees keys s < end[t] (default: all).
        k_scale: float32 [S], or any shape of S elements; the scale of each fp8 key.

    Returns:
        [T, S] float32 (float64 for float64 queries), -inf outside start..end.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_mqa_logits_arguments(q, k, weights, start, end, k_scale)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.einsum("thd,sd->ths", q.to(compute), k.to(compute)).relu_()
    logits = torch.einsum("ths,th->ts", scores, weights.to(compute))
    if k_scale is not None:
        logits *= k_scale.reshape(-1).to(compute)
    key = torch.arange(k.shape[0], device=q.device)
    if start is not None:
        logits.masked_fill_(key < start[:, None], float("-inf"))
    if end is not None:
        logits.masked_fill_(key >= end[:, None], float("-inf"))
    return logits


def context_ends(context_lens: torch.Tensor, queries: int) -> torch.Tensor:
    """One past the last position that each query sees: [requests, queries].

    Args:
        context_lens: [requests]: the queries are the newest tokens, the last of them sees the
            whole context, the one before one key less; or [requests, queries]: each its own.
        queries: query tokens a request.
    """
    if context_lens.dim() == 2:
        return context_lens
    back = torch.arange(queries, device=context_lens.device) - (queries - 1)
    return context_lens[:, None] + back


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
) -> torch.Tensor:
    """Lightning-indexer scores of the newest queries of several requests against paged keys.

    Args:
        q: [B, N, H, D]: N query tokens of each of B requests.
        cache: [P, page_size, D + 4] uint8 (fp8 keys and scales) or [P, page_size, D]; see
            `page_parts`.
        weights: [B * N, H] or [B, N, H] head weights, floating point, every constant factor in
            them.
        context_lens: [B] or [B, N] integers; see `context_ends`.
        block_table: [B, pages] integers, the cache's page for each page of a request. Those within
            a request's context are not checked: each must be from 0 to P - 1. Those behind it are
            not read.
        max_len: columns of the result; longer contexts are cut off there.

    Returns:
        [B * N, max_len] float32 (float64 for float64 queries), -inf past each query's context.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_paged_mqa_logits_arguments(q, cache, weights, context_lens, block_table, max_len)
    requests, queries, heads, width = q.shape
    keys, scales = page_parts(cache, width)
    ends = context_ends(context_lens, queries)
    weights = weights.reshape(requests, queries, heads)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    logits = torch.full((requests, queries, max_len), float("-inf"), dtype=compute, device=q.device)
    for request in range(requests if logits.numel() else 0):
        end = ends[request].clamp(max=min(max_len, block_table.shape[1] * cache.shape[1]))
        length = int(end.max().clamp_min(0))
        slots = torch.arange(length, device=q.device)
        slots = slots_of(slots[None], block_table[request, None], cache.shape[1])[0]
        scale = None if scales is None else gather_rows(scales[..., None], slots)
        logits[request, :, :length] = mqa_logits(
            q[request], gather_rows(keys, slots), weights[request], end=end, k_scale=scale
        )
    return logits.flatten(0, 1)


def top_k(
    logits: torch.Tensor,
    k: int,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact top-k of every row, the lower column first among equals.

    Args:
        logits: [T, S] float64, float32, bfloat16 or float16. -inf and NaN are never chosen; -0.0
            equals 0.0.
        k: how many to choose, at least 1.
        start: [T] integers; only columns >= start[t] are chosen (default: all).
        end: [T] integers; only columns < end[t] are chosen (default: all).

    Returns:
        [T, k] int32: the columns chosen, in ascending order, so that the rows they name are read
        in order; -1 after them where a row has fewer than k.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_top_k_arguments(logits, k, start, end)
    tokens, width = logits.shape
    column = torch.arange(width, device=logits.device)
    barred = logits.isnan()
    if start is not None:
        barred |= column < start[:, None]
    if end is not None:
        barred |= column >= end[:, None]
    logits = logits.masked_fill(barred, float("-inf"))
    values, columns = torch.sort(logits, dim=-1, descending=True, stable=True)
    values, columns = values[:, :k], columns[:, :k]
    columns = torch.where(values == float("-inf"), width, columns).sort(dim=-1).values
    chosen = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
    chosen[:, : columns.shape[1]] = torch.where(columns == width, -1, columns)
    return chosen


def request_slots(positions: torch.Tensor, table: Table, page_size: int) -> torch.Tensor:
    """Cache slots [T, K] int32 of positions in each token's request; see `sparse_mla`.

    Args:
        positions: [T, K] integers; -1, and positions behind a request's pages, become -1.
        table: page numbers [R, pages] and the request [T] of each token.
        page_size: rows a page.
    """
    pages, requests = table
    known = (positions >= 0) & (positions < pages.shape[1] * page_size)
    return slots_of(positions.where(known, -1), pages[requests.long()], page_size)


def slots_of(positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Cache slots of positions inside requests.

    Args:
        positions: [T, K] integer positions in each token's own request; -1 is kept as -1.
        block_table: [T, pages] page numbers of each token's request.
        page_size: rows a page.

    Returns:
        [T, K] int32 slots (page * page_size + row).
    """
    known = positions.clamp_min(0).long()
    page = torch.gather(block_table.long(), 1, known // page_size)
    slots = page * page_size + known % page_size
    return torch.where(positions >= 0, slots, -1).to(torch.int32)

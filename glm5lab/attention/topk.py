"""Exact top-k of long rows as a Triton kernel that reads every row once.

Same signature as `reference.top_k`. A program walks a row from left to right and keeps a list of
candidates: the columns whose value exceeds a floor, which at least k columns seen so far reach.
When the list is full, a bisection over the candidates' bits finds a higher floor, and what lies
below it leaves. This is exact for any input: a later column must be greater than the floor, not
equal, to enter, since among equals the lower column comes first. The order of the list is free
(ties are decided by columns, and the winners are sorted at the end), so every thread appends to
a lane of its own, without a word to the others.

Few long rows are cut into parts first, whose winners form a shorter row for the next launch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm5lab.attention.arguments import check_top_k_arguments
from glm5lab.attention.tiles import INTERPRETER, device_of

# Values become integers of the same order, `_order`; these are the ends of that scale.
NOTHING = tl.constexpr(-(2**31))  # below every value
LOWEST = tl.constexpr(-2139095040)  # the lowest finite value: -inf is never chosen
INFINITY = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
NO_COLUMN = tl.constexpr(2**31 - 1)
MAX_K = 8192

# Without their divisibility Triton gives every load the same layout, one value a thread, and has
# nothing to convert between loads, lanes and scattered stores.
RUNTIME = ["items", "parts", "part_width", "width", "k", "stride_in", "stride_list"]


@triton.jit
def _order(b_bits):
    """float32 bits as int32 of the same order; NaN becomes NOTHING, -0.0 equals 0.0."""
    b_key = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b_key = tl.where(b_key == -1, 0, b_key)
    return tl.where(b_key > INFINITY, NOTHING, b_key)


@triton.jit
def _load(p_row, base, low, high, N: tl.constexpr, LANES: tl.constexpr, FLOATS: tl.constexpr):
    """[N, LANES]: ordered keys of the columns from base on, NOTHING outside low..high."""
    o = base + tl.arange(0, N)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    other: tl.constexpr = NAN_BITS if FLOATS else NOTHING
    b = tl.load(p_row + o, mask=(o >= low) & (o < high), other=other)
    if FLOATS:
        b = _order(b)
    return b


@triton.jit
def _scatter(p_list, b_place, b_x, m, N: tl.constexpr, LANES: tl.constexpr):
    """Store b_x [N, LANES] at scattered places.

    In one dimension, since Triton may transpose a tile for a scattered store, and a flat tile it
    cannot: this order is the one in which the threads hold it.
    """
    p = p_list + tl.reshape(b_place, (N * LANES,))
    tl.store(p, tl.reshape(b_x, (N * LANES,)), mask=tl.reshape(m, (N * LANES,)))


@triton.jit
def _count(m):
    """How many of [N, LANES] are true."""
    return tl.sum(tl.sum(m.to(tl.int32), 0), 0)


@triton.jit
def _columns(p_col, base, m, N: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr):
    """[N, LANES] columns: read from p_col where m, or, with PLACES, counted from base."""
    o = tl.arange(0, N)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return base + o if PLACES else tl.load(p_col + o, mask=m, other=NO_COLUMN)


@triton.jit
def _raise_floor(b_key, least, reached, k, most):
    """The highest of the values tried that at least k keys reach, and how many do.

    Stops at the first that at most `most` keys reach; `reached` > most keys reach `least`.
    """
    low = least
    high = tl.max(tl.max(b_key, 0), 0)
    while (low < high) & (reached > most):
        # The distance may need all 32 bits.
        distance = (high - low).to(tl.uint32, bitcast=True)
        middle = low + (distance // 2 + distance % 2).to(tl.int32, bitcast=True)
        count = _count(b_key >= middle)
        low = tl.where(count >= k, middle, low)
        reached = tl.where(count >= k, count, reached)
        high = tl.where(count >= k, high, middle - 1)
    return low, reached


@triton.jit
def _last_column(m_even, b_col, spare):
    """The column up to which exactly `spare` of the columns in m_even lie."""
    b_col = tl.where(m_even, b_col, NO_COLUMN)
    low = tl.min(tl.min(b_col, 0), 0)
    high = tl.max(tl.max(tl.where(m_even, b_col, 0), 0), 0)
    while low < high:
        middle = low + (high - low) // 2
        enough = _count(b_col <= middle) >= spare
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _keep(
    b_key,
    p_from,
    base,
    floor,
    k,
    most,
    p_key,
    p_col,
    N: tl.constexpr,
    LANES: tl.constexpr,
    PLACES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write the k to `most` greatest of the candidates b_key [N, LANES] to p_key and p_col.

    All candidates are greater than the lowest value or reach floor. Returns how many were kept,
    and the new floor.
    """
    limit = tl.maximum(floor, LOWEST)
    reached = _count(b_key >= limit)
    last = NO_COLUMN
    if reached > most:
        limit, reached = _raise_floor(b_key, limit, reached, k, most)
        floor = limit
        if reached > most:  # ties at the limit, more than fit
            m_even = b_key == limit
            b_col = _columns(p_from, base, m_even, N, LANES, PLACES)
            last = _last_column(m_even, b_col, k - _count(b_key > limit))
    m_keep = b_key >= limit
    b_col = _columns(p_from, base, m_keep, N, LANES, PLACES)
    m_keep = (b_key > limit) | (m_keep & (b_col <= last))
    b_kept = m_keep.to(tl.int32)
    b_lane = tl.sum(b_kept, 0)
    b_place = (tl.cumsum(b_lane, 0) - b_lane)[None, :] + tl.cumsum(b_kept, 0) - 1
    tl.debug_barrier()  # p_from and p_col may be one: everything is read before it is written
    _scatter(p_col, b_place, b_col, m_keep, N, LANES)
    if KEYS:
        _scatter(p_key, b_place, b_key, m_keep, N, LANES)
    tl.debug_barrier()
    return tl.sum(b_lane, 0), floor


@triton.jit(do_not_specialize=RUNTIME)
def _top_k_kernel(
    in_ptr,
    col_ptr,
    start_ptr,
    end_ptr,
    out_key_ptr,
    out_ptr,
    list_ptr,
    items,
    parts,
    part_width,
    width,
    k,
    stride_in,
    stride_list,
    FLOATS: tl.constexpr,
    LAST: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    SORT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
):
    # This program's list: keys, then columns; entry s of lane l lies at s * LANES + l.
    p_key = list_ptr + stride_list.to(tl.int64) * tl.program_id(0)
    p_col = p_key + DEPTH * LANES
    o_lane = tl.arange(0, LANES)
    o_entry = tl.arange(0, DEPTH)
    o_list = o_entry[:, None] * LANES + o_lane[None, :]
    most = k + k // 8
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // parts
        low = (item % parts) * part_width
        high = tl.minimum(low + part_width, width)
        if HAS_START:
            low = tl.minimum(tl.maximum(low, tl.load(start_ptr + row)), high)
        if HAS_END:
            high = tl.minimum(high, tl.load(end_ptr + row))
        p_row = in_ptr + stride_in.to(tl.int64) * row
        p_row_col = col_ptr + stride_in.to(tl.int64) * row

        floor = tl.full((), NOTHING, tl.int32)
        b_key = _load(p_row, low, low, high, DEPTH, LANES, FLOATS)
        base = low + DEPTH * LANES
        count, floor = _keep(
            b_key, p_row_col + low, low, floor, k, most, p_key, p_col, DEPTH, LANES, FLOATS, True
        )
        # [LANES] entries in each lane
        b_fill = (count - o_lane + LANES - 1) // LANES
        b_next = _load(p_row, base, low, high, STEP, LANES, FLOATS)
        for i_col in range(base, high, STEP * LANES):
            b_new = b_next
            b_next = _load(p_row, i_col + STEP * LANES, low, high, STEP, LANES, FLOATS)
            if tl.max(b_fill, 0) + STEP > DEPTH:
                tl.debug_barrier()
                m_list = o_entry[:, None] < b_fill[None, :]
                b_old = tl.load(p_key + o_list, mask=m_list, other=NOTHING)
                count, floor = _keep(
                    b_old, p_col, 0, floor, k, most, p_key, p_col, DEPTH, LANES, False, True
                )
                b_fill = (count - o_lane + LANES - 1) // LANES
            m_hit = b_new > tl.maximum(floor, LOWEST - 1)
            b_hit = m_hit.to(tl.int32)
            b_at = (b_fill[None, :] + tl.cumsum(b_hit, 0) - 1) * LANES + o_lane[None, :]
            b_col = _columns(p_row_col + i_col, i_col, m_hit, STEP, LANES, FLOATS)
            _scatter(p_key, b_at, b_new, m_hit, STEP, LANES)
            _scatter(p_col, b_at, b_col, m_hit, STEP, LANES)
            b_fill += tl.sum(b_hit, 0)

        tl.debug_barrier()
        m_list = o_entry[:, None] < b_fill[None, :]
        b_key = tl.load(p_key + o_list, mask=m_list, other=NOTHING)
        p_out = out_ptr + k.to(tl.int64) * item
        p_out_key = out_key_ptr + k.to(tl.int64) * item
        o_sort = tl.arange(0, SORT)
        if LAST:
            count, floor = _keep(
                b_key, p_col, 0, floor, k, k, p_key, p_col, DEPTH, LANES, False, False
            )
            b_col = tl.sort(tl.load(p_col + o_sort, mask=o_sort < count, other=NO_COLUMN))
            b_col = tl.where(b_col == NO_COLUMN, -1, b_col)
            tl.store(p_out + o_sort, b_col, mask=o_sort < k)
        else:
            count, floor = _keep(
                b_key, p_col, 0, floor, k, k, p_out_key, p_out, DEPTH, LANES, False, True
            )
            tl.store(p_out_key + o_sort, NOTHING, mask=(o_sort >= count) & (o_sort < k))
        tl.debug_barrier()


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        warps: warps a program; each of their threads has a lane of the list.
        depth: entries of a lane.
        step: entries that a lane may gain between two looks at how full it is.
        programs: programs a multiprocessor.
    """

    warps: int
    depth: int
    step: int
    programs: int


def choose_cut(k: int) -> Cut:
    """A cut whose list holds about four times k."""
    capacity = triton.next_power_of_2(k)
    if capacity <= 512:
        return Cut(warps=4, depth=16, step=4, programs=4)
    return Cut(warps=min(32, capacity // 256), depth=32, step=4, programs=2)


def _parts(rows: int, width: int, programs: int, tile: int) -> int:
    """Into how many parts to cut each row: 1 where there are rows enough to fill the device."""
    if width <= 2 * tile:
        return 1
    return max(1, min(programs // rows, triton.cdiv(width, tile)))


def top_k(
    logits: torch.Tensor,
    k: int,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Exact top-k of every row, the lower column first among equals.

    Arguments, result and errors are those of `reference.top_k`, with these differences: logits are
    float32, k is at most 8192, and the width below 2**31. `cut`: how the work is cut.
    """
    check_top_k_arguments(logits, k, start, end)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: expected float32, got {logits.dtype}")
    if k > MAX_K:
        raise ValueError(f"k: expected at most {MAX_K}, got {k}")
    cut = cut or choose_cut(k)
    if logits.numel() and logits.stride(1) != 1:
        logits = logits.contiguous()
    rows = logits.shape[0]
    out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    start = None if start is None else start.to(torch.int32).contiguous()
    end = None if end is None else end.to(torch.int32).contiguous()
    device = device_of(logits.device.index) if logits.device.type == "cuda" else INTERPRETER
    programs = device.multiprocessors * cut.programs
    tile = 32 * cut.warps * cut.depth
    lists = torch.empty(programs, 2 * tile, dtype=torch.int32, device=logits.device)
    keys, columns = logits.view(torch.int32), None
    while (parts := _parts(rows, keys.shape[1], programs, tile)) > 1:
        keys, columns = _launch(keys, columns, start, end, None, lists, parts, k, cut)
        start = end = None
    _launch(keys, columns, start, end, out, lists, 1, k, cut)
    return out


def _launch(
    keys: torch.Tensor,
    columns: torch.Tensor | None,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    out: torch.Tensor | None,
    lists: torch.Tensor,
    parts: int,
    k: int,
    cut: Cut,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass over rows [T, W], cut into parts: the winners' keys and columns [T, parts * k].

    Args:
        keys: the logits' bits; with `columns`, ordered keys.
        columns: the column of each key, or None where a key's place is its column.
        start: [T] int32 or None.
        end: [T] int32 or None.
        out: where the sorted columns go, without keys; None allocates both, unsorted.
        lists: [programs, 2 * tile] int32.
        parts: parts of a row.
        k: winners of a part.
        cut: how the work is cut.
    """
    rows, width = keys.shape
    last = out is not None
    if out is None:
        out = torch.empty(rows, parts * k, dtype=torch.int32, device=keys.device)
    out_keys = out if last else torch.empty_like(out)
    _top_k_kernel[(min(rows * parts, lists.shape[0]),)](
        keys,
        keys if columns is None else columns,
        keys if start is None else start,
        keys if end is None else end,
        out_keys,
        out,
        lists,
        rows * parts,
        parts,
        triton.cdiv(width, parts),
        width,
        k,
        keys.stride(0),
        lists.stride(0),
        FLOATS=columns is None,
        LAST=last,
        HAS_START=start is not None,
        HAS_END=end is not None,
        SORT=max(16, triton.next_power_of_2(k)),
        DEPTH=cut.depth,
        LANES=32 * cut.warps,
        STEP=cut.step,
        num_warps=cut.warps,
    )
    return out_keys, out

"""Exact top-k of long rows as a Triton kernel that reads every row once.

Same signature as `reference.top_k`. A program walks a row and lists the columns whose value
reaches an entry level; the k greatest of the list are the result. The level comes from a sample
of the row, set so low that about one and a half times k columns enter. It decides about the time
only, never about the result: when too few columns have entered, the row is read again without a
level, and when the list is full, a bisection over its values finds a higher level that at least k
columns seen so far reach. From then on a column must exceed that level, not just reach it, since
among equals the lower column comes first.

The order of the list is free (ties are decided by columns, and the winners are sorted at the
end), so every thread appends to a lane of its own, without a word to the others. Few long rows
are cut into parts first, whose winners form a shorter row for the next launch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm5lab.attention.arguments import check_top_k_arguments
from glm5lab.attention.compile import Compilation
from glm5lab.attention.tiles import INTERPRETER, Device, device_of

# Values become integers of the same order, `_order`; these are the ends of that scale.
NOTHING = tl.constexpr(-(2**31))  # below every value
LOWEST = tl.constexpr(-2139095040)  # the lowest finite value: -inf is never chosen
INFINITY = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
NO_COLUMN = tl.constexpr(2**31 - 1)
SLICE = tl.constexpr(8)  # list entries of a lane that are moved at once
MAX_K = 8192
MAX_WIDTH = 2**30

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
def _value(key):
    """The float32 of an ordered key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(p_row, base, high, N: tl.constexpr, LANES: tl.constexpr):
    """[N, LANES]: the values of the columns from base on, NaN from high on."""
    o = base + tl.arange(0, N)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if base + N * LANES <= high:  # a mask would cost as much as the comparison of values
        b = tl.load(p_row + o)
    else:
        b = tl.load(p_row + o, mask=o < high, other=float("nan"))
    return b


@triton.jit
def _count(m):
    """How many of [N, LANES] are true."""
    return tl.sum(tl.sum(m.to(tl.int32), 0), 0)


@triton.jit
def _list_part(p_list, b_fill, first, N: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Entries first..first + N of every lane [N, LANES]: keys, columns, and which exist."""
    o = first + tl.arange(0, N)[:, None]
    m = o < b_fill[None, :]
    o = o * LANES + tl.arange(0, LANES)[None, :]
    b_key = _order(tl.load(p_list + o, mask=m, other=NAN_BITS))
    b_col = tl.load(p_list + DEPTH * LANES + o, mask=m, other=NO_COLUMN)
    return b_key, b_col, m


@triton.jit
def _scatter(p_list, b_place, b_x, m, N: tl.constexpr, LANES: tl.constexpr):
    """Store b_x [N, LANES] at scattered places.

    In one dimension, since Triton may transpose a tile for a scattered store, and a flat tile it
    cannot: this order is the one in which the threads hold it.
    """
    p = p_list + tl.reshape(b_place, (N * LANES,))
    tl.store(p, tl.reshape(b_x, (N * LANES,)), mask=tl.reshape(m, (N * LANES,)))


@triton.jit
def _raise(b_key, least, reached, k, most):
    """The highest of the levels tried that at least k keys reach, and how many do.

    Stops at the first that at most `most` keys reach; `reached` > most keys reach `least`.
    """
    high = tl.max(tl.max(b_key, 0), 0)
    low = tl.min(tl.min(tl.where(b_key >= least, b_key, high), 0), 0)
    turn = 0
    while (low < high) & (reached > most):
        # Values are often spread evenly, but only halving the bits ends after 32 steps.
        distance = (high - low).to(tl.uint32, bitcast=True)
        middle = low + (distance // 2 + distance % 2).to(tl.int32, bitcast=True)
        mean = 0.5 * _value(low) + 0.5 * _value(high)
        mean = tl.minimum(tl.maximum(_order(mean.to(tl.int32, bitcast=True)), low + 1), high)
        middle = tl.where(turn == 0, mean, middle)
        turn = 1 - turn
        count = _count(b_key >= middle)
        low = tl.where(count >= k, middle, low)
        reached = tl.where(count >= k, count, reached)
        high = tl.where(count >= k, high, middle - 1)
    return low, reached


@triton.jit
def _last_column(p_list, b_fill, level, k, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """The column up to which so many entries equal the level that, with the greater, they are k.

    Ties are rare: the list is read anew at every step, instead of held in registers always.
    """
    low = 0
    high = NO_COLUMN - 1
    while low < high:
        middle = low + (high - low) // 2
        b_lane = tl.zeros([LANES], tl.int32)
        for i in range(0, DEPTH, SLICE):
            b_key, b_col, _ = _list_part(p_list, b_fill, i, SLICE, LANES, DEPTH)
            m = (b_key > level) | ((b_key == level) & (b_col <= middle))
            b_lane += tl.sum(m.to(tl.int32), 0)
        enough = tl.sum(b_lane, 0) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _keep(
    p_list,
    b_fill,
    level,
    k,
    most,
    p_value,
    p_col,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Copy the k to `most` greatest entries of the list, all where they are no more than that.

    Every entry reaches `level`. Returns how many were copied, and the new level.
    """
    tl.debug_barrier()  # lanes are written by their own threads, and read by all
    b_key, _, _ = _list_part(p_list, b_fill, 0, DEPTH, LANES, DEPTH)
    reached = tl.sum(b_fill, 0)
    last = NO_COLUMN
    if reached > most:
        level, reached = _raise(b_key, level, reached, k, most)
        if reached > most:  # ties at the level, more than fit
            last = _last_column(p_list, b_fill, level, k, LANES, DEPTH)
    b_lane = tl.zeros([LANES], tl.int32)
    for i in range(0, DEPTH, SLICE):
        b_part, b_at, m_part = _list_part(p_list, b_fill, i, SLICE, LANES, DEPTH)
        m_part &= (b_part > level) | ((b_part == level) & (b_at <= last))
        b_lane += tl.sum(m_part.to(tl.int32), 0)
    b_run = tl.cumsum(b_lane, 0) - b_lane
    for i in range(0, DEPTH, SLICE):
        b_part, b_at, m_part = _list_part(p_list, b_fill, i, SLICE, LANES, DEPTH)
        m_part &= (b_part > level) | ((b_part == level) & (b_at <= last))
        b_kept = m_part.to(tl.int32)
        b_place = b_run[None, :] + tl.cumsum(b_kept, 0) - 1
        _scatter(p_col, b_place, b_at, m_part, SLICE, LANES)
        if VALUES:
            b_bits = b_part ^ ((b_part >> 31) & 0x7FFFFFFF)
            _scatter(p_value, b_place, b_bits, m_part, SLICE, LANES)
        b_run += tl.sum(b_kept, 0)
    tl.debug_barrier()
    return tl.sum(b_lane, 0), level


@triton.jit
def _sampled_level(p_row, low, high, k, LANES: tl.constexpr, SAMPLE: tl.constexpr):
    """A level that somewhat more than k of the columns low..high reach, if the sample is right."""
    stride = (high - low) // SAMPLE
    o = tl.arange(0, SAMPLE)[:, None] * stride + tl.arange(0, LANES)[None, :]
    b_key = _order(tl.load(p_row + low + o).to(tl.int32, bitcast=True))
    # Of the k greatest this many are in the sample, give or take their root; four of these more
    # leave a chance of about one in 30,000 that the row must be read twice.
    share = k.to(tl.float32) * (SAMPLE * LANES) / (high - low).to(tl.float32)
    rank = (share + 4.0 * tl.sqrt(share)).to(tl.int32) + 8
    level = tl.full((), LOWEST, tl.int32)
    reached = _count(b_key >= LOWEST)
    if reached > rank + rank // 8:
        level, reached = _raise(b_key, level, reached, rank, rank + rank // 8)
    return level


@triton.jit(do_not_specialize=RUNTIME)
def _top_k_kernel(
    in_ptr,
    col_ptr,
    start_ptr,
    end_ptr,
    out_value_ptr,
    out_ptr,
    list_ptr,
    items,
    parts,
    part_width,
    width,
    k,
    stride_in,
    stride_list,
    PLACES: tl.constexpr,
    LAST: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    SORT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    # This program's lists, one in use and one to copy to. Each holds values, then columns; entry
    # s of lane l lies at s * LANES + l.
    p_lists = list_ptr + stride_list.to(tl.int64) * tl.program_id(0)
    o_lane = tl.arange(0, LANES)
    o_block = tl.arange(0, STEP)[:, None] * LANES + o_lane[None, :]
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

        level = tl.full((), LOWEST, tl.int32)
        if high - low > DEPTH * LANES:
            level = _sampled_level(p_row, low, high, k, LANES, SAMPLE)
        side = 0
        b_fill = tl.zeros([LANES], tl.int32)
        again = True
        while again:
            # The least key that enters: the level, or once that was raised, the next above, as
            # later columns lose ties. Winners of parts (no PLACES) come in no order of columns.
            enter = level
            bound = 0  # no lane has more entries than this
            b_fill = tl.zeros([LANES], tl.int32)
            # Two blocks are under way while one is looked at; the first two are empty.
            b_next = tl.full([STEP, LANES], float("nan"), tl.float32)
            b_later = tl.full([STEP, LANES], float("nan"), tl.float32)
            for i_col in range(low - 2 * STEP * LANES, high, STEP * LANES):
                b_new = b_next
                b_next = b_later
                b_later = _load(p_row, i_col + 2 * STEP * LANES, high, STEP, LANES)
                bound += STEP
                if bound > DEPTH:
                    bound = tl.max(b_fill, 0) + STEP
                    if bound > DEPTH:
                        p_to = p_lists + (1 - side) * (2 * DEPTH * LANES)
                        count, new = _keep(
                            p_lists + side * (2 * DEPTH * LANES),
                            b_fill,
                            level,
                            k,
                            k + k // 8,
                            p_to,
                            p_to + DEPTH * LANES,
                            LANES,
                            DEPTH,
                            True,
                        )
                        enter = tl.where(new > level, new + PLACES, enter)
                        level = new
                        side = 1 - side
                        b_fill = (count - o_lane + LANES - 1) // LANES
                        bound = tl.max(b_fill, 0) + STEP
                p_list = p_lists + side * (2 * DEPTH * LANES)
                b_hit = (b_new >= _value(enter)).to(tl.int32)
                b_at = (b_fill[None, :] + tl.cumsum(b_hit, 0) - 1) * LANES + o_lane[None, :]
                b_col = i_col + o_block
                if not PLACES:
                    b_col = tl.load(p_row_col + b_col, mask=b_hit != 0, other=NO_COLUMN)
                b_bits = b_new.to(tl.int32, bitcast=True)
                _scatter(p_list, b_at, b_bits, b_hit != 0, STEP, LANES)
                _scatter(p_list + DEPTH * LANES, b_at, b_col, b_hit != 0, STEP, LANES)
                b_fill += tl.sum(b_hit, 0)
            again = (tl.sum(b_fill, 0) < k) & (level > LOWEST)
            level = tl.where(again, LOWEST, level)

        p_list = p_lists + side * (2 * DEPTH * LANES)
        p_out = out_ptr + k.to(tl.int64) * item
        o_sort = tl.arange(0, SORT)
        if LAST:
            p_to = p_lists + (1 - side) * (2 * DEPTH * LANES)
            count, level = _keep(p_list, b_fill, level, k, k, p_to, p_to, LANES, DEPTH, False)
            b_col = tl.sort(tl.load(p_to + o_sort, mask=o_sort < count, other=NO_COLUMN))
            tl.store(p_out + o_sort, tl.where(b_col == NO_COLUMN, -1, b_col), mask=o_sort < k)
        else:
            p_value = out_value_ptr + k.to(tl.int64) * item
            count, level = _keep(p_list, b_fill, level, k, k, p_value, p_out, LANES, DEPTH, True)
            tl.store(p_value + o_sort, NAN_BITS, mask=(o_sort >= count) & (o_sort < k))
        tl.debug_barrier()


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        warps: warps a program; each of their threads has a lane of the list.
        depth: entries of a lane, a power of two of at least 8.
        step: entries that a lane may gain from one block of columns.
        sample: columns that a lane gives to the sample, at most half of depth.
        programs: programs a multiprocessor.
        registers: most registers a thread, so that as many programs fit; None for no limit.
    """

    warps: int
    depth: int
    step: int
    sample: int
    programs: int
    registers: int | None = None


def choose_cut(k: int) -> Cut:
    """A cut whose list holds about four times k."""
    capacity = triton.next_power_of_2(k)
    if capacity <= 512:
        return Cut(warps=4, depth=16, step=4, sample=8, programs=6)
    warps = min(32, capacity // 256)
    # 65,536 registers a multiprocessor, for two programs of 8 warps.
    return Cut(
        warps, depth=32, step=8, sample=16, programs=2, registers=128 if warps == 8 else None
    )


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
    float32, k is at most 8192, and the width at most 2**30. `cut`: how the work is cut.
    """
    check_top_k_arguments(logits, k, start, end)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: expected float32, got {logits.dtype}")
    if k > MAX_K:
        raise ValueError(f"k: expected at most {MAX_K}, got {k}")
    if logits.shape[1] > MAX_WIDTH:
        raise ValueError(f"logits: expected at most {MAX_WIDTH} columns, got {logits.shape[1]}")
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
    lists = torch.empty(programs, 4 * tile, dtype=torch.int32, device=logits.device)
    values, columns = logits, None
    while (parts := _parts(rows, values.shape[1], programs, tile)) > 1:
        winners = torch.empty(rows, parts * k, dtype=torch.float32, device=logits.device)
        places = torch.empty(winners.shape, dtype=torch.int32, device=logits.device)
        _launch(values, columns, start, end, winners, places, lists, parts, k, cut)
        values, columns, start, end = winners, places, None, None
    _launch(values, columns, start, end, None, out, lists, 1, k, cut)
    return out


def _launch(
    values: torch.Tensor,
    columns: torch.Tensor | None,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    winners: torch.Tensor | None,
    out: torch.Tensor,
    lists: torch.Tensor,
    parts: int,
    k: int,
    cut: Cut,
) -> None:
    """One pass over rows [T, W], cut into parts.

    Args:
        values: float32 [T, W].
        columns: int32 [T, W], or None where a value's place is its column.
        start: [T] int32 or None.
        end: [T] int32 or None.
        winners: float32 [T, parts * k], or None for the last pass, which sorts the columns.
        out: int32 [T, parts * k], the winners' columns.
        lists: int32 [programs, 4 * tile].
        parts: parts of a row.
        k: winners of a part.
        cut: how the work is cut.
    """
    rows, width = values.shape
    _top_k_kernel[(min(rows * parts, lists.shape[0]),)](
        values,
        out if columns is None else columns,
        out if start is None else start,
        out if end is None else end,
        out if winners is None else winners.view(torch.int32),
        out,
        lists,
        rows * parts,
        parts,
        triton.cdiv(width, parts),
        width,
        k,
        values.stride(0),
        lists.stride(0),
        PLACES=columns is None,
        LAST=winners is None,
        HAS_START=start is not None,
        HAS_END=end is not None,
        SORT=max(16, triton.next_power_of_2(k)),
        DEPTH=cut.depth,
        LANES=32 * cut.warps,
        STEP=cut.step,
        SAMPLE=cut.sample,
        num_warps=cut.warps,
        **({} if cut.registers is None else {"maxnreg": cut.registers}),
    )


def compilations(device: Device) -> list[Compilation]:
    """What `top_k` launches for GLM-5's k of 2048: whole rows, parts of rows, winners of parts."""
    cut = choose_cut(2048)
    names = ("col_ptr", "start_ptr", "end_ptr", "out_value_ptr", "out_ptr", "list_ptr")
    types = {"in_ptr": "*fp32"} | dict.fromkeys(names, "*i32")
    sizes = {"SORT": 2048, "DEPTH": cut.depth, "LANES": 32 * cut.warps}
    sizes |= {"STEP": cut.step, "SAMPLE": cut.sample}
    options = {} if cut.registers is None else {"maxnreg": cut.registers}
    found = []
    for name, places, last in (
        ("rows", True, True),
        ("parts of rows", True, False),
        ("winners of parts", False, True),
    ):
        flags = {"PLACES": places, "LAST": last, "HAS_START": places, "HAS_END": places}
        found.append(
            Compilation(f"top_k {name}", "_top_k_kernel", types, flags | sizes, cut.warps, options)
        )
    return found

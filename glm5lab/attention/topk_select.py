"""The third step of `topk`: the k greatest of a row's list, in ascending order of columns.

A list that one program wrote is in order already. In one that many wrote each column chosen sets
its bit in a row of bits, and the number of bits before it is its place: sorting would take longer
than all the rest.
"""

import triton
import triton.language as tl

from glm5lab.attention.topk_level import (
    ANYWHERE,
    LOWEST,
    NAN_BITS,
    NO_COLUMN,
    RUNTIME,
    _last,
    _level,
    _ones,
    _order,
    _reach,
    _row,
    _usable,
)

BLOCK = tl.constexpr(512)  # columns whose bits are cleared and counted together
WORDS = tl.constexpr(16)  # of 32 bits, for a block of columns


@triton.jit
def _list_level(p_list, count, k, CAPACITY: tl.constexpr):
    """The level and last column that min(k, count) of a list reach, of at most CAPACITY / 2."""
    o = tl.arange(0, CAPACITY // 2)
    b_order = _order(tl.load(p_list + o.to(tl.int64), mask=o < count, other=NAN_BITS))
    level, reached = _level(b_order, k, k)
    last = NO_COLUMN
    if reached > k:
        b_col = tl.load(p_list + CAPACITY + o.to(tl.int64), mask=o < count, other=NO_COLUMN)
        last = _last(b_order, b_col, level, k)
    return level, last


@triton.jit
def _tile(p_bits, p_col, first, high, PLACES: tl.constexpr, TILE: tl.constexpr):
    """Bits and columns [TILE] from place `first` on, NaN from `high` on.

    With PLACES, a value's place is its column.
    """
    o = tl.arange(0, TILE)
    m = first + o < high
    b_bits = tl.load(p_bits + first + o.to(tl.int64), mask=m, other=NAN_BITS)
    if PLACES:
        b_col = first + o
    else:
        b_col = tl.load(p_col + first + o.to(tl.int64), mask=m, other=NO_COLUMN)
    return b_bits, b_col


@triton.jit
def _append(p_list, count, b_bits, b_col, m, CAPACITY: tl.constexpr):
    """Write what m chooses to the list from place `count` on; returns the list's length then."""
    b_hit = m.to(tl.int32)
    p = p_list + count + tl.cumsum(b_hit, 0) - 1
    tl.debug_barrier()  # the list may be where these were read
    tl.store(p, b_bits, mask=m)
    tl.store(p + CAPACITY, b_col, mask=m)
    return count + tl.sum(b_hit, 0)


@triton.jit
def _fold(
    p_bits,
    p_col,
    low,
    high,
    p_list,
    k,
    PLACES: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """List at most CAPACITY / 2 of low..high that include the k greatest; returns how many.

    They stay in the order that they have.

    Whenever there is no room, the list is cut down to its k greatest, whose level and last column
    the others must reach from then on. The source may be the list itself.
    """
    count = 0
    level = tl.full((), LOWEST, tl.int32)
    last = tl.full((), NO_COLUMN, tl.int32)
    for i in range(low, high, TILE):
        b_bits, b_col = _tile(p_bits, p_col, i, high, PLACES, TILE)
        m = _reach(b_bits, b_col, level, last)
        if count + tl.sum(m.to(tl.int32), 0) > CAPACITY // 2:
            tl.debug_barrier()  # others wrote the list
            level, last = _list_level(p_list, count, k, CAPACITY)
            kept = 0
            for j in range(0, count, TILE):
                b_old, b_at = _tile(p_list, p_list + CAPACITY, j, count, False, TILE)
                m_old = _reach(b_old, b_at, level, last)
                kept = _append(p_list, kept, b_old, b_at, m_old, CAPACITY)
            count = kept
        m = _reach(b_bits, b_col, level, last)
        count = _append(p_list, count, b_bits, b_col, m, CAPACITY)
    return count


@triton.jit
def _shortened(p_row, p_list, low, high, count, k, CAPACITY: tl.constexpr, TILE: tl.constexpr):
    """A list cut down to CAPACITY / 2, made of the row where `count` is negative.

    Returns its length, and the level and last column that min(k, count) of it reach.
    """
    if count < 0:
        count = _fold(p_row, p_row, low, high, p_list, k, True, CAPACITY, TILE)
    if count > CAPACITY // 2:
        count = _fold(p_list, p_list + CAPACITY, 0, count, p_list, k, False, CAPACITY, TILE)
    tl.debug_barrier()
    level, last = _list_level(p_list, count, k, CAPACITY)
    return count, level, last


@triton.jit
def _fill(p_out, chosen, k, TILE: tl.constexpr):
    """-1 after the columns chosen."""
    for i in range(chosen, k, TILE):
        o = i + tl.arange(0, TILE)
        tl.store(p_out + o, -1, mask=o < k)


@triton.jit
def _write_in_order(
    p_list, p_out, count, level, last, k, CAPACITY: tl.constexpr, TILE: tl.constexpr
):
    """Write the columns of a list in ascending order that reach a level."""
    b_bits, b_col = _tile(p_list, p_list + CAPACITY, 0, count, False, CAPACITY // 2)
    m = _reach(b_bits, b_col, level, last)
    b_hit = m.to(tl.int32)
    tl.store(p_out + tl.cumsum(b_hit, 0) - 1, b_col, mask=m)
    _fill(p_out, tl.sum(b_hit, 0), k, TILE)


@triton.jit
def _clear(p_bits, first, final, MANY: tl.constexpr):
    """No bits in words first..final."""
    for i in range(first, final, MANY):
        o = tl.arange(0, MANY)
        tl.store(p_bits + i + o.to(tl.int64), 0, mask=i + o < final)


@triton.jit
def _put_in_order(
    p_list,
    p_bits,
    p_out,
    first,
    final,
    count,
    level,
    last,
    stride_bits,
    k,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write the columns of a list in any order that reach a level, in ascending order.

    Their bits lie in words first..final, which are clear.
    """
    p_col = p_list + CAPACITY
    b_bits, b_col = _tile(p_list, p_col, 0, count, False, CAPACITY // 2)
    m = _reach(b_bits, b_col, level, last)
    tl.atomic_or(p_bits + b_col // 32, 1 << (b_col % 32), mask=m, sem="relaxed")
    tl.debug_barrier()
    before = 0
    for i in range(first, final, MANY):
        o = tl.arange(0, MANY)
        m_word = i + o < final
        p = p_bits + i + o.to(tl.int64)
        # Atomics pass the first cache by.
        b_ones = _ones(tl.load(p, mask=m_word, other=0, cache_modifier=".cg"))
        tl.store(p + stride_bits, before + tl.cumsum(b_ones, 0) - b_ones, mask=m_word)
        before += tl.sum(b_ones, 0)
    tl.debug_barrier()
    b_bits, b_col = _tile(p_list, p_col, 0, count, False, CAPACITY // 2)  # not held until now
    m = _reach(b_bits, b_col, level, last)
    b_word = tl.load(p_bits + b_col // 32, mask=m, other=0, cache_modifier=".cg")
    b_place = tl.load(p_bits + stride_bits + b_col // 32, mask=m, other=0)
    b_place += _ones(b_word & ((1 << (b_col % 32)) - 1))
    tl.store(p_out + b_place, b_col, mask=m)
    _fill(p_out, before, k, TILE)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=ANYWHERE)
def _select_kernel(
    in_ptr,
    start_ptr,
    end_ptr,
    level_ptr,
    count_ptr,
    list_ptr,
    bits_ptr,
    out_ptr,
    width,
    stride_bits,
    k,
    stride_in,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    COLLECTED: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
):
    row = tl.program_id(0)
    p_list = list_ptr + row.to(tl.int64) * (2 * CAPACITY)
    p_out = out_ptr + row.to(tl.int64) * k
    p_row, low, high = _row(in_ptr, start_ptr, end_ptr, row, width, stride_in, HAS_START, HAS_END)
    count = -1
    if COLLECTED:
        p_bits = bits_ptr + row.to(tl.int64) * (2 * stride_bits)
        first, final = low // BLOCK * WORDS, tl.cdiv(high, BLOCK) * WORDS
        _clear(p_bits, first, final, MANY)
        level, last = tl.load(level_ptr + 2 * row), tl.load(level_ptr + 2 * row + 1)
        count = _usable(tl.load(count_ptr + row), level, last, k, CAPACITY)
    made_here = count < 0
    count, level, last = _shortened(p_row, p_list, low, high, count, k, CAPACITY, TILE)
    if COLLECTED and not made_here:
        _put_in_order(
            p_list,
            p_bits,
            p_out,
            first,
            final,
            count,
            level,
            last,
            stride_bits,
            k,
            CAPACITY,
            TILE,
            MANY,
        )
    if made_here:
        _write_in_order(p_list, p_out, count, level, last, k, CAPACITY, TILE)

"""The third step of `topk`: the k greatest of a row's list, in ascending order of columns.

Also what the other steps share: values as integers of their order, and levels that k values reach.

Sorting would take longer than all the rest. Instead each column chosen sets its bit in a row of
bits, and the number of bits before it is its place.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(512)  # columns whose bits are cleared and counted together
WORDS = tl.constexpr(16)  # of 32 bits, for a block of columns
# Values are compared as integers of the same order, `_order`; these are the ends of that scale.
NOTHING = tl.constexpr(-(2**31))  # NaN, and no value at all
LOWEST = tl.constexpr(-2139095040)  # the lowest finite value: -inf is never chosen
INFINITY = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
NO_COLUMN = tl.constexpr(2**31 - 1)

# Without the divisibility of these Triton gives every load of a row the same layout, one value a
# thread, and has nothing to convert between loads and scattered stores.
RUNTIME = ["width", "parts", "k", "stride_in"]
ANYWHERE = ["start_ptr", "end_ptr"]  # loaded one by one: slices compile nothing new


@triton.jit
def _order(b_bits):
    """float32 bits as int32 of the same order; NaN becomes NOTHING, -0.0 equals 0.0."""
    b = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b = tl.where(b == -1, 0, b)
    return tl.where(b > INFINITY, NOTHING, b)


@triton.jit
def _value(order):
    """The float32 of an `_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _row(
    in_ptr,
    start_ptr,
    end_ptr,
    row,
    width,
    stride_in,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
):
    """Where a row's logits lie, and its columns low..high that may be chosen."""
    p_row = in_ptr + row.to(tl.int64) * stride_in
    low = 0
    high = width
    if HAS_START:
        low = tl.maximum(low, tl.load(start_ptr + row))
    if HAS_END:
        high = tl.minimum(high, tl.load(end_ptr + row))
    return p_row, low, high


@triton.jit
def _log(x):
    """2**23 times log2 of a positive float, less than a tenth off, and a constant."""
    return x.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def _level(b_order, k, most):
    """The highest of the levels tried that at least k of [N] reach, and how many do.

    Stops at the first level that at most `most` reach; LOWEST where fewer than k are to be had.
    """
    low = tl.full((), LOWEST, tl.int32)
    high = tl.max(b_order, 0)
    reached = tl.sum((b_order >= low).to(tl.int32), 0)
    beyond = 0  # reach high + 1
    if reached > most:
        low = tl.min(tl.where(b_order >= LOWEST, b_order, high), 0)
    halve = False
    while (low < high) & (reached > most):
        # In a tail, counts fall off exponentially; but only halving the bits ends after 32 steps.
        log = _log(reached.to(tl.float32))
        share = (log - _log(k.to(tl.float32))) / (log - _log(beyond + 0.5))
        guess = _value(low) + (_value(high) - _value(low)) * share
        middle = tl.minimum(tl.maximum(_order(guess.to(tl.int32, bitcast=True)), low + 1), high)
        middle = tl.where(halve, (low | high) - ((low ^ high) >> 1), middle)
        halve = halve == 0
        count = tl.sum((b_order >= middle).to(tl.int32), 0)
        gap = (count == reached) | (count == beyond)
        enough = count >= k
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle - 1)
        beyond = tl.where(enough, beyond, count)
        if gap:  # equal values, or few are left: on to those that there are
            b_left = (b_order >= low) & (b_order <= high)
            high = tl.max(tl.where(b_left, b_order, low), 0)
            low = tl.min(tl.where(b_left, b_order, high), 0)
    return low, reached


@triton.jit
def _last(b_order, b_col, level, k):
    """The column up to which so many equal the level that, with the greater, they are k."""
    low = 0
    high = tl.max(tl.where(b_order == level, b_col, 0), 0)
    k -= tl.sum((b_order > level).to(tl.int32), 0)
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum(((b_order == level) & (b_col <= middle)).to(tl.int32), 0) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _reach(b_bits, b_col, level, last):
    """Which are greater than the level, or equal to it and in a column up to the last."""
    b_order = _order(b_bits)
    return (b_order > level) | ((b_order == level) & (b_col <= last))


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
def _ones(b_bits):
    """How many bits are set."""
    b = b_bits.to(tl.uint32, bitcast=True)
    b = b - ((b >> 1) & 0x55555555)
    b = (b & 0x33333333) + ((b >> 2) & 0x33333333)
    b = (b + (b >> 4)) & 0x0F0F0F0F
    return ((b * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _select(
    p_row,
    p_list,
    p_bits,
    p_out,
    low,
    high,
    count,
    stride_bits,
    k,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write the k greatest of a row's list, or of the row where `count` is negative."""
    first = low // BLOCK * WORDS
    final = tl.cdiv(high, BLOCK) * WORDS
    for i in range(first, final, MANY):
        o = tl.arange(0, MANY)
        tl.store(p_bits + i + o.to(tl.int64), 0, mask=i + o < final)
    if count < 0:
        count = _fold(p_row, p_row, low, high, p_list, k, True, CAPACITY, TILE)
    p_col = p_list + CAPACITY
    if count > CAPACITY // 2:
        count = _fold(p_list, p_col, 0, count, p_list, k, False, CAPACITY, TILE)
    tl.debug_barrier()
    level, last = _list_level(p_list, count, k, CAPACITY)
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
    for i in range(before, k, TILE):
        o = i + tl.arange(0, TILE)
        tl.store(p_out + o, -1, mask=o < k)


@triton.jit
def _usable(count, level, last, k, CAPACITY: tl.constexpr):
    """The list's length, or -1 where it may lack some of the k greatest."""
    # The lowest level without a last column: all that may be chosen is in the list.
    enough = (count >= k) | ((level == LOWEST) & (last == NO_COLUMN))
    return tl.where(enough & (count <= CAPACITY), count, -1)


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
    p_bits = bits_ptr + row.to(tl.int64) * (2 * stride_bits)
    p_out = out_ptr + row.to(tl.int64) * k
    p_row, low, high = _row(in_ptr, start_ptr, end_ptr, row, width, stride_in, HAS_START, HAS_END)
    count = -1
    if COLLECTED:
        level, last = tl.load(level_ptr + 2 * row), tl.load(level_ptr + 2 * row + 1)
        count = _usable(tl.load(count_ptr + row), level, last, k, CAPACITY)
    _select(p_row, p_list, p_bits, p_out, low, high, count, stride_bits, k, CAPACITY, TILE, MANY)

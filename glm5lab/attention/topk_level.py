"""Levels for `topk`: values as integers of their order, and the level that k of them reach.

Also where a row lies, and what Triton must not compile anew for.
"""

import triton
import triton.language as tl

# Values are compared as integers of the same order, `_order`; these are the ends of that scale.
NOTHING = tl.constexpr(-(2**31))  # NaN, and no value at all
LOWEST = tl.constexpr(-2139095040)  # the lowest finite value: -inf is never chosen
INFINITY = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
NO_COLUMN = tl.constexpr(2**31 - 1)
PARTS = tl.constexpr(256)  # into which the levels that are left are cut: 8 bits of them

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
    """Where a row's logits lie, and its columns low..high that may be chosen.

    low is at most high, and both lie within 0..width, so that neither a sum of them nor a
    difference exceeds int32.
    """
    p_row = in_ptr + row.to(tl.int64) * stride_in
    low = 0
    high = width
    if HAS_START:
        low = tl.minimum(tl.maximum(low, tl.load(start_ptr + row)), width)
    if HAS_END:
        high = tl.minimum(high, tl.load(end_ptr + row))
    return p_row, low, tl.maximum(high, low)


@triton.jit
def _level(b_order, k, most):
    """The highest of the levels tried that at least k of b_order [N] reach, and how many do.

    k is at least 1, `most` at least k. Stops at the first level that at most `most` reach: LOWEST,
    where no more than `most` values are finite or inf.
    """
    m = b_order >= LOWEST
    reached = tl.sum(m.to(tl.int32), 0)
    high = tl.max(b_order, 0)
    low = tl.where(reached > most, tl.min(tl.where(m, b_order, INFINITY), 0), LOWEST)
    beyond = tl.full((), 0, tl.int32)  # reach high + 1
    while (low < high) & (reached > most):
        # How many values lie in each of PARTS equal parts of the levels that are left, so wide that
        # shifting their distance from the lowest tells the part. After four times one is left.
        span = (high - low).to(tl.uint32, bitcast=True)
        log = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # or one more: no harm
        shift = tl.maximum(log - 7, 0)
        b_part = ((b_order - low).to(tl.uint32, bitcast=True) >> shift).to(tl.int32)
        m = (b_order >= low) & (b_order <= high)
        b_reach = beyond + tl.cumsum(tl.histogram(b_part, PARTS, mask=m), 0, reverse=True)
        m_enough = b_reach >= k
        low += (tl.sum(m_enough.to(tl.int32), 0) - 1) << shift
        rest = (high - low).to(tl.uint32, bitcast=True)
        high = low + tl.minimum(rest, (1 << shift) - 1).to(tl.int32, bitcast=True)
        reached = tl.min(tl.where(m_enough, b_reach, NO_COLUMN), 0)
        beyond = tl.max(tl.where(m_enough, beyond, b_reach), 0)
    return low, reached


@triton.jit
def _last(b_order, b_col, level, k):
    """A column up to which so many of b_order [N] equal the level that k reach it.

    Not always one that holds the level, as the search stops once k do.
    """
    k -= tl.sum((b_order > level).to(tl.int32), 0)
    least, _reached = _level(tl.where(b_order == level, -b_col, NOTHING), k, k)
    return -least


@triton.jit
def _reach(b_bits, b_col, level, last):
    """Which are greater than the level, or equal to it and in a column up to the last."""
    b_order = _order(b_bits)
    return (b_order > level) | ((b_order == level) & (b_col <= last))


@triton.jit
def _ones(b_bits):
    """How many bits are set."""
    b = b_bits.to(tl.uint32, bitcast=True)
    b = b - ((b >> 1) & 0x55555555)
    b = (b & 0x33333333) + ((b >> 2) & 0x33333333)
    b = (b + (b >> 4)) & 0x0F0F0F0F
    return ((b * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _usable(count, level, last, k, CAPACITY: tl.constexpr):
    """The list's length, or -1 where it may lack some of the k greatest."""
    # The lowest level without a last column: all that may be chosen is in the list.
    enough = (count >= k) | ((level == LOWEST) & (last == NO_COLUMN))
    return tl.where(enough & (count <= CAPACITY), count, -1)

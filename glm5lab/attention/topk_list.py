"""Lists for `topk`: a level from a sample of a row, and the columns that reach it, in any order.

Many rows have a program each, which lists a row's columns before it chooses among them. Few rows
are cut into parts of a warp each: one kernel sets the levels, the next collects.
"""

import triton
import triton.language as tl

from glm5lab.attention.topk_select import (
    ANYWHERE,
    LOWEST,
    NAN_BITS,
    NO_COLUMN,
    RUNTIME,
    _last,
    _level,
    _ones,
    _order,
    _row,
    _value,
)

WARP = tl.constexpr(32)
EACH = tl.constexpr(32)  # columns that a lane looks at together: a bit each
STRETCH = tl.constexpr(1024)  # that a warp does
CHUNK = tl.constexpr(8)  # neighbouring columns in a sample: one sector of memory


@triton.jit(noinline=True)
def _sampled_level(
    p_row,
    low,
    high,
    k,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    SURPLUS: tl.constexpr,
):
    """A level and last column that about one and a half times k of low..high reach.

    All reach them where the list holds as many.
    """
    level = tl.full((), LOWEST, tl.int32)
    last = tl.full((), NO_COLUMN, tl.int32)
    if high - low > CAPACITY:
        # A chunk from a random place of each stretch: neighbours are often alike, and what repeats
        # must not fall in step with the sample.
        stretch = (high - low) // (SAMPLE // CHUNK)
        b_chunk = tl.arange(0, SAMPLE) // CHUNK
        b_random = (b_chunk.to(tl.uint32) * 2654435761) >> 20  # of 4096
        b_first = low + b_chunk * stretch + ((b_random * stretch) >> 12).to(tl.int32)
        b_col = b_first // CHUNK * CHUNK + tl.arange(0, SAMPLE) % CHUNK
        m = (b_col >= low) & (b_col < high)
        b_order = _order(tl.load(p_row + b_col, mask=m, other=NAN_BITS))
        # Of the k greatest this many are in the sample, give or take their root.
        share = k.to(tl.float32) * SAMPLE / (high - low).to(tl.float32)
        rank = tl.maximum((share + 4.0 * tl.sqrt(share)).to(tl.int32) + SURPLUS, 1)
        level, reached = _level(b_order, rank, rank + rank // 16)
        if reached > rank + rank // 16:
            last = _last(b_order, b_col, level, rank)
    return level, last


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=ANYWHERE)
def _level_kernel(
    in_ptr,
    start_ptr,
    end_ptr,
    level_ptr,
    count_ptr,
    width,
    k,
    stride_in,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    SURPLUS: tl.constexpr,
):
    row = tl.program_id(0)
    p_row, low, high = _row(in_ptr, start_ptr, end_ptr, row, width, stride_in, HAS_START, HAS_END)
    level, last = _sampled_level(p_row, low, high, k, CAPACITY, SAMPLE, SURPLUS)
    tl.store(level_ptr + 2 * row, level)
    tl.store(level_ptr + 2 * row + 1, last)
    tl.store(count_ptr + row, 0)


@triton.jit
def _loads(p_row, first, low, high, INNER: tl.constexpr, LANES: tl.constexpr):
    """EACH tensors [LANES] of a stretch's values from column `first` on, NaN outside of low..high.

    Where all lie INNER there are no masks, which would cost more than comparisons.
    """
    o = first + tl.arange(0, LANES)
    values = ()
    for j in tl.static_range(0, EACH * LANES, LANES):
        if INNER:
            b = tl.load(p_row + j + o)
        else:
            b = tl.load(p_row + j + o, mask=(j + o >= low) & (j + o < high), other=NAN_BITS)
        values = values + (b,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no star
    return values


@triton.jit
def _stretch(p_row, first, low, high, LANES: tl.constexpr):
    """The values of a stretch, as `_loads` gives them.

    The branch also holds all loads ahead of the first comparison: without it they come one by one.
    """
    if (first >= low) & (first + EACH * LANES <= high):
        values = _loads(p_row, first, low, high, True, LANES)
    else:
        values = _loads(p_row, first, low, high, False, LANES)
    return values


@triton.jit
def _hits(values, enter, LANES: tl.constexpr):
    """[LANES]: which of a stretch's values are at least `enter`, a bit each."""
    b_hits = tl.zeros([LANES], tl.int32)
    for j in tl.static_range(EACH):
        b_hits |= (values[j].to(tl.float32, bitcast=True) >= enter).to(tl.int32) << j
    return b_hits


@triton.jit
def _next(first, b_hits, LANES: tl.constexpr):
    """Which lanes have a hit left in the stretch from `first` on, its column, and the others."""
    b_bit = (b_hits & -b_hits).to(tl.uint32, bitcast=True)
    # The lowest bit's number is its exponent.
    b_number = (b_bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    b_col = first + b_number * LANES + tl.arange(0, LANES)
    return b_hits != 0, b_col, b_hits & (b_hits - 1)


@triton.jit
def _write(p_row, first, b_hits, b_before, place, hits, most, p_list, CAPACITY: tl.constexpr):
    """Write a warp's hits to the row's list from `place` on, values and columns."""
    p = p_list + (place + b_before)
    # As often as the lane with most hits has hits: some four times of 32 for 2048 of 131072.
    for _ in range(tl.where(place + hits <= CAPACITY, most, 0)):
        m, b_col, b_hits = _next(first, b_hits, WARP)
        tl.store(p, tl.load(p_row + b_col, mask=m), mask=m)  # just read: from a cache
        tl.store(p + CAPACITY, b_col, mask=m)
        p += 1


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=ANYWHERE)
def _collect_kernel(
    in_ptr,
    start_ptr,
    end_ptr,
    level_ptr,
    count_ptr,
    list_ptr,
    width,
    parts,
    stride_in,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0) // parts
    p_list = list_ptr + row.to(tl.int64) * (2 * CAPACITY)
    p_row, low, high = _row(in_ptr, start_ptr, end_ptr, row, width, stride_in, HAS_START, HAS_END)
    level = tl.load(level_ptr + 2 * row)
    last = tl.load(level_ptr + 2 * row + 1)
    # This program's columns, in whole stretches.
    first = low // STRETCH * STRETCH
    each = tl.cdiv(tl.cdiv(high - first, STRETCH), parts) * STRETCH
    begin = first + tl.program_id(0) % parts * each
    b_hits = tl.zeros([WARP], tl.int32)
    b_before = b_hits
    place = 0
    hits = 0
    most = 0
    for i in range(begin, tl.minimum(begin + each, high), STRETCH):
        values = _stretch(p_row, i, low, high, WARP)
        # While they come, the stretch before is written, whose place has come meanwhile.
        _write(p_row, i - STRETCH, b_hits, b_before, place, hits, most, p_list, CAPACITY)
        # Up to the last column that may equal the level; in whole stretches, one sooner or later.
        b_hits = _hits(values, _value(tl.where(i <= last, level, level + 1)), WARP)
        b_count = _ones(b_hits)
        b_before = tl.cumsum(b_count, 0) - b_count
        hits = tl.sum(b_count, 0)
        most = tl.max(b_count, 0)
        place = tl.atomic_add(count_ptr + row, hits, mask=hits > 0, sem="relaxed")
    final = begin + (tl.cdiv(tl.minimum(begin + each, high) - begin, STRETCH) - 1) * STRETCH
    _write(p_row, final, b_hits, b_before, place, hits, most, p_list, CAPACITY)


@triton.jit
def _sum_and_greatest(a, b, c, d):
    """Of pairs: the sum of the first, the greatest of the second."""
    return a + c, tl.maximum(b, d)


@triton.jit
def _list_part(p_row, low, high, level, count, p_list, CAPACITY: tl.constexpr, LANES: tl.constexpr):
    """Add the columns of low..high that reach a level to a list; returns how many there are then.

    Two stretches at a time: what is found in both is counted together.
    """
    SOME: tl.constexpr = EACH * LANES
    enter = _value(level)
    for first in range(low // SOME * SOME, high, 2 * SOME):
        second = first + SOME
        b_one = _hits(_stretch(p_row, first, low, high, LANES), enter, LANES)
        b_two = _hits(_stretch(p_row, second, low, high, LANES), enter, LANES)
        b_ones, b_twos = _ones(b_one).to(tl.uint32), _ones(b_two).to(tl.uint32)
        b_both = b_ones | (b_twos << 16)  # neither sum exceeds 2**15
        b_before = tl.cumsum(b_both, 0) - b_both
        both, most = tl.reduce((b_both, tl.maximum(b_ones, b_twos)), 0, _sum_and_greatest)
        ones = (both & 0xFFFF).to(tl.int32)
        p_one = p_list + (count + (b_before & 0xFFFF).to(tl.int32))
        p_two = p_list + (count + ones + (b_before >> 16).to(tl.int32))
        count += ones + (both >> 16).to(tl.int32)
        for _ in range(tl.where(count <= CAPACITY, most.to(tl.int32), 0)):
            m_one, b_col_one, b_one = _next(first, b_one, LANES)
            m_two, b_col_two, b_two = _next(second, b_two, LANES)
            b_bits_one = tl.load(p_row + b_col_one, mask=m_one)  # just read: from a cache
            b_bits_two = tl.load(p_row + b_col_two, mask=m_two)
            tl.store(p_one, b_bits_one, mask=m_one)
            tl.store(p_one + CAPACITY, b_col_one, mask=m_one)
            tl.store(p_two, b_bits_two, mask=m_two)
            tl.store(p_two + CAPACITY, b_col_two, mask=m_two)
            p_one += 1
            p_two += 1
    return count


# Functions of their own keep what one step holds in registers out of the others.
@triton.jit(noinline=True)
def _list_all(p_row, low, high, level, last, p_list, CAPACITY: tl.constexpr, LANES: tl.constexpr):
    """List the columns of low..high that reach a level; returns how many there are."""
    # Up to the last column that may equal the level, then beyond it, where there is anything.
    beyond = tl.minimum(last, high - 1) + 1
    count = tl.full((), 0, tl.int32)
    for part in range(tl.where(beyond < high, 2, 1)):
        begin = tl.where(part == 0, low, tl.maximum(beyond, low))
        end = tl.where(part == 0, beyond, high)
        count = _list_part(p_row, begin, end, level + part, count, p_list, CAPACITY, LANES)
    return count

"""The second step of `topk`: a list of a row's columns that reach a level, and their values.

Many rows have a program each, whose lists are in order. Few rows are cut into parts of a warp each,
whose stretches enter the list as they come.
"""

import triton
import triton.language as tl

from glm5lab.attention.topk_level import ANYWHERE, NAN_BITS, RUNTIME, _ones, _row, _usable, _value
from glm5lab.attention.topk_sample import _rank, _sampled_level

WARP = tl.constexpr(32)
EACH = tl.constexpr(32)  # columns that a lane looks at together: a bit each
STRETCH = tl.constexpr(1024)  # that a warp does


@triton.jit
def _loads(p_row, first, low, high, INNER: tl.constexpr, LANES: tl.constexpr):
    """EACH tensors [LANES] of values from column `first` on, NaN outside of low..high.

    Every warp has a stretch, and of it a lane every 32nd column.

    Where all lie INNER there are no masks, which would cost more than comparisons.
    """
    o = first + tl.arange(0, LANES) // WARP * STRETCH + tl.arange(0, LANES) % WARP
    values = ()
    for j in tl.static_range(0, STRETCH, WARP):
        if INNER:
            b = tl.load(p_row + j + o)
        else:
            b = tl.load(p_row + j + o, mask=(j + o >= low) & (j + o < high), other=NAN_BITS)
        values = values + (b,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no star
    return values


@triton.jit
def _stretch(p_row, first, low, high, LANES: tl.constexpr):
    """The values of a stretch for each warp, as `_loads` gives them.

    The branch also holds all loads ahead of the first comparison: without it they come one by one.
    """
    if (first >= low) & (first + EACH * LANES <= high):
        values = _loads(p_row, first, low, high, True, LANES)
    else:
        values = _loads(p_row, first, low, high, False, LANES)
    return values


@triton.jit
def _hits(values, enter, LANES: tl.constexpr):
    """[LANES]: which of a lane's values are at least `enter`, a bit each."""
    b_hits = tl.zeros([LANES], tl.int32)
    for j in tl.static_range(EACH):
        b_hits |= (values[j].to(tl.float32, bitcast=True) >= enter).to(tl.int32) << j
    return b_hits


@triton.jit
def _next(first, b_hits, LANES: tl.constexpr):
    """Which lanes have a hit left, its column, its number in the lane, and the other hits."""
    b_bit = (b_hits & -b_hits).to(tl.uint32, bitcast=True)
    # The lowest bit's number is its exponent.
    b_number = (b_bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    o = tl.arange(0, LANES)
    b_col = first + o // WARP * STRETCH + b_number * WARP + o % WARP
    return b_hits != 0, b_col, b_number, b_hits & (b_hits - 1)


@triton.jit
def _write(p_row, first, b_hits, b_before, place, hits, most, p_list, CAPACITY: tl.constexpr):
    """Write a warp's hits to the row's list from `place` on, values and columns."""
    p = p_list + (place + b_before)
    # As often as the lane with most hits has hits: some four times of 32 for 2048 of 131072.
    for _ in range(tl.where(place + hits <= CAPACITY, most, 0)):
        m, b_col, _number, b_hits = _next(first, b_hits, WARP)
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
def _exchanged(b, HALF: tl.constexpr, LOW: tl.constexpr, LANES: tl.constexpr):
    """[LANES] uint32: lanes HALF apart exchange the bits HALF apart, of which LOW are the lower."""
    b = tl.reshape(b, (LANES // (2 * HALF), 2, HALF))
    b_other = tl.xor_sum(b, 1, keep_dims=True) ^ b
    m_upper = (tl.arange(0, 2) == 1)[None, :, None]
    b_theirs = tl.where(m_upper, b_other >> HALF, b_other << HALF)
    b_taken = tl.where(m_upper, LOW, LOW << HALF).to(tl.uint32)
    return tl.reshape(b ^ ((b ^ b_theirs) & b_taken), (LANES,))


@triton.jit
def _words(b_hits, LANES: tl.constexpr):
    """[LANES]: the hits of 32 neighbouring columns in each lane, the next 32 in the next.

    In every warp, hits of 32 lanes and as many numbers are transposed.
    """
    b = b_hits.to(tl.uint32, bitcast=True)
    b = _exchanged(b, 16, 0x0000FFFF, LANES)
    b = _exchanged(b, 8, 0x00FF00FF, LANES)
    b = _exchanged(b, 4, 0x0F0F0F0F, LANES)
    b = _exchanged(b, 2, 0x33333333, LANES)
    b = _exchanged(b, 1, 0x55555555, LANES)
    return b.to(tl.int32, bitcast=True)


@triton.jit
def _of_lane(b, b_lane, LANES: tl.constexpr):
    """[LANES]: what lane b_lane of the same warp has."""
    b = tl.reshape(b, (LANES // WARP, WARP))
    return tl.reshape(tl.gather(b, tl.reshape(b_lane, (LANES // WARP, WARP)), 1), (LANES,))


@triton.jit
def _places(b_words, b_before, b_number, LANES: tl.constexpr):
    """[LANES]: the places of one hit of each lane: how many hits come before it by columns.

    b_words: `_words` of all hits. b_before: how many hits come before each word. b_number: the
    hit's number in its lane, which is the lane of its warp that has its word.
    """
    b_lower = (1 << (tl.arange(0, LANES) % WARP)) - 1
    b_number &= WARP - 1  # of lanes without a hit too
    b_word = _of_lane(b_words, b_number, LANES)
    return _of_lane(b_before, b_number, LANES) + _ones(b_word & b_lower)


@triton.jit
def _sum_and_greatest(a, b, c, d):
    """Of pairs: the sum of the first, the greatest of the second."""
    return a + c, tl.maximum(b, d)


@triton.jit
def _list_part(p_row, low, high, level, count, p_list, CAPACITY: tl.constexpr, LANES: tl.constexpr):
    """Add the columns of low..high that reach a level to a list; returns how many there are then.

    In ascending order. Two stretches for each warp at a time: what is found is counted together.
    """
    SOME: tl.constexpr = EACH * LANES
    enter = _value(level)
    for first in range(low // SOME * SOME, high, 2 * SOME):
        second = first + SOME
        b_one = _hits(_stretch(p_row, first, low, high, LANES), enter, LANES)
        b_two = _hits(_stretch(p_row, second, low, high, LANES), enter, LANES)
        b_word_one, b_word_two = _words(b_one, LANES), _words(b_two, LANES)
        # Counted in the halves of an integer: neither sum exceeds 2**15.
        b_both = _ones(b_word_one).to(tl.uint32) | (_ones(b_word_two).to(tl.uint32) << 16)
        b_before = tl.cumsum(b_both, 0) - b_both
        b_most = tl.maximum(_ones(b_one), _ones(b_two))
        both, most = tl.reduce((b_both, b_most), 0, _sum_and_greatest)
        ones = (both & 0xFFFF).to(tl.int32)
        b_before_one = count + (b_before & 0xFFFF).to(tl.int32)
        b_before_two = count + ones + (b_before >> 16).to(tl.int32)
        count += ones + (both >> 16).to(tl.int32)
        for _ in range(tl.where(count <= CAPACITY, most, 0)):
            m_one, b_col_one, b_number_one, b_one = _next(first, b_one, LANES)
            m_two, b_col_two, b_number_two, b_two = _next(second, b_two, LANES)
            b_bits_one = tl.load(p_row + b_col_one, mask=m_one)  # just read: from a cache
            b_bits_two = tl.load(p_row + b_col_two, mask=m_two)
            p_one = p_list + _places(b_word_one, b_before_one, b_number_one, LANES)
            p_two = p_list + _places(b_word_two, b_before_two, b_number_two, LANES)
            tl.store(p_one, b_bits_one, mask=m_one)
            tl.store(p_one + CAPACITY, b_col_one, mask=m_one)
            tl.store(p_two, b_bits_two, mask=m_two)
            tl.store(p_two + CAPACITY, b_col_two, mask=m_two)
    return count


# Functions of their own keep what one step holds in registers out of the others.
@triton.jit(noinline=True)
def _list_all(p_row, low, high, level, last, p_list, CAPACITY: tl.constexpr, LANES: tl.constexpr):
    """List the columns of low..high that reach a level, in order; returns how many there are."""
    # Up to the last column that may equal the level, then beyond it, where there is anything.
    beyond = tl.minimum(last, high - 1) + 1
    count = tl.full((), 0, tl.int32)
    for part in range(tl.where(beyond < high, 2, 1)):
        begin = tl.where(part == 0, low, tl.maximum(beyond, low))
        end = tl.where(part == 0, beyond, high)
        count = _list_part(p_row, begin, end, level + part, count, p_list, CAPACITY, LANES)
    return count


@triton.jit
def _list_row(
    p_row,
    low,
    high,
    k,
    p_list,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    SURPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """List some of low..high in order; returns how many, -1 where some of the k greatest may miss.

    Where a sample misled, as where neighbours are alike, it is ranked once more by what was found.
    """
    rank = _rank(low, high, k, SAMPLE, SURPLUS)
    count = tl.full((), -1, tl.int32)
    tries = 0
    while (count < 0) & (tries < 2):
        level, last = _sampled_level(p_row, low, high, rank, CAPACITY, SAMPLE, CHUNK)
        found = _list_all(p_row, low, high, level, last, p_list, CAPACITY, LANES)
        count = _usable(found, level, last, k, CAPACITY)
        # Towards one and a half times k.
        times = 1.5 * k.to(tl.float32) / tl.maximum(found, 1).to(tl.float32)
        rank = tl.minimum((rank.to(tl.float32) * times).to(tl.int32) + 1, SAMPLE)
        tries += 1
    return count

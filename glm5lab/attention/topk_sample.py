"""The first step of `topk`: a level from a sample of a row that a few more than k columns reach."""

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
    _order,
    _row,
)


@triton.jit
def _rank(low, high, k, SAMPLE: tl.constexpr, SURPLUS: tl.constexpr):
    """How many of a sample are to reach the level."""
    # Of the k greatest this many are in the sample, give or take their root.
    share = k.to(tl.float32) * SAMPLE / tl.maximum(high - low, 1).to(tl.float32)
    return tl.maximum((share + 4.0 * tl.sqrt(share)).to(tl.int32) + SURPLUS, 1)


@triton.jit(noinline=True)
def _sampled_level(
    p_row,
    low,
    high,
    rank,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A level and last column that `rank` of a sample of low..high reach, or few more.

    Where low..high has no more than CAPACITY / 2 columns, which the third step takes at once, it is
    the lowest level: all reach it.
    """
    level = tl.full((), LOWEST, tl.int32)
    last = tl.full((), NO_COLUMN, tl.int32)
    if high - low > CAPACITY // 2:
        # A chunk from a random place of each part: neighbours are often alike, and what repeats
        # must not fall in step with the sample.
        apart = (high - low) // (SAMPLE // CHUNK)
        b_chunk = tl.arange(0, SAMPLE) // CHUNK
        b_random = (b_chunk.to(tl.uint32) * 2654435761) >> 20  # of 4096
        b_begin = (b_chunk.to(tl.int64) * (high - low) // (SAMPLE // CHUNK)).to(tl.int32)
        b_first = low + b_begin + ((b_random * apart) >> 12).to(tl.int32)
        b_col = b_first // CHUNK * CHUNK + tl.arange(0, SAMPLE) % CHUNK
        m = (b_col >= low) & (b_col < high)
        b_order = _order(tl.load(p_row + b_col, mask=m, other=NAN_BITS))
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
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    p_row, low, high = _row(in_ptr, start_ptr, end_ptr, row, width, stride_in, HAS_START, HAS_END)
    rank = _rank(low, high, k, SAMPLE, SURPLUS)
    level, last = _sampled_level(p_row, low, high, rank, CAPACITY, SAMPLE, CHUNK)
    tl.store(level_ptr + 2 * row, level)
    tl.store(level_ptr + 2 * row + 1, last)
    tl.store(count_ptr + row, 0)

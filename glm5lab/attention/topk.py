"""Exact top-k of long rows as three Triton kernels that read every row once.

Same signature as `reference.top_k`.

1. `_level_kernel` draws a sample of each row and sets a level that about one and a half times k
   columns reach.
2. `_collect_kernel` reads the row and lists the columns that reach the level, in any order.
3. `_select_kernel` keeps the k greatest of the list and puts them in order.

The level decides about the time only, never about the result: where too few columns reach it, or
more than the list holds, the third kernel reads the row again and raises a level of its own
whenever the list is full. Rows no longer than the list go through the third kernel alone.

Among equal values the lower column comes first: a level has a last column, up to which values
that equal it reach it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm5lab.attention.arguments import (
    check_kernels_run_on,
    check_top_k_arguments,
    int32_bounds,
    on_device_of,
)
from glm5lab.attention.compile import Compilation
from glm5lab.attention.tiles import INTERPRETER, Device, device_of
from glm5lab.attention.topk_select import (
    ANYWHERE,
    BLOCK,
    LOWEST,
    NAN_BITS,
    NO_COLUMN,
    RUNTIME,
    WORDS,
    _bounds,
    _last,
    _level,
    _ones,
    _order,
    _select_kernel,
    _value,
)

WARP = tl.constexpr(32)
STRETCH = tl.constexpr(1024)  # columns that a warp looks at together
CHUNK = tl.constexpr(8)  # neighbouring columns in a sample: one sector of memory
MAX_K = 8192
MAX_WIDTH = 2**30
ROWS_AT_ONCE = 4096  # bounds the memory for lists


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
    p_row = in_ptr + row.to(tl.int64) * stride_in
    low, high = _bounds(start_ptr, end_ptr, row, width, HAS_START, HAS_END)
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
    tl.store(level_ptr + 2 * row, level)
    tl.store(level_ptr + 2 * row + 1, last)
    tl.store(count_ptr + row, 0)


@triton.jit
def _stretch(p_row, first, low, high, INNER: tl.constexpr):
    """The values of a stretch from column `first` on: 32 of every lane.

    NaN outside of low..high, unless all lie INNER, where masks would cost more than comparisons.
    """
    o = first + tl.arange(0, WARP)
    values = ()
    for j in tl.static_range(0, STRETCH, WARP):
        if INNER:
            b = tl.load(p_row + j + o)
        else:
            b = tl.load(p_row + j + o, mask=(j + o >= low) & (j + o < high), other=NAN_BITS)
        values = values + (b,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no star
    return values


@triton.jit
def _hits(values, enter):
    """[32]: which of a lane's values are at least `enter`, a bit each."""
    b_hits = tl.zeros([WARP], tl.int32)
    for j in tl.static_range(STRETCH // WARP):
        b_hits |= (values[j].to(tl.float32, bitcast=True) >= enter).to(tl.int32) << j
    return b_hits


@triton.jit
def _write(p_row, first, b_hits, b_before, place, hits, most, p_list, CAPACITY: tl.constexpr):
    """Write a stretch's hits to the row's list from `place` on, values and columns."""
    p = p_list + (place + b_before)
    # As often as the lane with most hits has hits: some four times of 32 for 2048 of 131072.
    for _ in range(tl.where(place + hits <= CAPACITY, most, 0)):
        m = b_hits != 0
        b_bit = (b_hits & -b_hits).to(tl.uint32, bitcast=True)
        # The lowest bit's number is its exponent.
        b_number = (b_bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        b_col = first + b_number * WARP + tl.arange(0, WARP)
        tl.store(p, tl.load(p_row + b_col, mask=m), mask=m)  # just read: from a cache
        tl.store(p + CAPACITY, b_col, mask=m)
        b_hits &= b_hits - 1
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
    p_row = in_ptr + row.to(tl.int64) * stride_in
    p_list = list_ptr + row.to(tl.int64) * (2 * CAPACITY)
    low, high = _bounds(start_ptr, end_ptr, row, width, HAS_START, HAS_END)
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
        if (i >= low) & (i + STRETCH <= high):
            values = _stretch(p_row, i, low, high, True)
        else:
            values = _stretch(p_row, i, low, high, False)
        # While they come, the stretch before is written, whose place has come meanwhile.
        _write(p_row, i - STRETCH, b_hits, b_before, place, hits, most, p_list, CAPACITY)
        # Up to the last column that may equal the level; in whole stretches, one sooner or later.
        b_hits = _hits(values, _value(tl.where(i <= last, level, level + 1)))
        b_count = _ones(b_hits)
        b_before = tl.cumsum(b_count, 0) - b_count
        hits = tl.sum(b_count, 0)
        most = tl.max(b_count, 0)
        place = tl.atomic_add(count_ptr + row, hits, mask=hits > 0, sem="relaxed")
    final = begin + (tl.cdiv(tl.minimum(begin + each, high) - begin, STRETCH) - 1) * STRETCH
    _write(p_row, final, b_hits, b_before, place, hits, most, p_list, CAPACITY)


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        capacity: entries of a row's list, a power of two, at least four times k; programs
            hold half of it in registers.
        sample: columns of a row that are sampled, a power of two.
        surplus: columns of the sample that reach the level beyond what is expected of the k
            greatest and four standard deviations.
    """

    capacity: int
    sample: int
    surplus: int = 8

    @property
    def level(self) -> dict[str, int]:
        """Constants and options of the first kernel."""
        return {
            "CAPACITY": self.capacity,
            "SAMPLE": self.sample,
            "SURPLUS": self.surplus,
            "num_warps": min(max(self.sample // 512, 1), 32),
        }

    def collect(self, device: Device) -> dict[str, int]:
        """Of the second: registers so that 32 programs of a warp fit, or the 24 that SM120 has."""
        registers = 80 if device.capability >= 120 else 64
        return {"CAPACITY": self.capacity, "num_warps": 1, "maxnreg": registers}

    def select(self, device: Device, collected: bool) -> dict[str, int]:
        """Of the third. On Hopper four programs a multiprocessor are worth spilled registers."""
        warps = min(max(self.capacity // 1024, 1), 32)
        # A multiprocessor has 65,536 registers, and a program must fit.
        registers = 64 if device.capability == 90 else min(128, 65_536 // (32 * warps))
        return {
            "CAPACITY": self.capacity,
            "COLLECTED": collected,
            "TILE": self.capacity // 8,
            "MANY": 4096,
            "num_warps": warps,
            "maxnreg": registers,
        }


def choose_cut(k: int, width: int) -> Cut:
    """A list of four times k, and a sample in which some 64 of the k greatest are expected."""
    capacity = max(4096, 4 * triton.next_power_of_2(k))
    wanted = triton.next_power_of_2(triton.cdiv(64 * width, k))
    return Cut(capacity, min(max(wanted, 4096), 16384))


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
    rows, width = logits.shape
    if width > MAX_WIDTH:
        raise ValueError(f"logits: expected at most {MAX_WIDTH} columns, got {width}")
    check_kernels_run_on("logits", logits)
    if logits.numel() and logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    start = None if start is None else int32_bounds(start)
    end = None if end is None else int32_bounds(end)
    for first in range(0, rows, ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        bounds = [None if bound is None else bound[some] for bound in (start, end)]
        with on_device_of(logits):
            _launch(logits[some], bounds, k, out[some], cut or choose_cut(k, width))
    return out


def _launch(
    logits: torch.Tensor, bounds: list[torch.Tensor | None], k: int, out: torch.Tensor, cut: Cut
) -> None:
    """The three kernels, or the last alone, over rows [T, W] into out [T, k]."""
    rows, width = logits.shape
    device = device_of(logits.device.index) if logits.device.type == "cuda" else INTERPRETER
    blocks = triton.cdiv(width, BLOCK.value)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    levels, counts = empty(rows, 2), empty(rows)
    lists, bits = empty(rows, 2, cut.capacity), empty(rows, 2, blocks * WORDS.value)
    start, end = (out if bound is None else bound for bound in bounds)
    given = {"HAS_START": bounds[0] is not None, "HAS_END": bounds[1] is not None}
    inputs = (logits.view(torch.int32), start, end, levels, counts)
    stride = logits.stride(0)
    collected = width > cut.capacity
    if collected:
        _level_kernel[(rows,)](*inputs, width, k, stride, **given, **cut.level)
        # 32 warps a multiprocessor, whose next stretch comes while one is written, if there are so
        # many.
        stretches = triton.cdiv(width, STRETCH.value)
        each = min(max(rows * stretches // (32 * device.multiprocessors), 1), 8)
        parts = triton.cdiv(stretches, each)
        _collect_kernel[(rows * parts,)](
            *inputs, lists, width, parts, stride, **given, **cut.collect(device)
        )
    _select_kernel[(rows,)](
        *inputs,
        lists,
        bits,
        out,
        width,
        bits.shape[2],
        k,
        stride,
        **given,
        **cut.select(device, collected),
    )


def compilations(device: Device) -> list[Compilation]:
    """What `top_k` launches for a k of 2048, and the last kernel alone and for other k."""
    names = ("in_ptr", "start_ptr", "end_ptr", "level_ptr", "count_ptr", "list_ptr", "bits_ptr")
    types = dict.fromkeys((*names, "out_ptr"), "*i32")
    cut = choose_cut(2048, 1 << 17)
    wide = choose_cut(2048, 1 << 20)
    found = []
    for name, kernel, constants in (
        ("level", "_level_kernel", cut.level),
        ("level, 1M columns", "_level_kernel", wide.level),
        ("collect", "_collect_kernel", cut.collect(device)),
        ("select", "_select_kernel", cut.select(device, True)),
        ("short rows", "_select_kernel", cut.select(device, False)),
        *(
            (f"select, k {k}", "_select_kernel", choose_cut(k, 1 << 20).select(device, True))
            for k in (512, 4096, MAX_K)
        ),
    ):
        given = {"HAS_START": True, "HAS_END": True}
        options = {n: v for n, v in constants.items() if n == "maxnreg"}
        flags = given | {n: v for n, v in constants.items() if n.isupper()}
        warps = constants["num_warps"]
        found.append(Compilation(f"top_k {name}", kernel, types, flags, warps, options))
    return found

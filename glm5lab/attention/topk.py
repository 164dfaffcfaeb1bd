"""Exact top-k of long rows as Triton kernels that read every row once.

Same signature as `reference.top_k`.

1. A sample of each row sets a level that about one and a half times k columns reach.
2. The row is read, and the columns that reach the level are listed.
3. The k greatest of the list are put in order.

Where rows are many (`choose_cut`), one program does all three for a row, and programs next to it
read while it chooses: `_row_kernel`. Otherwise each step is a kernel, and many programs read a row.

The level decides about the time only, never about the result. Where too few columns reach it, or
more than the list holds, a program for a whole row tries another; then the third step reads the row
again and raises a level of its own whenever the list is full. Rows no longer than half the list go
through the third step alone.

Among equal values the lower column comes first: a level has a last column, up to which values
that equal it reach it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm5lab.attention.arguments import (
    check_integer,
    check_kernels_run_on,
    check_top_k_arguments,
    int32_bounds,
    on_device_of,
    shown,
)
from glm5lab.attention.compile import Compilation
from glm5lab.attention.tiles import INTERPRETER, Device, device_of
from glm5lab.attention.topk_level import ANYWHERE, RUNTIME, _row
from glm5lab.attention.topk_list import STRETCH, _collect_kernel, _list_row
from glm5lab.attention.topk_sample import _level_kernel
from glm5lab.attention.topk_select import (
    BLOCK,
    WORDS,
    _select_kernel,
    _shortened,
    _write_in_order,
)

MAX_K = 8192
MAX_WIDTH = 2**30
ROWS_AT_ONCE = 4096  # bounds the memory for lists


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=ANYWHERE)
def _row_kernel(
    in_ptr,
    start_ptr,
    end_ptr,
    list_ptr,
    out_ptr,
    width,
    k,
    stride_in,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    SURPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    p_list = list_ptr + row.to(tl.int64) * (2 * CAPACITY)
    p_out = out_ptr + row.to(tl.int64) * k
    p_row, low, high = _row(in_ptr, start_ptr, end_ptr, row, width, stride_in, HAS_START, HAS_END)
    count = _list_row(p_row, low, high, k, p_list, CAPACITY, SAMPLE, SURPLUS, CHUNK, LANES)
    tl.debug_barrier()
    count, level, last = _shortened(p_row, p_list, low, high, count, k, CAPACITY, TILE)
    _write_in_order(p_list, p_out, count, level, last, k, CAPACITY, TILE)


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        capacity: entries of a row's list, a power of two, at least 8 and four times k.
        sample: columns of a row that are sampled, a power of two.
        surplus: columns of the sample that reach the level beyond what is expected of the k
            greatest and four standard deviations.
        chunk: neighbouring columns that are sampled together, a power of two.
        whole: whether one program does a whole row.

    Raises:
        ValueError: a size is no power of two, the capacity below 8, or the chunk greater than the
            sample.
    """

    capacity: int
    sample: int
    surplus: int = 8
    chunk: int = 2
    whole: bool = False

    def __post_init__(self) -> None:
        check_integer("surplus", self.surplus)
        for name in ("capacity", "sample", "chunk"):
            value = getattr(self, name)
            check_integer(name, value)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, got {value}")
        if self.chunk > self.sample:
            raise ValueError(f"chunk: expected at most sample, {self.sample}, got {self.chunk}")
        if self.capacity < 8:  # tiles are an eighth of it
            raise ValueError(f"capacity: expected at least 8, got {self.capacity}")

    @property
    def held(self) -> int:
        """Entries that programs hold in registers: rows no longer than this need no level."""
        return self.capacity // 2

    @property
    def sampling(self) -> dict[str, int]:
        """Constants of what sets a level."""
        sampled = {"SAMPLE": self.sample, "SURPLUS": self.surplus, "CHUNK": self.chunk}
        return {"CAPACITY": self.capacity} | sampled

    @property
    def choosing(self) -> dict[str, int]:
        """Constants of what chooses."""
        return {"CAPACITY": self.capacity, "TILE": self.capacity // 8}

    @property
    def level(self) -> dict[str, int]:
        """Constants and options of the kernel that sets levels."""
        return self.sampling | {"num_warps": min(max(self.sample // 512, 1), 32)}

    @property
    def collect(self) -> dict[str, int]:
        """Of the one that collects: with 96 registers what was read is still in the first cache."""
        return {"CAPACITY": self.capacity, "num_warps": 1, "maxnreg": 96}

    @property
    def warps(self) -> int:
        """Of a program that chooses."""
        return min(max(self.capacity // 1024, 1), 32)

    def select(self, device: Device, collected: bool) -> dict[str, int]:
        """Of the one that chooses. On Hopper four programs a multiprocessor are worth spills."""
        # A multiprocessor has 65,536 registers, and a program must fit.
        registers = 64 if device.capability == 90 else min(128, 65_536 // (32 * self.warps))
        choosing = self.choosing | {"COLLECTED": collected, "MANY": 4096}
        return choosing | {"num_warps": self.warps, "maxnreg": registers}

    @property
    def row(self) -> dict[str, int]:
        """Of the one that does whole rows: three programs a multiprocessor, or as many as fit."""
        warps = max(self.warps, 8)
        options = {"num_warps": warps, "maxnreg": min(80, 65_536 // (32 * warps))}
        return self.sampling | self.choosing | {"LANES": 32 * warps} | options


def choose_cut(k: int, width: int, rows: int, device: Device) -> Cut:
    """A list of four times k, and a sample in which some 64 of the k greatest are expected.

    But of 4096 to 16384 columns, for whole rows to 8192. Of 131,072 columns, programs for whole
    rows are faster from some half as many rows on as there are multiprocessors (H200,
    data/measurements/topk_designs.json). They sample 32 bytes at a time, since scattered reads cost
    as much as the row, and try again where that misled; the others sample 8 bytes.
    """
    capacity = max(4096, 4 * triton.next_power_of_2(k))
    wanted = max(triton.next_power_of_2(triton.cdiv(64 * width, k)), 4096)
    if 2 * rows > device.multiprocessors:
        return Cut(capacity, min(wanted, 8192), surplus=0, chunk=8, whole=True)
    return Cut(capacity, min(wanted, 16384))


def top_k(
    logits: torch.Tensor,
    k: int,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Exact top-k of every row, the lower column first among equals.

    As `reference.top_k`, where logits may have other dtypes, and k and the width are not limited.

    Args:
        logits: [T, W] float32, W at most 2**30. -inf and NaN are never chosen; -0.0 equals 0.0.
        k: how many to choose, 1 to 8192.
        start: [T] integers; only columns >= start[t] are chosen (default: all).
        end: [T] integers; only columns < end[t] are chosen (default: all).
        cut: how the work is cut, with a list of at least four times k.

    Returns:
        [T, k] int32: the columns chosen, in ascending order; -1 after them.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or size; the message names it.
    """
    check_top_k_arguments(logits, k, start, end)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: expected float32, got {logits.dtype}")
    if k > MAX_K:
        raise ValueError(f"k: expected at most {MAX_K}, got {k}")
    if not isinstance(cut, Cut | None):
        raise ValueError(f"cut: expected a Cut or None, got {shown(cut)}")
    if cut is not None and cut.capacity < 4 * k:
        raise ValueError(f"cut: expected a capacity of at least {4 * k}, got {cut.capacity}")
    k = int(k)  # Triton knows no numpy integers
    rows, width = logits.shape
    if width > MAX_WIDTH:
        raise ValueError(f"logits: expected at most {MAX_WIDTH} columns, got {width}")
    check_kernels_run_on("logits", logits)
    if logits.numel() and logits.stride(1) != 1:
        logits = logits.contiguous()
    device = device_of(logits.device.index) if logits.device.type == "cuda" else INTERPRETER
    cut = cut or choose_cut(k, width, rows, device)
    out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    start = None if start is None else int32_bounds(start)
    end = None if end is None else int32_bounds(end)
    for first in range(0, rows, ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        bounds = [None if bound is None else bound[some] for bound in (start, end)]
        with on_device_of(logits):
            _launch(logits[some], bounds, k, out[some], cut, device)
    return out


def _launch(
    logits: torch.Tensor,
    bounds: list[torch.Tensor | None],
    k: int,
    out: torch.Tensor,
    cut: Cut,
    device: Device,
) -> None:
    """The kernels over rows [T, W] into out [T, k]."""
    rows, width = logits.shape

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    stride, lists = logits.stride(0), empty(rows, 2, cut.capacity)
    start, end = (out if bound is None else bound for bound in bounds)
    given = {"HAS_START": bounds[0] is not None, "HAS_END": bounds[1] is not None}
    inputs: tuple[torch.Tensor, ...] = (logits.view(torch.int32), start, end)
    collected = width > cut.held
    if collected and cut.whole:
        _row_kernel[(rows,)](*inputs, lists, out, width, k, stride, **given, **cut.row)
        return
    inputs = (*inputs, empty(rows, 2), empty(rows))  # levels and counts
    words = triton.cdiv(width, BLOCK.value) * WORDS.value
    bits = out
    if collected:
        bits = empty(rows, 2, words)
        _level_kernel[(rows,)](*inputs, width, k, stride, **given, **cut.level)
        # At least 32 programs for each multiprocessor, if there are so many stretches; with more of
        # them a program's next stretch comes while one is written.
        stretches = triton.cdiv(width, STRETCH.value)
        each = min(max(rows * stretches // (32 * device.multiprocessors), 1), 8)
        parts = triton.cdiv(stretches, each)
        _collect_kernel[(rows * parts,)](
            *inputs, lists, width, parts, stride, **given, **cut.collect
        )
    choosing = given | cut.select(device, collected)
    _select_kernel[(rows,)](*inputs, lists, bits, out, width, words, k, stride, **choosing)


def compilations(device: Device) -> list[Compilation]:
    """What `top_k` launches for a k of 2048, and for other k what chooses and does whole rows."""
    names = ("in_ptr", "start_ptr", "end_ptr", "level_ptr", "count_ptr", "list_ptr", "bits_ptr")
    types = dict.fromkeys((*names, "out_ptr"), "*i32")

    def few(k: int, width: int = 1 << 20) -> Cut:
        return choose_cut(k, width, 1, device)

    def many(k: int, width: int = 1 << 20) -> Cut:
        return choose_cut(k, width, ROWS_AT_ONCE, device)

    cut = few(2048, 1 << 17)
    found = []
    for name, kernel, constants in (
        ("level", "_level_kernel", cut.level),
        ("level, 1M columns", "_level_kernel", few(2048).level),
        ("collect", "_collect_kernel", cut.collect),
        ("select", "_select_kernel", cut.select(device, True)),
        ("short rows", "_select_kernel", cut.select(device, False)),
        ("rows", "_row_kernel", many(2048, 1 << 17).row),
        ("rows, 1M columns", "_row_kernel", many(2048).row),
        *(
            (f"{what}, k {k}", kernel, constants)
            for k in (512, 4096, MAX_K)
            for what, kernel, constants in (
                ("select", "_select_kernel", few(k).select(device, True)),
                ("rows", "_row_kernel", many(k).row),
            )
        ),
    ):
        given = {"HAS_START": True, "HAS_END": True}
        options = {n: v for n, v in constants.items() if n == "maxnreg"}
        flags = given | {n: v for n, v in constants.items() if n.isupper()}
        warps = constants["num_warps"]
        found.append(Compilation(f"top_k {name}", kernel, types, flags, warps, options))
    return found

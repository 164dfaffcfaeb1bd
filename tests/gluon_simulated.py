"""Gluon kernels on the CPU: partitions as threads, barriers that block, copies that come late.

Triton's interpreter knows no Gluon. Here the kernels' own Python runs with torch tensors in place
of tiles and pointers: layouts mean nothing, everything else does. Shared memory starts as NaN, a
copy lands when the barrier that tells of it is arrived at, and a wait that nobody ends raises. What
is not seen: races within a partition, and what the compiler makes of it.
"""

import threading
from collections.abc import Callable
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as real_gl
from triton.experimental.gluon._runtime import GluonJITFunction

SECONDS = 20  # a wait that lasts longer is a deadlock
_here = threading.local()


class Tile(torch.Tensor):
    """A tensor with what Gluon's tensors have in addition."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Tile":  # type: ignore[override]
        """Convert, or reinterpret the bits."""
        return tile(self.view(dtype) if bitcast else super().to(dtype))

    def trans(self) -> "Tile":
        """Transpose."""
        return tile(self.T)


def tile(value: Any) -> Tile:
    return torch.as_tensor(value).as_subclass(Tile)


class Whole(int):
    """A scalar of the kernel."""

    def to(self, dtype: torch.dtype) -> "Whole":
        return self


class Pointer:
    """A flat tensor and offsets into it."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Pointer":
        """At a tensor's first element, its whole storage behind it."""
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(flat, tensor.storage_offset())

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + offset)

    def __getitem__(self, key: Any) -> "Pointer":
        return Pointer(self.flat, self.offset[key])

    def load(self, mask: Any = None, other: Any = 0) -> Tile:
        """The elements where `mask` holds; others are not touched."""
        if mask is None:
            return tile(self.flat[self.offset])
        values = torch.full(self.offset.shape, other, dtype=self.flat.dtype)
        mask = mask.expand(self.offset.shape)
        values[mask] = self.flat[self.offset[mask]]
        return tile(values)

    def store(self, value: torch.Tensor, mask: torch.Tensor) -> None:
        """Write where `mask` holds."""
        mask = mask.expand(self.offset.shape)
        self.flat[self.offset[mask]] = value[mask].to(self.flat.dtype)


class Barrier:
    """An mbarrier: a phase ends when as many have arrived as were announced."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.phase = 0

    def arrive(self, number: int) -> None:
        with self.changed:
            self.pending -= number
            assert self.pending >= 0, "more arrivals than the barrier was initialized for"
            if not self.pending:
                self.pending, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase != parity, SECONDS)
            assert done, f"deadlock: nobody ends phase {parity}"


class Shared:
    """A shared-memory descriptor."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Any:
        return self.data[i] if isinstance(self.data, list) else Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape
        assert value.dtype == self.data.dtype
        self.data.copy_(value)

    def load(self, layout: Any) -> Tile:
        return tile(self.data.clone())


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        barriers = [Barrier() for _ in range(shape[0])]
        return barriers[0] if len(shape) == 1 else Shared(barriers)
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def copy(target: Shared, source: Pointer, mask: torch.Tensor | None = None) -> None:
    _here.copies.append((target, source.load(mask)))


def land(_outstanding: int = 0) -> None:
    """Let the copies that this partition has started arrive."""
    for target, value in _here.copies:
        target.store(value)
    _here.copies.clear()


def copies_arrive(barrier: Barrier, increment_count: bool) -> None:
    assert not increment_count
    land()
    barrier.arrive(_here.warps * 32)


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def multiply(a: Any, b: Shared, acc: Tile, use_acc: bool = True, is_async: bool = False) -> Tile:
    left = a.data if isinstance(a, Shared) else a
    assert left.dtype == b.dtype
    result = tile(left.float() @ b.data.float())
    return tile(acc + result) if use_acc else result


def either(pick: Callable[..., torch.Tensor], a: Any, b: Any) -> Any:
    both = [torch.as_tensor(x) for x in (a, b)]
    if both[0].dim() == both[1].dim() == 0 and not both[0].is_floating_point():
        return Whole(int(pick(*both)))
    return tile(pick(both[0], both[1].to(both[0].dtype)))


def where(condition: torch.Tensor, a: Any, b: Any) -> Tile:
    return tile(torch.where(condition, a, b))


def specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    errors: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
        _here.copies, _here.warps = [], number
        try:
            function(*arguments)
            assert not _here.copies, "copies that nobody waits for"
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(*partition, number))
        for partition, number in zip(partitions, [0, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def nothing(*_args: Any, **_options: Any) -> None:
    return None


gl = SimpleNamespace(
    constexpr=real_gl.constexpr,
    **{n: getattr(torch, n) for n in ("int32", "int64", "float16", "bfloat16", "float32")},
    **dict.fromkeys(
        ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout"), nothing
    ),
    NVMMASharedLayout=nothing,
    SwizzledSharedLayout=nothing,
    program_id=lambda axis: Whole(_here.program[axis]),
    arange=lambda start, end, layout: tile(torch.arange(start, end)),
    full=lambda shape, value, dtype, layout=None: tile(torch.full(shape, value, dtype=dtype)),
    zeros=lambda shape, dtype, layout=None: tile(torch.zeros(shape, dtype=dtype)),
    load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
    store=lambda pointer, value, mask: pointer.store(value, mask),
    where=where,
    maximum=lambda a, b: either(torch.maximum, a, b),
    minimum=lambda a, b: either(torch.minimum, a, b),
    max=lambda x, axis: tile(x.amax(axis)),
    sum=lambda x, axis: tile(x.sum(axis)),
    exp2=torch.exp2,
    log2=torch.log2,
    convert_layout=lambda x, layout: x,
    static_range=range,
    allocate_shared_memory=allocate,
    warp_specialize=specialize,
)
REPLACED = {
    "gl": gl,
    "async_copy": SimpleNamespace(
        async_copy_global_to_shared=copy,
        mbarrier_arrive=copies_arrive,
        commit_group=nothing,
        wait_group=land,
    ),
    "mbarrier": SimpleNamespace(
        MBarrierLayout=nothing,
        init=init,
        arrive=lambda barrier: barrier.arrive(1),
        wait=lambda barrier, phase: barrier.wait(phase),
    ),
    "warpgroup_mma": multiply,
    "warpgroup_mma_wait": lambda n, deps: deps[0] if len(deps) == 1 else tuple(deps),
    "fence_async_shared": nothing,
    "gdc_wait": nothing,
    "_barrier": nothing,
    "gdc_launch_dependents": nothing,
}


def plain(function: Any, replaced: dict[str, Any]) -> Callable[..., Any]:
    """The Python of a Gluon function, with everything of Gluon in it replaced."""
    python = function.fn
    scope = dict(python.__globals__)
    for name, value in scope.items():
        if isinstance(value, GluonJITFunction):
            # Bound when it is called, since functions may come in any order.
            scope[name] = lambda *a, f=value, **k: plain(f, replaced)(*a, **k)
        elif isinstance(value, real_gl.constexpr):
            scope[name] = value.value
    scope.update(replaced)
    return FunctionType(python.__code__, scope, python.__name__, python.__defaults__)


class Simulated:
    """Stands in for a Gluon kernel: kernel[grid](...) runs its programs one after the other."""

    def __init__(self, kernel: Any, functions: dict[str, Any] | None = None) -> None:
        self.program = plain(kernel, {**REPLACED, **(functions or {})})
        self.constants = {p.name for p in kernel.params if p.is_constexpr}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            constants = {n: v for n, v in options.items() if n in self.constants}
            values = [Pointer.of(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            for program in product(*map(range, grid)):
                _here.program, _here.copies, _here.warps = program, [], 0
                self.program(*values, **constants)

        return launch

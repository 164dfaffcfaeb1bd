"""Timing and checking: CUDA-graph replays, and relative errors against float64."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        case: what is computed, with its sizes.
        name: the implementation.
        us: microseconds a call, NaN where it did not run.
        error: relative error of the checked part against float64 (top-k: wrong places).
        floor_us: bytes that must move over the rate of a copy kernel; NaN where none is stated.
        note: why it did not run.
        bound: the error up to which it counts as right.
    """

    case: str
    name: str
    us: float
    error: float
    floor_us: float = math.nan
    note: str = ""
    bound: float = 3e-3

    @property
    def right(self) -> bool:
        """Whether it ran, with an error within the bound."""
        return not self.note and self.error <= self.bound


def graph_us(calls: Sequence[Call], repeats: int = 15) -> float:
    """Median microseconds a call of replaying all calls in one CUDA graph.

    Calls with inputs of their own read memory and not a cache.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3 / len(calls)


def copy_rate() -> float:
    """Bytes a microsecond that a copy kernel reads and writes together."""
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # One input, one output, element by element: torch compiles no memcpy for it.
    us = graph_us([lambda: torch.add(source, 1, out=target)] * 2)
    return 2 * source.nbytes / us


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected||."""
    return float((got.double() - expected).norm() / expected.norm())


def prepared(prepare: Callable[[], Callable[[int], Any]]) -> Callable[[int], Any]:
    """What `prepare` returns, made at the first call, which `measure` does not time."""
    made = cache(prepare)
    return lambda i: made()(i)


def measure(
    case: str,
    implementations: Mapping[str, Callable[[int], Any]],
    inputs: int,
    error: Callable[[Any], float],
    floor_us: float = math.nan,
    prefix: str = "",
    bound: float = Row.bound,
) -> Iterator[Row]:
    """Check and time every implementation of one case.

    Args:
        case: its name.
        implementations: each computes input number i.
        inputs: how many inputs there are; all of them go into one graph.
        error: of the result for input 0.
        floor_us: see Row.
        prefix: of the names to measure.
        bound: see Row.
    """
    for name, compute in implementations.items():
        if not name.startswith(prefix):
            continue
        try:
            wrong = error(compute(0))
            us = graph_us([lambda i=i, f=compute: f(i) for i in range(inputs)])  # type: ignore[misc]
            yield Row(case, name, us, wrong, floor_us, bound=bound)
        except Exception as problem:
            first = (str(problem).strip().splitlines() or [repr(problem)])[0]
            yield Row(case, name, math.nan, math.nan, floor_us, first[:160])

"""Layer numbers in few characters, for tables and notes."""

from collections.abc import Iterable


def layer_ranges(layers: Iterable[int]) -> str:
    """Layers in few characters.

    [0, 1, 2, 6, 10, 14] -> "0-2,6-14/4" (every fourth from 6 on); where it is shorter, a span and
    what it leaves out: "3-77 but 6-74/4".
    """
    numbers = sorted(set(layers))
    text = _runs(numbers)
    if len(numbers) > 1:
        left_out = numbers[-1] - numbers[0] + 1 - len(numbers)
        # A damaged file may name blocks a billion apart: only what is short is written out.
        if 0 < left_out < len(numbers):
            others = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
            text = min(text, f"{numbers[0]}-{numbers[-1]} but {_runs(others)}", key=len)
    return text


def _runs(numbers: list[int]) -> str:
    """Dense runs as "0-2", runs of four or more with a step as "6-14/4", the rest one by one."""
    parts: list[str] = []
    start = 0
    while start < len(numbers):
        first = numbers[start]
        step = numbers[start + 1] - first if start + 1 < len(numbers) else 1
        end = start + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if step > 1 and end - start < 4:
            end = start + 1
        last = f"-{numbers[end - 1]}" if end - start > 1 else ""
        parts.append(f"{first}{last}" + (f"/{step}" if step > 1 and last else ""))
        start = end
    return ",".join(parts)

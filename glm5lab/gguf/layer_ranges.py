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
        others = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
        span = f"{numbers[0]}-{numbers[-1]} but {_runs(others)}"
        text = min(text, span, key=len) if others else text
    return text


def _runs(numbers: list[int]) -> str:
    """Dense runs as "0-2", runs of four or more with a step as "6-14/4", the rest one by one."""
    parts: list[str] = []
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        run = 1
        while run < len(numbers) and numbers[run] - numbers[run - 1] == step:
            run += 1
        if step > 1 and run < 4:
            run = 1
        last = f"-{numbers[run - 1]}" if run > 1 else ""
        parts.append(f"{numbers[0]}{last}" + (f"/{step}" if step > 1 and last else ""))
        numbers = numbers[run:]
    return ",".join(parts)

"""Memory that shows what should not happen: results not written, values read from between."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors that nobody has written are NaN, or the greatest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def spaced(x: torch.Tensor, *dims: int, between: float = float("nan")) -> torch.Tensor:
    """The same values, two elements of a dimension two places apart.

    Args:
        x: the values.
        dims: dimensions to space.
        between: what lies before and between the values.

    Returns:
        A view of a tensor twice as large in each of the dimensions.
    """
    shape, at = list(x.shape), [slice(None)] * x.dim()
    for dim in dims:
        shape[dim] *= 2
        at[dim] = slice(1, None, 2)
    view = torch.full(shape, between, dtype=x.dtype, device=x.device)[tuple(at)]
    assert view.shape == x.shape
    return view.copy_(x)

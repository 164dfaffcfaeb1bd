"""Parameters that hold a tensor's blocks, or its numbers, as this rank keeps them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from glm5lab.gguf.parts import block_of, margins
from glm5lab.gguf.tensors import Tensor
from glm5lab.loading.destinations import Slot
from glm5lab.loading.packing import packable


@dataclass(frozen=True)
class Held:
    """How a parameter holds its numbers.

    Attributes:
        type_id: GGML type number of blocks; None for plain numbers.
        before, behind: columns of its first and last blocks that are another rank's share.
    """

    type_id: int | None
    before: int = 0
    behind: int = 0

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [..., columns] as wide as the blocks: zeros meet what is another rank's."""
        if not self.before and not self.behind:
            return x
        return functional.pad(x, (self.before, self.behind))


def add_parameter(
    layer: nn.Module,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    first: int = 0,
) -> Held:
    """Register one parameter for a tensor's blocks or numbers.

    Args:
        layer: gets it.
        name: of the parameter.
        tensor: decides between blocks and numbers.
        shape: [..., rows, columns] in numbers; blocks that the columns begin or end in are whole.
        dtype: of numbers.
        first: the first column in the file's rows.
    """
    held = Held(None)
    if packable(tensor):
        elements, nbytes = block_of(tensor)
        held = Held(tensor.type_id, *margins(first, shape[-1], elements))
        columns = held.before + shape[-1] + held.behind
        shape, dtype = (*shape[:-1], columns // elements * nbytes), torch.uint8
    data = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    layer.register_parameter(name, data)
    return held


def set_slots(layer: Any, slots: dict[str, Slot]) -> None:
    """Let the loader know where the layer's parts lie."""
    layer.gguf_slots = slots

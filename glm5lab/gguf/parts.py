"""A part of a tensor, cut on block borders, and the bytes of the file that it takes.

A rank keeps some matrices of a stack, some rows or some columns. Columns of quantized rows come in
blocks, so a part whose columns begin or end inside a block takes those blocks whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from glm5lab.gguf.tensors import Tensor, type_sizes


@dataclass(frozen=True)
class Part:
    """A box of a tensor, which counts as a stack of matrices (of one, where it is a matrix).

    Attributes:
        tensor: where the whole lies.
        stack: which matrices (experts, heads).
        rows: which rows of each.
        columns: which columns of each row, in elements.
    """

    tensor: Tensor
    stack: range
    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows, columns."""
        return len(self.stack), len(self.rows), len(self.columns)

    @property
    def elements(self) -> int:
        """How many numbers the part holds."""
        return prod(self.shape)

    @property
    def blocks(self) -> range:
        """The blocks of each row that hold the columns."""
        size = block_of(self.tensor)[0]
        return range(self.columns.start // size, -(-self.columns.stop // size))

    @property
    def byte_shape(self) -> tuple[int, int, int]:
        """Matrices, rows, and bytes of a row's blocks."""
        return len(self.stack), len(self.rows), len(self.blocks) * block_of(self.tensor)[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the file that it takes."""
        return prod(self.byte_shape)

    @property
    def border_bytes(self) -> int:
        """Of these, those for columns that the part does not hold: the ends of its blocks."""
        elements, nbytes = block_of(self.tensor)
        return self.nbytes - self.elements * nbytes // elements

    @property
    def whole_rows(self) -> bool:
        """Whether its rows are those of the tensor, from end to end."""
        return len(self.columns) == stack_shape(self.tensor.shape)[2]

    def runs(self) -> list[tuple[int, int]]:
        """(first byte in the file, bytes) of whole rows that lie together, in order.

        Parts of rows are not listed one by one: see `row_starts`.
        """
        _, rows, _ = stack_shape(self.tensor.shape)
        row_bytes = row_bytes_of(self.tensor)
        if len(self.rows) == rows:
            first = self.tensor.offset + self.stack.start * rows * row_bytes
            return [(first, len(self.stack) * rows * row_bytes)]
        return [
            (
                self.tensor.offset + (number * rows + self.rows.start) * row_bytes,
                len(self.rows) * row_bytes,
            )
            for number in self.stack
        ]

    def row_starts(self) -> Iterator[range]:
        """For each matrix, the place in the file of every row's first block."""
        _, rows, _ = stack_shape(self.tensor.shape)
        row_bytes = row_bytes_of(self.tensor)
        inside = self.blocks.start * block_of(self.tensor)[1]
        for number in self.stack:
            first = self.tensor.offset + (number * rows + self.rows.start) * row_bytes + inside
            yield range(first, first + len(self.rows) * row_bytes, row_bytes)

    def pieces(self, limit: int, whole_matrices: bool = False) -> Iterator["Part"]:
        """The part in pieces of at most `limit` bytes, but at least one row (or matrix) each.

        Args:
            limit: bytes of the file.
            whole_matrices: never cut a matrix in two.
        """
        matrix = max(1, self.nbytes // max(1, len(self.stack)))
        if matrix <= limit or whole_matrices:
            step = max(1, limit // matrix)
            for first in range(0, len(self.stack), step):
                yield replace(self, stack=self.stack[first : first + step])
            return
        step = max(1, limit * len(self.rows) // matrix)
        for number in self.stack:
            for first in range(0, len(self.rows), step):
                rows = self.rows[first : first + step]
                yield replace(self, stack=range(number, number + 1), rows=rows)


def whole(tensor: Tensor) -> Part:
    """All of a tensor."""
    stack, rows, columns = stack_shape(tensor.shape)
    return Part(tensor, range(stack), range(rows), range(columns))


def margins(first: int, columns: int, block: int) -> tuple[int, int]:
    """Columns of the same blocks before and behind `columns` of them that begin at `first`."""
    return first % block, -(first + columns) % block


@cache
def widest_share(columns: int, ranks: int, block: int) -> int:
    """Columns of the blocks that a rank's share of a row lies in, on the rank with most of them."""
    share = max(1, -(-columns // ranks))
    return block * max(
        -(-min(first + share, columns) // block) - first // block
        for first in range(0, max(1, columns), share)
    )


def stack_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """A shape as matrices, rows and columns; a vector is one row."""
    shape = tuple(shape) or (1,)
    return prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, shape[-1]


def block_of(tensor: Tensor) -> tuple[int, int]:
    """Elements and bytes of one block of the tensor's type.

    Raises:
        KeyError: a type that the gguf package does not know.
    """
    _, elements, nbytes = type_sizes()[tensor.type_id]
    return elements, nbytes


def row_bytes_of(tensor: Tensor) -> int:
    """Bytes of one row."""
    elements, nbytes = block_of(tensor)
    return stack_shape(tensor.shape)[2] // elements * nbytes

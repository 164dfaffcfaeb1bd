"""From the files into the parameters: read ahead in threads, a few pieces in memory at a time."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5lab.errors import InputError
from glm5lab.gguf.block_scales import broken_block, can_check
from glm5lab.gguf.not_gguf import DOWNLOAD_AGAIN
from glm5lab.gguf.part_reader import Bytes, PartReader
from glm5lab.gguf.parts import Part, block_of
from glm5lab.loading import transforms
from glm5lab.loading.destinations import Copy

if TYPE_CHECKING:
    import torch

# Bytes of the file in one piece; and numbers, where they are dequantized on the way (32 MiB).
PIECE_BYTES = 16 << 20
PIECE_NUMBERS = 8 << 20
MOST_THREADS = 4


class Streamer:
    """Copies parts of tensors into parameters.

    Args:
        reader: reads the files.
        parameters: by name; on any device.
        threads: how many read at once.
    """

    def __init__(
        self, reader: PartReader, parameters: "dict[str, torch.Tensor]", threads: int | None = None
    ) -> None:
        self.reader, self.parameters = reader, parameters
        self.threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
        devices = {p.device.type for p in parameters.values()}
        self._buffers = _Buffers(2 * self.threads) if devices == {"cuda"} else None

    def run(self, copies: Iterable[Copy]) -> Generator[Copy, None, None]:
        """Carry out copies; yields each piece once it is in its place, in order.

        Raises:
            InputError: a file is gone or truncated, or a block's scale is no number.
        """
        pieces = iter(piece for copy in copies for piece in _pieces(copy))
        waiting: deque[tuple[Copy, Future[Any]]] = deque()
        with ThreadPoolExecutor(self.threads, initializer=self._on_device) as pool:
            try:
                for piece in pieces:
                    waiting.append((piece, pool.submit(self._read, piece)))
                    if len(waiting) >= 2 * self.threads:
                        yield self._put(*waiting.popleft())
                while waiting:
                    yield self._put(*waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()
        if self._buffers is not None:
            self._buffers.wait()

    def _on_device(self) -> None:
        """A thread that waits for copies looks to its rank's GPU; its own would be the first."""
        if self._buffers is not None:
            import torch

            torch.cuda.set_device(next(iter(self.parameters.values())).device)

    def _read(self, copy: Copy) -> Any:
        """A piece's bytes, or its values as float32; runs in a thread."""
        if copy.packed:
            buffer = self._buffers.take(copy.nbytes) if self._buffers is not None else None
            return self._blocks(copy.part, None if buffer is None else buffer.bytes), buffer
        values = [self.reader.values(part, self._blocks(part)) for part in copy.parts]
        for part, numbers in zip(copy.parts, values, strict=True):
            if not can_check(part.tensor.type) and not np.isfinite(numbers).all():
                raise _damaged(part, "")
        if copy.values is not None:
            return transforms.join_kv_b(*values)[None], None
        return values[0], None

    def _blocks(self, part: Part, out: Bytes | None = None) -> Bytes:
        blocks = self.reader.read(part, out)
        number = broken_block(blocks, part.tensor)
        if number is not None:
            raise _damaged(part, place(part, number))
        return blocks

    def _put(self, copy: Copy, future: "Future[Any]") -> Copy:
        """Copy what was read into its parameter."""
        import torch

        values, buffer = future.result()
        matrices, rows, columns = copy.box
        target = stacked(self.parameters[copy.parameter])
        box = target[matrices.start : matrices.stop, rows.start : rows.stop, :columns]
        source = torch.from_numpy(values).view(box.shape)
        if buffer is None or self._buffers is None:
            box.copy_(source)
        else:
            box.copy_(source, non_blocking=True)
            self._buffers.give(buffer)
        return copy


def stacked(parameter: "torch.Tensor") -> "torch.Tensor":
    """A parameter's data as [matrices, rows, columns]."""
    data = parameter.data
    return data.view(*[1] * max(0, 3 - data.dim()), *data.shape)


def _pieces(copy: Copy) -> Iterator[Copy]:
    limit = PIECE_BYTES
    if not copy.packed:
        elements, nbytes = block_of(copy.part.tensor)
        limit = min(limit, PIECE_NUMBERS // elements * nbytes)
    return copy.pieces(limit)


def place(part: Part, number: int) -> str:
    """Where a part's block number `number` lies in the whole tensor."""
    row, block = divmod(number, max(1, len(part.blocks)))
    matrix, row = divmod(row, len(part.rows))
    where = f"row {part.rows[row]}, block {part.blocks[block]}"
    return f"matrix {part.stack[matrix]}, {where}" if len(part.tensor.shape) > 2 else where


def _damaged(part: Part, where: str) -> InputError:
    tensor = part.tensor
    what = f" at {where}" if where else ""
    cause = f"tensor {tensor.name!r} ({tensor.type}) is damaged: infinite or no number{what}"
    return InputError(tensor.path, cause, DOWNLOAD_AGAIN)


class _Buffer:
    """Pinned memory that a GPU copies from by itself."""

    def __init__(self) -> None:
        import torch

        self.tensor = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.tensor.numpy()
        self.event = torch.cuda.Event()


class _Buffers:
    """Pinned buffers, handed out again once the GPU has copied what was in them."""

    def __init__(self, count: int) -> None:
        from queue import SimpleQueue

        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        self._all = [_Buffer() for _ in range(count)]
        for buffer in self._all:
            self._free.put(buffer)

    def take(self, nbytes: int) -> _Buffer | None:
        """A free one; None for a piece (a single row) that is larger."""
        if nbytes > PIECE_BYTES:
            return None
        buffer = self._free.get()
        buffer.event.synchronize()
        return buffer

    def give(self, buffer: _Buffer) -> None:
        """Free once the copies that the current stream has been given are done."""
        buffer.event.record()
        self._free.put(buffer)

    def wait(self) -> None:
        """Until every copy is done."""
        for buffer in self._all:
            buffer.event.synchronize()

"""Block sizes, warps, stages and splits for the kernels, from the shapes and the device.

Nothing is tuned while serving: each row of the tables was measured, and the first that suits the
device is taken. The runs lie in data/measurements: sparse_mla_tiles.json for all forms,
sparse_mla_8_heads.json for eight heads over 16-bit rows, sparse_mla_sm120.json for multiprocessors
of 100 KiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from glm5lab.env import SHARED_MEMORY


@dataclass(frozen=True)
class Device:
    """What decides about tiles.

    Attributes:
        capability: major * 10 + minor, 90 for Hopper; 0 for Triton's interpreter.
        multiprocessors: how many there are.
        shared_memory: bytes that one block may use.
        multiprocessor_memory: bytes that all blocks of a multiprocessor share; None where they are
            what one block may use and its reserve, as on each GPU from SM80.
    """

    capability: int
    multiprocessors: int
    shared_memory: int
    multiprocessor_memory: int | None = None

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may start before its predecessor has ended (Hopper and later)."""
        return self.capability >= 90

    @property
    def converts_fp8(self) -> bool:
        """Whether there is an instruction from e4m3 to fp16 (Ada and later)."""
        return self.capability >= 89

    def programs(self, shared_memory: int) -> int:
        """How many programs a multiprocessor has the shared memory for, at least 1."""
        total = self.multiprocessor_memory or self.shared_memory + RESERVED
        return max(total // (shared_memory + RESERVED), 1)


# Bytes of shared memory that the driver takes of each block.
RESERVED = 1024
# The interpreter runs program after program: more splits only take longer.
INTERPRETER = Device(0, 1, 1 << 20)


def shared_memory_of(capability: int) -> int:
    """Bytes of shared memory a block on an architecture; a newer one counts as the last known."""
    known = [c for c in SHARED_MEMORY if c <= divmod(capability, 10)]
    return SHARED_MEMORY[max(known)] if known else 49_152


def device_of(index: int) -> Device:
    """The tiles' view of CUDA device `index`.

    Where Triton is told to generate code as for another architecture (TRITON_OVERRIDE_ARCH=sm120),
    the tiles are that architecture's too: so Hopper can run what SM120 would.
    """
    import triton

    # The knob may change within a process.
    return _device(index, triton.knobs.runtime.override_arch or "")


@cache
def _device(index: int, override: str) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    count = properties.multi_processor_count
    if override:
        capability = int("".join(filter(str.isdigit, override)))
        return Device(capability, count, shared_memory_of(capability))
    capability = properties.major * 10 + properties.minor
    limit = getattr(properties, "shared_memory_per_block_optin", None)
    total = getattr(properties, "shared_memory_per_multiprocessor", None)
    return Device(capability, count, limit or shared_memory_of(capability), total)


@dataclass(frozen=True)
class Tile:
    """One configuration of a sparse-MLA kernel.

    Attributes:
        heads: query heads a program, padded (a power of two).
        rows: cached rows a step.
        warps, stages: as Triton names them.
        shared_memory: bytes that it needs (compiled for sm_90; others need no more).
        max_registers: cap a thread, None for none.
        hopper: the form of `sparse_mla_hopper`: warps that gather come in addition, and its one
            program fills a multiprocessor.
        only: the one capability for which it compiles to that; None for all.
        together: how many programs of it a multiprocessor must hold for it to be chosen: one alone
            leaves the memory idle while it computes.
    """

    heads: int
    rows: int
    warps: int
    stages: int
    shared_memory: int
    max_registers: int | None = None
    hopper: bool = False
    only: int | None = None
    together: int = 1

    def suits(self, device: Device) -> bool:
        """Whether a device has the memory for it, and is one that it is for."""
        return (
            self.shared_memory <= device.shared_memory
            and device.programs(self.shared_memory) >= self.together
            and self.only in (None, device.capability)
        )

    @property
    def name(self) -> str:
        """For reports: heads x rows, warps, stages; registers, where they are limited."""
        form = " hopper" if self.hopper else f" r{limit}" if (limit := self.max_registers) else ""
        return f"{self.heads}x{self.rows} w{self.warps} s{self.stages}{form}"

    @property
    def options(self) -> dict[str, int]:
        """Further launch options of Triton."""
        return {} if self.max_registers is None else {"maxnreg": self.max_registers}


# Sparse MLA over 16-bit rows: heads a program -> (tokens from which a row holds, tile). Of the rows
# that hold, the first that suits the device is taken.
_ROWS_16_BIT = {
    8: (
        (128, Tile(8, 64, 4, 2, 83_968, together=2)),
        # 64 tokens in six parts: 47.8 us; in four, with the next tile, 48.5. 65 to 127 were not
        # timed: they fill three quarters of the places or more, where that tile fills half at 67.
        (64, Tile(8, 32, 4, 2, 46_592, 168, together=3, only=90)),
        (32, Tile(8, 64, 8, 2, 83_968, together=2)),
        (8, Tile(8, 32, 4, 3, 83_456, together=2)),
        (4, Tile(8, 64, 8, 2, 83_968, together=2)),
        # Where one of those would fill a multiprocessor. As sm_120 code, within SM120's 100 KiB,
        # 162 us at 256 tokens; 8x64, alone there, 199 (sparse_mla_sm120.json). On SM80, untimed.
        (4, Tile(8, 32, 4, 2, 46_592)),
        # Up to three tokens, everywhere.
        (0, Tile(8, 32, 8, 2, 46_592)),
    ),
    16: ((0, Tile(16, 32, 4, 2, 56_320)),),
    64: (
        # For data-center Blackwell the same kernel compiles to 385,616 bytes.
        (8, Tile(64, 64, 8, 2, 221_184, only=90)),
        (8, Tile(32, 32, 4, 2, 75_776)),
        (0, Tile(16, 32, 4, 2, 56_320)),
    ),
}
_ROWS_32_BIT = Tile(16, 16, 4, 1, 73_728)
# fp8_ds_mla rows, by heads. Held to 168 registers a thread, a third program of eight heads fits a
# multiprocessor of 228 KiB: as sm_120 code 3 % faster at 1024 tokens, 30 % slower at 64
# (sparse_mla_sm120.json). Triton 3.6 gained 10 % at 1024 (sparse_mla_tiles.json).
_ROWS_FP8 = {8: Tile(8, 32, 4, 1, 45_056), 16: Tile(16, 32, 4, 1, 55_296)}
# The forms for Hopper, by heads. 64 heads: 11, 16 and 27 us at 1, 4 and 16 tokens against 12, 21
# and 37, 745 against 1307 at 1024 (sparse_mla_64_heads_designs.json). More than 16 heads over
# fp8_ds_mla rows are cut into blocks of 16.
_HOPPER_16_BIT = {64: Tile(64, 64, 8, 2, 225_344, 168, hopper=True)}
_HOPPER_FP8 = {
    8: Tile(8, 64, 4, 2, 163_000, 168, hopper=True),
    16: Tile(16, 64, 4, 2, 176_424, 168, hopper=True),
    64: Tile(16, 64, 4, 2, 176_424, 168, hopper=True),
}
_INTERPRETED = Tile(16, 32, 1, 1, 0)
# The merge: (parts that it has room for, columns a program, warps). With few columns a program, one
# token's 64 parts spread over the card: 5.8 us with both kernels, 7.7 with 256 and 4 warps
# (sparse_mla_8_heads.json). Few capacities, so that another number of parts compiles nothing.
MERGE_TILES = ((8, 256, 4), (16, 256, 2), (32, 64, 1), (64, 32, 1))
MAX_PARTS = MERGE_TILES[-1][0]
# Shared rows: (token, head) pairs a program. Two programs of 32 pairs a multiprocessor beat one of
# 64 on Hopper (1.31 against 1.55 ms for 4096 tokens), since they overlap products and softmax.
_SHARED_ROWS = (Tile(32, 64, 4, 2, 114_688, together=2), Tile(32, 32, 4, 2, 75_776))


def sparse_mla_tile(
    device: Device, tokens: int, heads: int, itemsize: int, fp8: bool, whole_chunks: bool = True
) -> Tile:
    """The tile of a sparse-MLA launch.

    Args:
        device: where it runs.
        tokens: query tokens.
        heads: query heads on this device.
        itemsize: bytes of a query element.
        fp8: rows are fp8_ds_mla.
        whole_chunks: whether the forms for Hopper hold (`Problem.copies_whole_chunks`).
    """
    if device == INTERPRETER:
        return _INTERPRETED
    width = 8 if heads <= 8 else 16 if heads <= 16 else 64
    forms = _HOPPER_FP8 if fp8 else _HOPPER_16_BIT if itemsize == 2 else {}
    form = forms.get(width) if device.capability == 90 and whole_chunks else None
    if form is not None and form.suits(device):
        return form
    if fp8:
        return _ROWS_FP8[8 if heads <= 8 else 16]
    if itemsize == 4:
        return _ROWS_32_BIT
    return _first_that_suits(device, [t for least, t in _ROWS_16_BIT[width] if tokens >= least])


def sparse_mla_tiles(device: Device, itemsize: int, fp8: bool = False) -> list[Tile]:
    """Every tile that `sparse_mla_tile` can choose on a device."""
    chosen = (
        sparse_mla_tile(device, tokens, heads, itemsize, fp8, whole_chunks)
        for heads, rows in _ROWS_16_BIT.items()
        for tokens, _ in rows
        for whole_chunks in (True, False)
    )
    return list(dict.fromkeys(chosen))


def sparse_mla_parts(device: Device, tile: Tile, tokens: int, heads: int, top_k: int) -> int:
    """How many programs share a token's list: so many that they fill the multiprocessors.

    Two programs each, where so many fit, and parts a power of two, so that they end together; three
    programs, and any number of parts, for a tile of which three fit. The results of 64 heads take
    long to merge: of several tokens a program there takes two blocks at least (4 tokens, with an
    earlier merge: 16 us, 19 with one).
    """
    programs = tokens * -(-heads // tile.heads)
    places = device.multiprocessors * min(
        device.programs(tile.shared_memory), max(tile.together, 2)
    )
    blocks = -(-top_k // tile.rows)
    if tile.heads == 64 and programs > 1:
        blocks = -(-blocks // 2)
    parts = max(min(places // programs, blocks, MAX_PARTS), 1)
    return parts if tile.together > 2 else 1 << parts.bit_length() - 1


def cut_list(top_k: int, rows: int, parts: int) -> tuple[int, int]:
    """How a list is cut among at most so many programs: parts, none of them empty, and places each.

    Args:
        top_k: places of the list; one without any is one part.
        rows: of a tile: each part but the last has whole blocks of them.
        parts: programs that may share it.
    """
    blocks = -(-max(top_k, 1) // rows)
    each = -(-blocks // parts)
    return -(-blocks // each), each * rows


def merge_tile(parts: int) -> tuple[int, int, int]:
    """The row of `MERGE_TILES` for a number of parts.

    Raises:
        ValueError: there are more than MAX_PARTS.
    """
    for tile in MERGE_TILES:
        if parts <= tile[0]:
            return tile
    raise ValueError(f"parts: expected at most {MAX_PARTS}, got {parts}")


def shared_rows_tile(device: Device, heads: int, itemsize: int) -> Tile:
    """The tile of a shared-rows launch; `heads` of the tile counts (token, head) pairs."""
    if device == INTERPRETER:
        return _INTERPRETED
    if itemsize == 4:
        return _ROWS_32_BIT
    return _first_that_suits(device, _SHARED_ROWS)


def _first_that_suits(device: Device, tiles: Sequence[Tile]) -> Tile:
    """The first of some tiles that suits a device, or the last."""
    return next((tile for tile in tiles if tile.suits(device)), tiles[-1])

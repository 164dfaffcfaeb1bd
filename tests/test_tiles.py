"""Layer 3: tiles and parts from what a device has."""

import pytest

from glm5lab.attention.compile import device_for
from glm5lab.attention.tiles import (
    MAX_PARTS,
    Device,
    merge_tile,
    sparse_mla_parts,
    sparse_mla_tile,
)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120, 121])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_two_programs_for_eight_heads_fit_a_multiprocessor(capability, fp8):
    device = device_for(capability)
    for tokens in (1, 4, 8, 32, 128, 5000):
        tile = sparse_mla_tile(device, tokens, 8, 2, fp8, whole_chunks=False)
        assert device.programs(tile.shared_memory) >= 2
        # No second wave of programs, and at least half of the places in use.
        if tokens <= 264:
            parts = sparse_mla_parts(device, tile, tokens, 8, 1 << 20)
            assert parts == MAX_PARTS or 132 < tokens * parts <= 264


def test_a_block_s_limit_is_not_the_multiprocessor_s():
    small_blocks = Device(90, 132, 101_376, 233_472)
    assert small_blocks.programs(83_968) == 2
    assert sparse_mla_tile(small_blocks, 300, 8, 2, False) == sparse_mla_tile(
        device_for(90), 300, 8, 2, False
    )
    assert device_for(120).programs(83_968) == 1
    assert device_for(120).programs(1 << 20) == 1  # what does not fit is refused where it compiles


def test_where_one_program_fits_there_are_half_as_many_parts():
    tiles = {c: sparse_mla_tile(device_for(c), 16, 16, 2, False) for c in (90, 120)}
    assert tiles[90] == tiles[120]
    parts = {c: sparse_mla_parts(device_for(c), t, 16, 16, 2048) for c, t in tiles.items()}
    assert parts == {90: 16, 120: 8}


def test_the_merge_has_room_for_every_number_of_parts():
    assert [merge_tile(parts)[0] for parts in (2, 8, 9, 16, 17, 32, 33, MAX_PARTS)] == [
        *(8, 8, 16, 16, 32, 32, 64, 64)
    ]

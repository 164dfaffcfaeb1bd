"""Layer 3: tiles and parts from what a device has."""

from types import SimpleNamespace

import pytest
import torch

from glm5lab.attention import tiles
from glm5lab.attention.compile import REGISTERS, _compile, device_for
from glm5lab.attention.sparse_mla_rows import compilations
from glm5lab.attention.tiles import (
    MAX_PARTS,
    Device,
    merge_tile,
    sparse_mla_parts,
    sparse_mla_tile,
    sparse_mla_tiles,
)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120, 121])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_two_programs_for_eight_heads_fit_a_multiprocessor(capability, fp8):
    device = device_for(capability)
    for tokens in (1, 4, 8, 32, 64, 96, 127, 128, 5000):
        tile = sparse_mla_tile(device, tokens, 8, 2, fp8, whole_chunks=False)
        together = max(tile.together, 2)
        assert device.programs(tile.shared_memory) >= together
        # No second wave of programs, and at least half of the places in use.
        if tokens <= 264:
            parts = sparse_mla_parts(device, tile, tokens, 8, 1 << 20)
            assert parts == MAX_PARTS or 66 * together < tokens * parts <= 132 * together


def test_a_block_s_limit_is_not_the_multiprocessor_s():
    small_blocks = Device(90, 132, 101_376, 233_472)
    assert small_blocks.programs(83_968) == 2
    assert sparse_mla_tile(small_blocks, 300, 8, 2, False) == sparse_mla_tile(
        device_for(90), 300, 8, 2, False
    )
    assert device_for(120).programs(50_176) == 2
    assert device_for(120).programs(50_177) == 1  # each block gives up 1024 bytes
    assert device_for(120).programs(1 << 20) == 1  # what does not fit is refused where it compiles


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (90, ["w8 s2", "8x64 w8 s2", "w4 s3", "8x64 w8 s2", "w4 s2 r168", "8x64 w4 s2"]),
        (80, ["w8 s2", *["w4 s2"] * 5]),
        (120, ["w8 s2", *["w4 s2"] * 5]),
    ],
)
def test_tiles_of_eight_heads(capability, names):
    device = device_for(capability)
    chosen = [sparse_mla_tile(device, n, 8, 2, False).name for n in (3, 4, 8, 32, 64, 128)]
    assert chosen == [name if "x" in name else f"8x32 {name}" for name in names]


def test_a_device_is_asked_what_it_has(monkeypatch):
    def device(override="", **properties):
        given = SimpleNamespace(major=9, minor=0, multi_processor_count=7, **properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: given)
        return tiles._device.__wrapped__(0, override)

    block, total = {"shared_memory_per_block_optin": 9}, {"shared_memory_per_multiprocessor": 99}
    assert device(**block, **total) == Device(90, 7, 9, 99)
    assert device(**block) == Device(90, 7, 9)
    assert device(**total) == Device(90, 7, 232_448, 99)
    assert device("sm120", **block, **total) == Device(120, 7, 101_376)


def test_three_programs_of_a_list_need_not_be_a_power_of_two():
    tile = sparse_mla_tile(device_for(90), 64, 8, 2, False)
    counts = {n: sparse_mla_parts(device_for(90), tile, n, 8, 2048) for n in (64, 70, 96, 127)}
    assert counts == {64: 6, 70: 5, 96: 4, 127: 3}


def test_programs_that_fit_have_the_registers(monkeypatch, tmp_path):
    """Where a tile is chosen since several of its programs fit a multiprocessor, for Hopper."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = device_for(90)
    chosen = {t.name: t.together for t in sparse_mla_tiles(device, 2) if t.together > 1}
    assert sorted(chosen.values()) == [2, 2, 2, 3]
    forms = {
        f"sparse_mla {name} rope 64 split{pages}": together
        for name, together in chosen.items()
        for pages in ("", " pages")
    }
    listed = [c for c in compilations(device) if c.name in forms]
    assert len(listed) == len(forms)
    for compilation in listed:
        result = _compile(("glm5lab.attention.sparse_mla_rows", 90, compilation))
        registers = forms[compilation.name] * result.registers * result.threads
        assert 0 < registers <= REGISTERS, result
        assert result.spilled <= 32, result  # six loads of a block's thousand instructions


def test_where_one_program_fits_there_are_half_as_many_parts():
    tiles = {c: sparse_mla_tile(device_for(c), 16, 16, 2, False) for c in (90, 120)}
    assert tiles[90] == tiles[120]
    parts = {c: sparse_mla_parts(device_for(c), t, 16, 16, 2048) for c, t in tiles.items()}
    assert parts == {90: 16, 120: 8}


def test_the_merge_has_room_for_every_number_of_parts():
    room = {2: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 64, MAX_PARTS: 64}
    assert {parts: merge_tile(parts)[0] for parts in room} == room
    with pytest.raises(ValueError, match="parts: expected at most 64, got 65"):
        merge_tile(65)

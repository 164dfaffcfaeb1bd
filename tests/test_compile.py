"""Ahead-of-time compilation of the kernels; no GPU is needed."""

import json
from itertools import product

import pytest

from glm5lab.attention import compile as aot
from glm5lab.attention.tiles import shared_rows_tile, sparse_mla_tile
from glm5lab.errors import InputError
from glm5lab.views.kernels import NAME_WIDTH, parse_architectures, run_compile
from glm5lab.views.measurements import measurements


def first_of(module, monkeypatch):
    """Only the first configuration of one module."""
    whole = aot._compilations
    monkeypatch.setattr(aot, "MODULES", (module,))
    monkeypatch.setattr(aot, "_compilations", lambda m, d: whole(m, d)[:1])


def test_a_kernel_compiles_for_sm_120_within_its_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first_of("glm5lab.attention.sparse_mla_rows", monkeypatch)
    lines: list[str] = []
    assert run_compile("sm_120", True, lines.append, jobs=1)
    (kernel,) = json.loads(lines[0])["kernels"]
    assert kernel["architecture"] == "sm_120"
    assert 32_768 < kernel["shared_memory"] <= kernel["limit"] == 101_376
    assert 64 < kernel["registers"] <= 255
    assert kernel["spilled"] == 0
    assert not kernel["cached"]
    assert run_compile("sm_120", False, lines.append, jobs=1)
    assert lines[1].endswith("of stack, cached")


def test_too_much_shared_memory_is_noticed(monkeypatch):
    fits = aot.Resources("k", "sm_120", 101_376, 101_376, 100, 0, 0.1)
    too_much = aot.Resources("k", "sm_120", 101_377, 101_376, 100, 0, 0.1)
    broken = aot.Resources("k", "sm_120", 0, 101_376, 0, 0, 0.1, "ptxas failed")
    understated = aot.Resources("k", "sm_120", 40_001, 101_376, 100, 0, 0.1, declared=40_000)
    all_of_them = [fits, too_much, broken, understated]
    monkeypatch.setattr("glm5lab.views.kernels.compile_all", lambda *_: all_of_them)
    lines: list[str] = []
    assert not run_compile("sm_120", False, lines.append)
    assert "exceeds the device" in lines[1]
    assert "does not compile: ptxas failed" in lines[2]
    assert lines[3].endswith("exceeds the 40000 bytes that its tile states")
    assert lines[-1] == "4 configurations, 3 that do not fit their device"


def test_too_many_registers_are_noticed():
    fits = aot.Resources("k", "sm_120", 0, 101_376, 64, 0, 0.1, threads=1024)
    too_many = aot.Resources("k", "sm_120", 0, 101_376, 65, 0, 0.1, threads=1024)
    assert fits.fits
    assert not too_many.fits


def test_rows_of_fp32_need_what_their_tile_declares(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module, what in (("sparse_mla_rows", "sparse_mla"), ("shared_rows", "shared rows")):
        device, module = aot.device_for(120), f"glm5lab.attention.{module}"
        found = [c for c in aot._compilations(module, device) if c.name.startswith(f"{what} fp32")]
        resources = aot._compile((module, 120, found[0]))
        assert resources.fits, resources
        assert resources.shared_memory == shared_rows_tile(device, 8, 4).shared_memory


@pytest.mark.parametrize("capability", [86, 90, 100])
def test_the_tile_of_64_heads_needs_no_more_than_it_declares(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, device = "glm5lab.attention.sparse_mla_rows", aot.device_for(capability)
    tile = sparse_mla_tile(device, 300, 64, 2, fp8=False, whole_chunks=False)
    name = f"sparse_mla {tile.name} rope 64 whole"
    (found,) = [c for c in aot._compilations(module, device) if c.name == name]
    resources = aot._compile((module, capability, found))
    assert resources.fits, resources
    assert resources.shared_memory <= tile.shared_memory


def test_one_form_of_every_tile_needs_no_more_than_it_declares(monkeypatch, tmp_path):
    """Of those for SM120; `glm5lab compile` compares all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = aot.device_for(120)
    first: dict[object, tuple[str, int, aot.Compilation]] = {}
    for module in aot.MODULES:
        for c in aot._compilations(module, device):
            if c.declared is not None and "pages of" not in c.name:
                rows = c.constants.get("BLOCK_H"), c.constants["BLOCK_K"]
                tile = (c.kernel, c.types["q_ptr"], c.declared, c.warps, rows)
                first.setdefault(tile, (module, 120, c))
    assert len(first) >= 8
    for work in first.values():
        resources = aot._compile(work)
        assert resources.fits, resources
        stated = work[2].declared or 0
        assert 0.85 * stated < resources.shared_memory, resources  # nor much less


def test_the_stored_table_has_what_is_compiled_for_sm_120():
    stored = measurements("compile_sm120")["kernels"]
    device = aot.device_for(120)
    names = [c.name for m in aot.MODULES for c in aot._compilations(m, device)]
    assert [row["kernel"] for row in stored] == names


# Names of configurations, and bytes of a query's element.
ROWS = (("", 2), ("fp16 ", 2), ("fp32 ", 4), ("fp8 ", 2))


def test_every_tile_is_compiled():
    for capability in aot.ARCHITECTURES:
        device = aot.device_for(capability)
        names = {c.name for m in aot.MODULES for c in aot._compilations(m, device)}
        rows = product((1, 7, 31, 64, 300, 5000), (1, 8, 12, 24, 64, 128), ROWS, (True, False))
        for tokens, heads, (name, itemsize), whole_chunks in rows:
            tile = sparse_mla_tile(device, tokens, heads, itemsize, name == "fp8 ", whole_chunks)
            # For Hopper, float16 goes through the same form as bfloat16.
            name = "" if tile.hopper and name == "fp16 " else name
            form = f"sparse_mla {name}{tile.name} "
            assert any(name.startswith(form) for name in names), form
            assert tile.shared_memory <= device.shared_memory
        for heads, (dtype, itemsize) in product((8, 12, 16, 32, 64), (("bf16", 2), ("fp32", 4))):
            tile = shared_rows_tile(device, heads, itemsize)
            assert f"shared rows {dtype} {tile.name} rope 64 by {tile.heads // 8}" in names
            if itemsize == 2:
                group = max(1, tile.heads // heads)
                assert f"shared rows {dtype} {tile.name} rope 64 by {group}" in names
                assert f"union of {group}" in names


def test_names_fit_their_column_and_differ():
    for capability in aot.ARCHITECTURES:
        device = aot.device_for(capability)
        names = [c.name for m in aot.MODULES for c in aot._compilations(m, device)]
        assert len(set(names)) == len(names)
        assert max(map(len, names)) <= NAME_WIDTH


@pytest.mark.parametrize("text", ["", "sm_70", "90", "sm_90,hopper"])
def test_unknown_architectures_are_refused(text):
    known = "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, sm_121"
    with pytest.raises(InputError, match=f"is no architecture that is known; give some of {known}"):
        parse_architectures(text)


def test_architectures_are_read_once_however_they_are_written():
    assert parse_architectures("sm_120, sm90,sm120") == [120, 90]


@pytest.mark.slow
def test_every_configuration_fits_every_architecture():
    assert run_compile("sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,sm_121", False, print)

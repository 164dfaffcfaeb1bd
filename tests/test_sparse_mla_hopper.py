"""Layer 3 on Hopper: the Gluon kernels' logic in a simulation, and compiled on a Hopper GPU."""

from itertools import product

import pytest
import torch
from gluon_simulated import Simulated
from test_sparse_mla import LSE_TOLERANCE, TOLERANCE, make_case
from test_sparse_mla import compare_with_reference as compare_on_gpu

from glm5lab.attention import reference, sparse_mla, sparse_mla_hopper, sparse_mla_hopper_fp8
from glm5lab.attention.problem import Parts, Problem
from glm5lab.attention.tiles import Tile

CASES = [
    # tokens, heads, rope, top_k, page_size (0: rows without pages)
    (1, 1, 64, 1, 0),
    (3, 64, 64, 300, 16),
    (2, 17, 64, 130, 7),
    (2, 33, 0, 64, 16),
    (1, 128, 64, 200, 0),
    (2, 65, 64, 65, 16),
]
RUNS = ((False, 1), (True, 3))  # with lengths, parts


def attend_in_parts(attend, problem, tile, count):
    """The output and the LSE, from parts merged in torch where there are several."""
    places = -(-problem.top_k // (tile.rows * count)) * tile.rows
    tokens, heads = problem.tokens, problem.heads
    if count == 1:
        out = torch.full((tokens, heads, 512), float("nan"), dtype=problem.q.dtype)
        lse = torch.full((tokens, heads), float("nan"))
        strides = (out.stride(0), 0, out.stride(1))
        attend(problem, Parts(out, lse, strides, 1, places, False), tile)
        return out.double(), lse
    out = torch.full((tokens, count, heads, 512), float("nan"))
    lse = torch.full((tokens, count, heads), float("nan"))
    strides = (out.stride(0), out.stride(1), out.stride(2))
    attend(problem, Parts(out, lse, strides, count, places, True), tile)
    total = lse.logsumexp(1)
    weight = (lse - total[:, None]).exp().nan_to_num(0.0)
    return (out * weight[..., None]).sum(1).double(), total


def compare_with_reference(attend, tile, dtype, case, with_lengths, count, fp8=False):
    """Raises where the simulated kernel and the reference differ."""
    tokens, heads, rope, top_k, page_size = case
    made = make_case(dtype, tokens, heads, rope, top_k, page_size, fp8=fp8)
    q, kv, indices, lengths = made
    given = lengths if with_lengths else None
    problem = Problem(q, kv, indices, given, 256**-0.5, 512)
    assert problem.copies_whole_chunks
    out, lse = attend_in_parts(attend, problem, tile, count)
    exact = kv if fp8 else kv.double()
    expected, expected_lse = reference.sparse_mla(q.double(), exact, indices, 256**-0.5, given)
    error = (out - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < TOLERANCE[dtype], float(error)
    empty = expected_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert torch.all(out[empty] == 0)
    assert torch.all((lse - expected_lse)[~empty].abs() < LSE_TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_16_bits(case, monkeypatch):
    kernel = Simulated(sparse_mla_hopper._attend_64_kernel)
    monkeypatch.setattr(sparse_mla_hopper, "_attend_64_kernel", kernel)
    tile = Tile(64, 64, 8, 2, 0, hopper=True)
    attend = sparse_mla_hopper.attend_hopper
    for dtype, (with_lengths, count) in product((torch.bfloat16, torch.float16), RUNS):
        compare_with_reference(attend, tile, dtype, case, with_lengths, count)


def values(words):
    """What the kernel's instructions do: e4m3 to fp16."""
    found = words.contiguous().view(torch.float8_e4m3fn).to(torch.float16)
    return found.as_subclass(type(words))


def simulated_fp8(monkeypatch):
    """The launcher, its kernel simulated."""
    kernel = Simulated(sparse_mla_hopper_fp8._attend_hopper_fp8_kernel, {"_values": values})
    monkeypatch.setattr(sparse_mla_hopper_fp8, "_attend_hopper_fp8_kernel", kernel)
    return sparse_mla_hopper_fp8.attend_hopper_fp8


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("case", [c for c in CASES if c[2] == 64], ids=str)
def test_fp8_rows(case, heads, monkeypatch):
    attend = simulated_fp8(monkeypatch)
    tile = Tile(heads, 64, 4, 2, 0, hopper=True)
    for with_lengths, count in RUNS:
        compare_with_reference(attend, tile, torch.bfloat16, case, with_lengths, count, fp8=True)


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
def test_nan_stays_nan(fp8, heads, monkeypatch):
    if fp8:
        attend = simulated_fp8(monkeypatch)
    else:
        kernel = Simulated(sparse_mla_hopper._attend_64_kernel)
        monkeypatch.setattr(sparse_mla_hopper, "_attend_64_kernel", kernel)
        attend = sparse_mla_hopper.attend_hopper
    tile = Tile(min(heads, 16) if fp8 else 64, 64, 8, 2, 0, hopper=True)
    q, kv, indices, _ = make_case(torch.bfloat16, 2, heads, 64, 300, 0, fp8=fp8)
    q[0] = float("nan")
    for count in (1, 3):
        out, lse = attend_in_parts(attend, Problem(q, kv, indices, None, 0.06, 512), tile, count)
        assert torch.all(lse[0].isnan())
        assert torch.all(lse[1] == float("-inf"))
        if count == 1:
            assert torch.all(out[0].isnan())


def test_fp8_heads_far_apart_take_another_form():
    q = torch.empty(2, 8, 576, dtype=torch.bfloat16)
    kv, indices = torch.empty(9, 656, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int32)
    room = torch.empty(8 * 2**24, dtype=torch.bfloat16, device="meta")
    far = room.as_strided((2, 8, 576), (576, 2**24, 1))
    assert Problem(q, kv, indices, None, 0.06, 512).copies_whole_chunks
    assert not Problem(far, kv, indices, None, 0.06, 512).copies_whole_chunks


def test_fp8_scores_are_exact_where_they_are_large(monkeypatch):
    """Where few rows decide, a value that is rounded once more shows in the LSE."""
    attend = simulated_fp8(monkeypatch)
    q, kv, indices, _ = make_case(torch.bfloat16, 32, 16, 64, 64, 0, fp8=True)
    kv[:, 512:528].view(torch.float32)[:] = torch.rand(len(kv), 4) * 0.2 + 0.01
    problem = Problem(q, kv, indices, None, 1 / 16, 512)
    _, lse = attend_in_parts(attend, problem, Tile(16, 64, 4, 2, 0, hopper=True), 1)
    _, expected = reference.sparse_mla(q.double(), kv, indices, 1 / 16)
    full = expected > float("-inf")
    assert expected[full].max() > 50
    assert (lse - expected)[full].abs().max() < 0.05 * LSE_TOLERANCE


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("order", [1, -1], ids=["growing", "shrinking"])
def test_fp8_blocks_of_different_magnitude(order, heads, monkeypatch):
    attend = simulated_fp8(monkeypatch)
    q, kv, indices, _ = make_case(torch.bfloat16, 2, heads, 64, 300, 0, fp8=True)
    scales = kv[:, 512:528].view(torch.float32)
    scales *= 10.0 ** torch.linspace(-5, 0, len(kv))[:, None]
    indices = indices.sort(descending=order < 0).values
    problem = Problem(q, kv, indices, None, 256**-0.5, 512)
    out, _ = attend_in_parts(attend, problem, Tile(heads, 64, 4, 2, 0, hopper=True), 1)
    expected, _ = reference.sparse_mla(q.double(), kv, indices, 256**-0.5)
    assert (out - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("case", [(33, 64, 64, 2048, 64), (140, 128, 64, 300, 7)], ids=str)
def test_compiled_on_a_hopper_gpu(case, fp8):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    tokens, heads, rope, top_k, page_size = case
    for with_lengths in (False, True):
        if fp8:
            for fewer in (heads, 16, 9, 8, 1):
                few = (tokens, fewer, rope, top_k, page_size)
                compare_on_gpu(
                    sparse_mla.sparse_mla, "cuda", torch.bfloat16, few, True, with_lengths
                )
        else:
            for dtype, columns in product((torch.bfloat16, torch.float16), (rope, 0)):
                other = (tokens, heads, columns, top_k, page_size)
                compare_on_gpu(sparse_mla.sparse_mla, "cuda", dtype, other, False, with_lengths)

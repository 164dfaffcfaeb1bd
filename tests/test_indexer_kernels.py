"""Layer 3: the indexer's logits. The reference by hand, the Triton kernels against the reference.

On a GPU the kernels are compiled; everywhere they also run in Triton's CPU interpreter, in a
process of its own, since TRITON_INTERPRET is read when triton is imported.
"""

from itertools import product

import pytest
import torch
from interpreted import run_interpreted
from memory import poisoned

from glm5lab.attention import reference

FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.float32, torch.float16, torch.bfloat16)
# The norm of the error over the norm of the logits, against float64; one bound for all dtypes.
RELATIVE = 3e-3

CASES = [
    # tokens, heads, width, keys
    (5, 32, 128, 300),
    (1, 4, 32, 70),
    (9, 3, 40, 200),
]
PAGED_CASES = [
    # requests, queries, heads, width, page_size, longest context
    (2, 1, 32, 128, 64, 300),
    (3, 2, 4, 32, 16, 100),
    (2, 5, 32, 64, 7, 200),
]


def make_case(dtype, tokens, heads, width, keys, seed=0):
    """q, k, weights and k_scale (None unless fp8), with bounds that leave one token nothing."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, width, generator=gen).to(dtype)
    k = torch.randn(keys, width, generator=gen).to(dtype)
    weights = torch.randn(tokens, heads, generator=gen)
    scale = torch.rand(keys, 1, generator=gen) + 0.1 if dtype == FP8 else None
    start = torch.randint(0, keys // 2, (tokens,), generator=gen)
    end = torch.randint(1, keys + 1, (tokens,), generator=gen)
    end[-1] = start[-1] if tokens > 1 else end[-1]
    return q, k, weights, start, end, scale


def make_paged_case(dtype, requests, queries, heads, width, page_size, longest, seed=0):
    """q, a cache whose pages lie apart and out of order, weights, lengths and block table."""
    gen = torch.Generator().manual_seed(seed)
    each = -(-longest // page_size)
    pages = requests * each + 1
    if dtype == FP8:
        room = torch.full((pages, page_size + 1, width + 4), 0x7F, dtype=torch.uint8)
        cache = room[:, :page_size]
        keys, scales = reference.page_parts(cache, width)
        assert scales is not None
        keys.view(torch.uint8)[:] = (
            torch.randn(keys.shape, generator=gen).to(dtype).view(torch.uint8)
        )
        scales[:] = torch.rand(scales.shape, generator=gen) + 0.1
    else:
        room = torch.full((pages, page_size + 1, width), float("nan"), dtype=dtype)
        cache = room[:, :page_size]
        cache[:] = torch.randn(cache.shape, generator=gen).to(dtype)
    table = torch.randperm(pages, generator=gen)[:-1].view(requests, each).int()
    lengths = torch.randint(1, longest + 1, (requests,), generator=gen, dtype=torch.int32)
    q = torch.randn(requests, queries, heads, width, generator=gen).to(dtype)
    return q, cache, torch.randn(requests * queries, heads, generator=gen), lengths, table


def assert_close(logits, expected):
    """The same columns are -inf, and the rest is within RELATIVE."""
    seen = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(logits), seen)
    assert torch.all(logits[~seen] == float("-inf"))
    error = (logits[seen].double() - expected[seen]).norm()
    assert error <= RELATIVE * expected[seen].norm()


def compare_triton_with_reference(device, dtypes):
    """Raises where a kernel and the float64 reference differ."""
    from glm5lab.attention.indexer import mqa_logits
    from glm5lab.attention.indexer_paged import paged_mqa_logits

    for dtype, case in product(dtypes, CASES):
        given = make_case(dtype, *case)
        q, k, weights, start, end = (x.to(device) for x in given[:5])
        scale = None if given[5] is None else given[5].to(device)
        for low, high in ((None, None), (start, None), (None, end), (start, end)):
            expected = reference.mqa_logits(q.double(), k.double(), weights, low, high, scale)
            with poisoned():
                logits = mqa_logits(q, k, weights, low, high, scale)
            assert_close(logits, expected)
        for width in (q.shape[0] + 300, 60):
            with poisoned():
                compact = mqa_logits(q, k, weights, start, end, scale, clean=False, width=width)
            for t, (low, high) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
                some = min(max(0, high - low), width)
                assert_close(compact[t, :some], expected[t, low : low + some])
                assert torch.all(compact[t, some:].isnan()), "written outside of start..end"
    for dtype, paged in product(dtypes, PAGED_CASES):
        q, cache, weights, lengths, table = (x.to(device) for x in make_paged_case(dtype, *paged))
        plain = cache if dtype == FP8 else cache.double()
        own = lengths[:, None].expand(-1, q.shape[1]).clamp_min(3) - 2
        for lens, longest in ((lengths, paged[-1]), (own, paged[-1]), (lengths, 61)):
            expected = reference.paged_mqa_logits(q.double(), plain, weights, lens, table, longest)
            with poisoned():
                logits = paged_mqa_logits(q, cache, weights, lens, table, longest)
            assert_close(logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_equal_the_reference_on_the_gpu(dtype):
    compare_triton_with_reference("cuda", [dtype])


def test_kernels_equal_the_reference_in_the_interpreter():
    run_interpreted(
        "import test_indexer_kernels as t;t.compare_triton_with_reference('cpu', t.DTYPES)"
    )


def test_logits_by_hand():
    q, k, weights, start, end, scale = make_case(FP8, 3, 4, 8, 5, seed=1)
    logits = reference.mqa_logits(q, k, weights, start, end, scale)
    for t, s in product(range(3), range(5)):
        if not start[t] <= s < end[t]:
            assert logits[t, s] == float("-inf")
            continue
        dots = [float(q[t, h].float() @ k[s].float()) for h in range(4)]
        by_hand = sum(float(weights[t, h]) * max(0.0, dots[h]) for h in range(4))
        assert float(logits[t, s]) == pytest.approx(by_hand * float(scale[s]), rel=1e-5, abs=1e-5)


def test_a_page_holds_its_keys_first_and_then_their_scales():
    cache = torch.zeros(3, 4, 12, dtype=torch.uint8)
    values = torch.arange(32.0).view(4, 8).to(FP8)
    flat = cache[1].view(-1)
    flat[:32] = values.view(torch.uint8).view(-1)
    flat[32:] = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(torch.uint8)
    keys, scales = reference.page_parts(cache, 8)
    assert scales is not None
    assert torch.equal(keys[1].float(), values.float())
    assert scales[1].tolist() == [1, 2, 3, 4]


def test_several_queries_of_a_request_see_one_key_more_each():
    q, cache, weights, _, table = make_paged_case(torch.float32, 1, 3, 2, 8, 4, 8)
    logits = reference.paged_mqa_logits(q, cache, weights, torch.tensor([6]), table, 8)
    assert torch.isfinite(logits).sum(-1).tolist() == [4, 5, 6]
    keys = reference.gather_rows(cache, reference.slots_of(torch.arange(8)[None], table, 4)[0])
    whole = reference.mqa_logits(q[0], keys, weights)
    torch.testing.assert_close(logits[2, :6], whole[2, :6])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": torch.zeros(2, 128)}, "q:"),
        ({"k": torch.zeros(9, 64)}, "k:"),
        ({"weights": torch.zeros(3, 4)}, "weights:"),
        ({"start": torch.zeros(3, dtype=torch.int32)}, "start:"),
        ({"end": torch.zeros(2)}, "end:"),
        ({"k_scale": torch.zeros(8)}, "k_scale:"),
        ({"weights": torch.zeros(2, 4, device="meta")}, "weights:"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    given = {"q": torch.zeros(2, 4, 128), "k": torch.zeros(9, 128), "weights": torch.zeros(2, 4)}
    with pytest.raises(ValueError, match=name):
        reference.mqa_logits(**{**given, **change})


def test_a_compact_result_needs_bounds():
    pytest.importorskip("triton")
    from glm5lab.attention.indexer import mqa_logits

    q, k, weights, start, end, _ = make_case(torch.float32, 3, 4, 32, 5)
    with pytest.raises(ValueError, match="width: a compact result needs start and end"):
        mqa_logits(q, k, weights, start, clean=False, width=5)
    with pytest.raises(ValueError, match="width: a compact result needs start and end"):
        mqa_logits(q, k, weights, start, end, width=5)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": torch.zeros(2, 4, 32)}, "q:"),
        ({"cache": torch.zeros(5, 16, 32, dtype=torch.uint8)}, "cache:"),
        ({"cache": torch.zeros(5, 36, 16, dtype=torch.uint8).mT}, "cache:"),
        ({"weights": torch.zeros(3, 4)}, "weights:"),
        ({"context_lens": torch.zeros(3, dtype=torch.int32)}, "context_lens:"),
        ({"context_lens": torch.zeros(2)}, "context_lens:"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, "block_table:"),
        ({"max_len": -1}, "max_len:"),
    ],
)
def test_wrong_paged_arguments_are_named(change, name):
    given = {
        "q": torch.zeros(2, 1, 4, 32),
        "cache": torch.zeros(5, 16, 36, dtype=torch.uint8),
        "weights": torch.zeros(2, 4),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "max_len": 32,
    }
    with pytest.raises(ValueError, match=name):
        reference.paged_mqa_logits(**{**given, **change})

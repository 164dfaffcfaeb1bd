"""Layer 3: arguments and outputs that are views, with strides of their own.

What lies between their values is NaN, or an integer that would change the result. The kernels run
compiled on a GPU, and everywhere in Triton's interpreter; see test_sparse_mla.
"""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from interpreted import run_interpreted
from memory import poisoned, spaced
from test_indexer_kernels import FP8, assert_close, make_case, make_paged_case
from test_kv_cache import bits, make_cache, make_rows
from test_sparse_mla import LSE_TOLERANCE, TOLERANCE
from test_sparse_mla import make_case as make_attention

from glm5lab.attention import reference, row_formats

OUTPUTS = ((0, 1), (1,), (0,))  # tokens and heads apart, heads, tokens
NAN = float("nan")


def test_memory_that_nobody_wrote_shows():
    with poisoned():
        made = torch.empty(3), torch.zeros(1).new_empty(2, dtype=torch.int32)
    assert torch.all(made[0].isnan())
    assert torch.all(made[1] == torch.iinfo(torch.int32).max)
    assert not torch.are_deterministic_algorithms_enabled()


def test_spaced_values_lie_apart():
    x = torch.arange(6).view(2, 3)
    view = spaced(x, 0, 1, between=-7)
    assert torch.equal(view, x)
    assert view.stride() == (12, 2)
    assert view.untyped_storage().nbytes() == 4 * x.nbytes


def attend_views(device, dtypes):
    """Indices, lengths, queries, rows and outputs that are views: exactly what plain ones give."""
    from glm5lab.attention.sparse_mla import sparse_mla

    for dtype, fp8, parts, heads in product(dtypes, (False, True), (1, 3), (8, 64)):
        if fp8 and dtype == torch.float32:
            continue
        # The interpreter takes long: there each dtype has one of the parts, and few heads.
        if device == "cpu" and (parts, heads) != (3 if dtype == torch.float16 else 1, 8):
            continue
        places = 149 if device == "cuda" else 37  # several blocks, rows not aligned
        made = make_attention(dtype, 3, heads, 64, places, 16 if fp8 else 0, fp8=fp8)
        q, kv, indices, lengths = (x.to(device) for x in made)
        # fp8_ds_mla rows lie next to each other; their pages are apart as they are.
        rows = kv if fp8 else spaced(kv, 0)
        strided = spaced(lengths, 0, between=1)
        given = (
            (spaced(q, 0, 1), rows, spaced(indices, 0, between=5), 0.06, lengths),
            (spaced(q, 2), rows, spaced(indices, 1, between=5), 0.06, strided),
            (q.transpose(0, 1).contiguous().transpose(0, 1), rows, indices.long(), 0.06, lengths),
        )
        with patch("glm5lab.attention.sparse_mla.sparse_mla_parts", return_value=parts):
            expected = sparse_mla(q, kv, indices, 0.06, lengths)
            check_attention(expected, (q, kv, indices, lengths), fp8)
            for dims, arguments in zip(OUTPUTS, given, strict=True):
                room = torch.full((6, 2 * heads, 512), NAN, dtype=dtype, device=device)
                sizes = enumerate((3, heads))
                at = tuple(slice(1, None, 2) if dim in dims else slice(n) for dim, n in sizes)
                with poisoned():
                    out, lse = sparse_mla(*arguments, out=room[at])
                assert torch.equal(out, expected[0]), (dtype, fp8, parts, heads, dims)
                assert torch.equal(lse, expected[1]), (dtype, fp8, parts, heads, dims)
                out.fill_(NAN)
                assert torch.all(room.isnan()), "written beside the output"


def check_attention(found, given, fp8):
    """Raises where attention differs from the reference."""
    q, kv, indices, lengths = given
    exact = kv if fp8 else kv.double()
    expected = reference.sparse_mla(q.double(), exact, indices, 0.06, lengths)
    error = (found[0].double() - expected[0]).norm() / expected[0].norm()
    assert error < TOLERANCE[torch.float16 if fp8 else q.dtype], float(error)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=LSE_TOLERANCE)


def score_views(device, dtypes):
    """Queries, keys, weights, scales and bounds that are views."""
    from glm5lab.attention.indexer import mqa_logits

    for dtype in dtypes:
        case = make_case(dtype, 5, 4, 40, 70)
        q, k, weights, start, end = (x.to(device) for x in case[:5])
        scale = None if case[5] is None else case[5].to(device)
        expected = reference.mqa_logits(q.double(), k.double(), weights, start, end, scale)
        bounds = spaced(start, 0, between=0), spaced(end, 0, between=9)
        for of_q, of_k, of_weights in (((0, 1), (0,), (0,)), ((2,), (1,), (1,))):
            views = spaced(q, *of_q), spaced(k, *of_k), spaced(weights, *of_weights), *bounds
            with poisoned():
                found = mqa_logits(*views, None if scale is None else spaced(scale, 0, 1))
            assert_close(found, expected)


def score_paged_views(device, dtypes):
    """Queries, weights, contexts and block tables that are views; pages lie apart as they are."""
    from glm5lab.attention.indexer_paged import paged_mqa_logits

    for dtype in dtypes:
        case = make_paged_case(dtype, 3, 2, 4, 32, 16, 70)
        q, cache, weights, lengths, table = (x.to(device) for x in case)
        own = lengths[:, None].expand(-1, 2).clamp_min(3) - 2
        plain = cache if dtype == FP8 else cache.double()
        forms = (
            ((0, 1), (0,), (0,), lengths, spaced(lengths, 0, between=1)),
            ((2, 3), (1,), (1,), own, spaced(own, 0, 1, between=1)),
            ((1,), (0, 1), (0, 1), own, own.t().contiguous().t()),
        )
        for of_q, of_weights, of_table, lens, view in forms:
            expected = reference.paged_mqa_logits(q.double(), plain, weights, lens, table, 75)
            views = spaced(q, *of_q), cache, spaced(weights, *of_weights), view
            with poisoned():
                found = paged_mqa_logits(*views, spaced(table, *of_table, between=0), 75)
            assert_close(found, expected)


def choose_views(device):
    """Rows and columns of logits that lie apart, and bounds that do, in each form of top-k."""
    from glm5lab.attention.topk import Cut, top_k

    torch.manual_seed(0)
    x = torch.randn(3, 400, device=device)
    start = torch.tensor([390, 3, 0], device=device)
    end = torch.tensor([399, 350, 400], device=device)
    expected = reference.top_k(x, 20, start, end)
    bounds = spaced(start, 0, between=300), spaced(end, 0, between=2)
    cut, whole = Cut(128, 64), Cut(128, 64, whole=True)
    rows, columns = spaced(x, 0, between=9.0), spaced(x, 1, between=9.0)
    for view, how in ((rows, cut), (rows, whole), (columns, cut), (x.t().contiguous().t(), cut)):
        with poisoned():
            found = top_k(view, 20, *bounds, how)
        assert torch.equal(found, expected), (view.stride(), how)


def store_views(device):
    """Slots, rows and keys that are views: what plain ones store, and nothing between."""
    from glm5lab.attention import kv_cache

    slots, latent, rope = make_rows(9, torch.float16, device=device)
    between = int(slots.max())
    for width, dtype in ((576, torch.float16), (656, torch.uint8)):
        cache = make_cache(9, 4, width, dtype, device)
        expected = cache.clone()
        row_formats.store_rows(expected, slots, latent, rope)
        views = spaced(slots, 0, between=between), spaced(latent, 1), spaced(rope, 0, 1)
        kv_cache.store_rows(cache, *views)
        assert torch.equal(bits(cache), bits(expected)), dtype
        with poisoned():
            rows = kv_cache.gather(cache, views[0], torch.float32)
        wanted = row_formats.gather(expected, slots, torch.float32)
        torch.testing.assert_close(rows, wanted, rtol=0, atol=0, equal_nan=True)
    cache = make_cache(9, 4, 132, torch.uint8, device)
    expected = cache.clone()
    row_formats.store_index_keys(expected, slots, latent[:, :128])
    for dims in ((0,), (0, 1)):
        keys = spaced(latent[:, :128], *dims)
        kv_cache.store_index_keys(cache, spaced(slots, 0, between=between), keys)
        assert torch.equal(bits(cache), bits(expected)), dims


def compare_views(device, attention, keys):
    """All of the above, for dtypes of attention and of index keys."""
    attend_views(device, attention)
    score_views(device, keys)
    score_paged_views(device, keys)
    choose_views(device)
    store_views(device)


def test_views_in_the_interpreter():
    run_interpreted(
        "import test_strides as t;"
        "halves = t.torch.float16;"
        "t.compare_views('cpu', (t.torch.float32, halves), (t.FP8, halves))"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_views_on_the_gpu(dtype):
    compare_views("cuda", [dtype], (FP8, dtype))

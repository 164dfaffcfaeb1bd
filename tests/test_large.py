"""Layer 3: tensors of more than 4 GB and 2**31 elements, where offsets of 32 bits would wrap.

On a GPU only; at small sizes the same comparisons run in Triton's interpreter. Large caches of
attention stand in test_sparse_mla, test_shared_rows and test_kv_cache.
"""

import gc

import pytest
import torch
from interpreted import run_interpreted
from memory import poisoned
from test_indexer_kernels import FP8, assert_close, make_case, make_paged_case
from test_kv_cache import bits, make_rows
from test_sparse_mla import LSE_TOLERANCE, TOLERANCE
from test_sparse_mla import make_case as make_attention
from test_topk import cuts

from glm5lab.attention import reference, row_formats

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)


@pytest.fixture(autouse=True)
def _memory_freed():
    """Nothing of one test is left on the GPU for the next."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def store_far_index_keys(device, pages):
    """Keys into the last of many pages: to the bit what one page gets, and nothing elsewhere."""
    from glm5lab.attention import kv_cache

    slots, latent, _ = make_rows(32, BF16, device=device)
    keys = latent[:, :128]
    cache, near = (torch.zeros(n, 64, 132, dtype=torch.uint8, device=device) for n in (pages, 1))
    far = torch.where(slots < 0, slots, slots + (pages - 1) * 64)
    kv_cache.store_index_keys(cache, far, keys)
    row_formats.store_index_keys(near, slots, keys)
    assert torch.equal(bits(cache[-1]), bits(near[0]))
    assert not cache[:-1].any()


def score_far_pages(device, dtype, pages):
    """Keys in the last of many pages."""
    from glm5lab.attention.indexer_paged import paged_mqa_logits

    case = make_paged_case(dtype, 2, 2, 32, 128, 64, 150)
    q, few, weights, lengths, table = (x.to(device) for x in case)
    cache = torch.zeros(pages, *few.shape[1:], dtype=few.dtype, device=device)
    cache[-len(few) :] = few
    plain = few if dtype == FP8 else few.double()
    expected = reference.paged_mqa_logits(q.double(), plain, weights, lengths, table, 150)
    with poisoned():
        found = paged_mqa_logits(q, cache, weights, lengths, table + pages - len(few), 150)
    assert_close(found, expected)


def score_far_keys(device, dtype, tokens, keys):
    """Queries that see some of the last keys, and one that sees all: zeros, but for the last."""
    from glm5lab.attention.indexer import mqa_logits

    case = make_case(dtype, tokens, 32, 128, 300)
    q, few, weights, start, end = (x.to(device) for x in case[:5])
    scale = far_scale = None
    if case[5] is not None:
        scale = case[5].to(device)
        far_scale = torch.ones(keys, 1, device=device)
        far_scale[-300:] = scale
    k = torch.zeros(keys, 128, dtype=dtype, device=device)
    k[-300:] = few
    start[0], end[0] = 0, 300
    expected = reference.mqa_logits(q.double(), few.double(), weights, start, end, scale)
    first, final = start + keys - 300, end + keys - 300
    with poisoned():
        compact = mqa_logits(q, k, weights, first, final, far_scale, clean=False, width=300)
    for t, (low, high) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        assert_close(compact[t, : max(high - low, 0)], expected[t, low : max(low, high)])
    first[0] = 0
    with poisoned():
        found = mqa_logits(q, k, weights, first, final, far_scale)
    assert_close(found[:, -300:], expected)
    for t, row in enumerate(found[:, :-300]):
        assert torch.all(row == (float("-inf") if t else 0.0)), t


def choose_of_far_rows(device, rows, width, k, whole):
    """Rows at the beginning, at both sides of 2**31 elements, and at the end."""
    from glm5lab.attention.topk import top_k

    torch.manual_seed(0)
    logits = torch.randn(rows, width, device=device)
    end = torch.randint(width // 2, width + 1, (rows,), device=device)
    with poisoned():
        chosen = top_k(logits, k, None, end, cuts(k, width)[whole])
    assert torch.all(chosen >= 0)
    assert torch.all(chosen[:, 1:] > chosen[:, :-1])
    middle = min(2**31 // width, rows - 1)
    for t in sorted({0, 1, middle - 1, middle, rows - 2, rows - 1}):
        at = slice(t, t + 1)
        assert torch.equal(chosen[at], reference.top_k(logits[at], k, None, end[at])), t


def choose_of_a_wide_row(device, width, k, whole):
    """One row, of as many columns as there may be."""
    from glm5lab.attention.topk import top_k

    torch.manual_seed(0)
    logits = torch.randn(1, width, device=device)
    # The k greatest of the k greatest of 64 parts; many columns have the value of the last.
    some = torch.topk(logits.view(64, -1), k).values
    least = torch.topk(some.flatten(), k).values[-1]
    above = (logits[0] > least).nonzero()[:, 0]
    equal = (logits[0] == least).nonzero()[: k - len(above), 0]
    expected = torch.cat([above, equal]).sort().values
    with poisoned():
        chosen = top_k(logits, k, cut=cuts(k, width)[whole])
    assert torch.equal(chosen[0].long(), expected)


def attend_of_many(device, dtype, heads, fp8, times):
    """Eight tokens again and again: the first as the reference, the others to the bit as they."""
    from glm5lab.attention.sparse_mla import sparse_mla

    made = make_attention(dtype, 8, heads, 64, 16, 16, fp8=fp8)
    q, kv, indices, lengths = (x.to(device) for x in made)
    exact = kv if fp8 else kv.double()
    expected, expected_lse = reference.sparse_mla(q.double(), exact, indices, 0.06, lengths)
    many = q.repeat(times, 1, 1), kv, indices.repeat(times, 1), 0.06, lengths.repeat(times)
    with poisoned():
        out, lse = sparse_mla(*many)
    error = (out[:8].double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[torch.float16 if fp8 else dtype], float(error)
    torch.testing.assert_close(lse[:8].double(), expected_lse, rtol=0, atol=LSE_TOLERANCE)
    for found in (out, lse):
        repeated = found.view(times, -1)
        for some in repeated.split(4096):
            assert torch.all(some == repeated[0])


def gather_many(device, fp8, times):
    """Eight rows of a cache again and again."""
    from glm5lab.attention import kv_cache

    rows, dtype = (656, torch.uint8) if fp8 else (576, torch.float16)
    cache = torch.zeros(8, rows, dtype=dtype, device=device)
    slots = torch.arange(8, device=device)
    gen = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(8, n, generator=gen).half().to(device) for n in (512, 64))
    row_formats.store_rows(cache, slots, latent, rope)
    with poisoned():
        found = kv_cache.gather(cache, slots.repeat(times), torch.float16).view(times, -1)
    assert torch.equal(found[0], row_formats.gather(cache, slots, torch.float16).flatten())
    for some in found.split(4096):
        assert torch.all(some == found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 64])
def test_attention_of_queries_beyond_4_gb(heads, fp8):
    attend_of_many("cuda", BF16, heads, fp8, 544_000 // heads)  # 2.5e9 elements of queries


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["fp16", "fp8"])
def test_gathered_rows_beyond_4_gb(fp8):
    gather_many("cuda", fp8, 500_000)


@pytest.mark.gpu
def test_index_keys_beyond_4_gb_are_stored():
    store_far_index_keys("cuda", 600_000)


@pytest.mark.gpu
@DTYPES
def test_pages_beyond_4_gb_are_scored(dtype):
    score_far_pages("cuda", dtype, 600_000)


@pytest.mark.gpu
@DTYPES
def test_keys_and_logits_beyond_4_gb(dtype):
    # fp8: 2.4 * 2**30 logits; bfloat16: 2.56 * 2**30 elements of keys.
    score_far_keys("cuda", dtype, 60, 40_000_000 if dtype == FP8 else 20_000_000)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
def test_top_k_of_logits_beyond_4_gb(whole):
    choose_of_far_rows("cuda", 2200, 2**20, 2048, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
def test_top_k_of_the_widest_row(whole):
    from glm5lab.attention.topk import MAX_WIDTH

    choose_of_a_wide_row("cuda", MAX_WIDTH, 2048, whole)


def test_the_comparisons_hold_at_small_sizes_in_the_interpreter():
    run_interpreted(
        "import test_large as t;"
        "t.attend_of_many('cpu', t.torch.float16, 8, True, 2);"
        "t.gather_many('cpu', True, 2);"
        "t.store_far_index_keys('cpu', 3);"
        "t.score_far_pages('cpu', t.FP8, 9);"
        "t.score_far_keys('cpu', t.FP8, 9, 700);"
        "t.choose_of_far_rows('cpu', 2, 3000, 16, False);"
        "t.choose_of_a_wide_row('cpu', 3200, 16, True)"
    )

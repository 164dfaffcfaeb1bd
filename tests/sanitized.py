"""Every kernel once on tiny inputs: run under compute-sanitizer by test_sanitizer.py."""

from unittest.mock import patch

import test_indexer_kernels
import test_shared_rows
import test_sparse_mla
import torch
from test_kv_cache import make_cache, make_rows

from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.kv_cache import gather, store_index_keys, store_rows
from glm5lab.attention.shared_rows import sparse_mla_shared
from glm5lab.attention.sparse_mla import sparse_mla
from glm5lab.attention.topk import top_k
from glm5lab.kernel_bench.top_k_cases import make_rows as top_k_rows

BF16 = torch.bfloat16


def on_gpu(tensors):
    """The tensors, those that are there, on the GPU."""
    return [None if x is None else x.cuda() for x in tensors]


def looked_up():
    """Places in two requests, one beyond their pages, and pages of which one is nobody's."""
    places = torch.arange(5 * 200, dtype=torch.int32, device="cuda").view(5, 200) % 48
    places[:, 7], places[:, 9] = 100_000, -1
    table = torch.tensor([[1, 5, 2], [3, 900, 4]], dtype=torch.int32, device="cuda")
    return places, table, torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32, device="cuda")


def attention():
    """Whole and split lists, both row formats, few and many heads, shared rows."""
    sizes = [(2, 8, 64, 200, 16), (9, 64, 0, 90, 7), (17, 64, 64, 90, 7), (130, 8, 64, 3, 0)]
    made = [test_sparse_mla.make_case(BF16, *size) for size in sizes]
    made += [
        test_sparse_mla.make_case(BF16, 2, heads, 64, 200, 16, fp8=True) for heads in (8, 16, 64)
    ]
    for case in made:
        q, kv, indices, lengths = on_gpu(case)
        sparse_mla(q, kv, indices, 0.06, lengths)
    places, table, requests = looked_up()
    q, kv = (x.cuda() for x in test_sparse_mla.make_case(BF16, 5, 8, 64, 200, 16)[:2])
    sparse_mla(q, kv, places, 0.06, table=(table, requests))
    case = test_shared_rows.make_neighbours(BF16, 9, 8, 64, 40, 16, 0.8)
    q, kv, indices, lengths = on_gpu(case)
    sparse_mla_shared(q, kv, indices, 0.06, lengths)
    with patch("glm5lab.attention.shared_rows.fits_hopper", return_value=False):
        sparse_mla_shared(q, kv, indices, 0.06, lengths)


def indexer():
    """Logits over keys in a row and in pages, and top-k of short and split rows."""
    for dtype in (test_indexer_kernels.FP8, BF16):
        q, k, weights, start, end, scale = on_gpu(
            test_indexer_kernels.make_case(dtype, 5, 32, 128, 300)
        )
        mqa_logits(q, k, weights, start, end, scale)
        case = test_indexer_kernels.make_paged_case(dtype, 2, 2, 32, 128, 64, 300)
        q, cache, weights, lens, table = on_gpu(case)
        paged_mqa_logits(q, cache, weights, lens, table, 300)
    for rows, width, k in ((3, 500, 64), (2, 20_000, 100), (1, 5000, 2048)):
        logits = top_k_rows("normal", rows, width, "cuda")
        end = torch.full((rows,), width - 7, dtype=torch.int32, device="cuda")
        top_k(logits, k, None, end)
        top_k(logits, k, torch.full_like(end, 3), end)
    # More reach a level than a list holds, and the list is folded.
    top_k(top_k_rows("equal", 2, 20_000, "cuda"), 100)
    top_k(top_k_rows("one bin", 2, 20_000, "cuda"), 2048)


def rows():
    """Stores and gathers of both formats, and index keys."""
    slots, latent, rope = make_rows(21, BF16, device="cuda")
    for width, dtype in ((576, BF16), (656, torch.uint8)):
        cache = make_cache(21, 16, width, dtype, device="cuda")
        store_rows(cache, slots, latent, rope)
        gather(cache, slots)
    keys = torch.randn(21, 128, device="cuda").to(BF16)
    store_index_keys(make_cache(21, 16, 132, torch.uint8, device="cuda"), slots, keys)


if __name__ == "__main__":
    attention()
    indexer()
    rows()
    torch.cuda.synchronize()
    print("every kernel ran")

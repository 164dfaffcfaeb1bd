"""Every kernel once, and every switch of it, on tiny inputs; run by test_sanitizer.py.

There under compute-sanitizer on a GPU, and with launches recorded in place of made, which tells
that no kernel is left out.
"""

from dataclasses import replace
from unittest.mock import patch

import test_indexer_kernels
import test_shared_rows
import test_sparse_mla
import test_topk
import torch
from test_kv_cache import make_cache, make_rows

from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.kv_cache import gather, store_index_keys, store_rows
from glm5lab.attention.shared_rows import sparse_mla_shared
from glm5lab.attention.sparse_mla import sparse_mla
from glm5lab.attention.tiles import INTERPRETER
from glm5lab.attention.topk import ROWS_AT_ONCE, Cut, choose_cut, top_k
from glm5lab.kernel_bench.top_k_cases import make_rows as top_k_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def on(device, tensors):
    """The tensors, those that are there, on a device."""
    return [None if x is None else x.to(device) for x in tensors]


def looked_up(device):
    """Places in two requests, one beyond their pages, and pages of which one is nobody's."""
    places = torch.arange(5 * 200, dtype=torch.int32, device=device).view(5, 200) % 48
    places[:, 7], places[:, 9] = 100_000, -1
    table = torch.tensor([[1, 5, 2], [3, 900, 4]], dtype=torch.int32, device=device)
    return places, table, torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32, device=device)


def attention(device):
    """Whole and split lists, both row formats, few and many heads, shared rows."""
    sizes = [(2, 8, 64, 200, 16), (9, 64, 0, 90, 7), (17, 64, 64, 90, 7), (130, 8, 64, 3, 0)]
    sizes += [(64, 8, 64, 90, 7)]  # three programs a multiprocessor
    # 16, 32 and 64 parts; 16 heads; 64 of a token alone, whose list is split.
    sizes += [(1, 8, 64, top_k, 16) for top_k in (512, 1024, 2048)]
    sizes += [(2, 16, 0, 40, 16), (1, 64, 0, 200, 16)]
    made = [test_sparse_mla.make_case(BF16, *size) for size in sizes]
    sizes = [(2, heads, 64, top_k, 16) for heads in (8, 16, 64) for top_k in (20, 200)]
    # Hopper has no form of its own for float16 beside fp8_ds_mla rows.
    for dtype in (BF16, FP16):
        made += [test_sparse_mla.make_case(dtype, *size, fp8=True) for size in sizes]
    made.append(test_sparse_mla.make_case(FP16, 2, 8, 64, 200, 0, fp8=True))
    made += [test_sparse_mla.make_case(FP32, 2, 8, 64, top_k, 16) for top_k in (10, 90)]
    for case in made:
        q, kv, indices, lengths = on(device, case)
        sparse_mla(q, kv, indices, 0.06, lengths)
    places, table, requests = looked_up(device)
    q, kv = on(device, test_sparse_mla.make_case(BF16, 5, 8, 64, 200, 16)[:2])
    for some in (places, places[:, :20]):  # split, and one part
        sparse_mla(q, kv, some, 0.06, table=(table, requests))
    for dtype, rope, page_size in ((BF16, 64, 16), (BF16, 0, 16), (BF16, 64, 0), (FP32, 64, 16)):
        case = test_shared_rows.make_neighbours(dtype, 9, 8, rope, 40, page_size, 0.8)
        q, kv, indices, lengths = on(device, case)
        sparse_mla_shared(q, kv, indices, 0.06, lengths)
        with patch("glm5lab.attention.shared_rows.fits_hopper", return_value=False):
            sparse_mla_shared(q, kv, indices, 0.06, lengths)


def indexer(device):
    """Logits over keys in a row and in pages, in columns of the keys and of each token's own."""
    for dtype in (test_indexer_kernels.FP8, BF16, FP32):
        q, k, weights, start, end, scale = on(
            device, test_indexer_kernels.make_case(dtype, 5, 32, 128, 300)
        )
        mqa_logits(q, k, weights, start, end, scale)
        for width in (310, 60):  # longer and shorter than what is to be written
            mqa_logits(q, k, weights, start, end, scale, clean=False, width=width)
        case = test_indexer_kernels.make_paged_case(dtype, 2, 2, 32, 128, 64, 300)
        q, cache, weights, lens, table = on(device, case)
        paged_mqa_logits(q, cache, weights, lens, table, 300)


def choices(device):
    """Top-k of short rows, of split ones, and of whole rows a program."""
    for rows, width, k in ((3, 500, 64), (2, 20_000, 100), (1, 5000, 2048)):
        logits = top_k_rows("normal", rows, width, device)
        end = torch.full((rows,), width - 7, dtype=torch.int32, device=device)
        top_k(logits, k, None, end)
        top_k(logits, k, torch.full_like(end, 3), end)
    many = choose_cut(100, 20_000, ROWS_AT_ONCE, INTERPRETER)
    assert many.whole
    end = torch.tensor([20_000, 19_993], dtype=torch.int32, device=device)
    for cut in (many, replace(many, whole=False)):
        # Of equal rows more reach a level than a list holds, and the list is folded.
        for kind in ("normal", "equal", "one bin"):
            logits = top_k_rows(kind, 2, 20_000, device)
            top_k(logits, 100, None, end, cut)
            top_k(logits, 100, torch.full_like(end, 3), end, cut)
    # A sample of which one is to reach the level misleads; the second try finds a list.
    misled = Cut(1024, 256, -1000, whole=True)
    top_k(top_k_rows("normal", 1, 1500, device), 50, cut=misled)
    # No try finds one, and the row is folded.
    top_k(test_topk.great_where_not_sampled(1500, misled).to(device), 50, cut=misled)


def rows(device):
    """Stores and gathers of both formats, and index keys."""
    slots, latent, rope = make_rows(21, BF16, device=device)
    for width, dtype in ((576, BF16), (656, torch.uint8)):
        cache = make_cache(21, 16, width, dtype, device=device)
        store_rows(cache, slots, latent, rope)
        for by in (slots, slots.int()):
            gather(cache, by)
            gather(cache, by, torch.float32)
    store_rows(make_cache(21, 16, 512, BF16, device=device), slots, latent)
    keys = torch.randn(21, 128, device=device).to(BF16)
    store_index_keys(make_cache(21, 16, 132, torch.uint8, device=device), slots, keys)


def everything(device):
    """All of the above."""
    for part in (attention, indexer, choices, rows):
        part(device)


if __name__ == "__main__":
    everything("cuda")
    torch.cuda.synchronize()
    print("every kernel ran")

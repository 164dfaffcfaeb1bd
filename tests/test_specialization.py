"""Layer 3: other tokens, lengths, caches and pages compile nothing new. No GPU is needed."""

import pytest
import torch
from specialized import forms_on, new_forms
from test_kv_cache import make_cache, make_rows
from test_shared_rows import make_neighbours
from test_sparse_mla import in_parts, make_case

from glm5lab.attention import kv_cache, shared_rows, sparse_mla
from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.topk import top_k

BF16 = torch.bfloat16


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 64])
def test_sparse_mla(capability, fp8, heads):

    def run(tokens, top_k, rows, page_size=0, form_of_q=lambda q: q):
        q, kv, indices, lengths = make_case(
            BF16, tokens, heads, 64, top_k, page_size, rows=rows, fp8=fp8
        )
        sparse_mla.sparse_mla(form_of_q(q), kv, indices, 0.06, lengths)

    # Tokens: every tile, every capacity of the merge, and no parts.
    every_tile = (1, 2, 4, 8, 12, 20, 40, 64, 130, 300)
    with forms_on(capability) as forms:
        assert new_forms(forms, run, 1, 2048, 96)
        for tokens in every_tile:
            run(tokens, 2048, 96)
        others = [(2, 2048, 300), (3, 512, 96), (17, 2047, 97), (50, 1024, 3000)]
        others += [(280, 2048, 300), (99, 2048, 300)]
        for case in others:
            assert new_forms(forms, run, *case) == {}, case
        for tokens in every_tile:
            run(tokens, 2048, 300, 16)
        for page_size in (1, 7, 64):
            assert new_forms(forms, run, 40, 2048, 300, page_size) == {}, page_size
        for tokens in every_tile:
            assert new_forms(forms, run, tokens, 2048, 300, 16, in_parts) == {}, tokens


def test_pages_looked_up():
    def run(tokens, pages, first=0):
        q, kv, indices, lengths = make_case(BF16, tokens, 8, 64, 2048, 16)
        requests = torch.zeros(tokens + first, dtype=torch.int32)[first:]
        table = (torch.zeros(3, pages, dtype=torch.int32), requests)
        sparse_mla.sparse_mla(q, kv, indices, 0.06, lengths, table=table)

    with forms_on(90) as forms:
        for tokens in (1, 4, 8, 12, 40, 64, 130, 300):
            run(tokens, 16)
        for case in ((2, 16), (17, 16), (33, 1), (50, 5), (200, 2048), (9, 16, 1), (99, 16)):
            assert new_forms(forms, run, *case) == {}, case


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_cache_of_more_than_2_to_the_31_elements(fp8):
    def run(rows):
        width, dtype = (656, torch.uint8) if fp8 else (576, BF16)
        cache = torch.empty(rows, width, dtype=dtype, device="meta")
        sparse_mla.sparse_mla(
            torch.empty(2, 8, 576, dtype=BF16, device="meta"),
            cache,
            torch.empty(2, 64, dtype=torch.int32, device="meta"),
            0.06,
        )

    with forms_on(90) as forms:
        assert new_forms(forms, run, 4096)
        assert new_forms(forms, run, 4_000_000) == {}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_stores_and_gathers(fp8):
    def run(tokens, page_size):
        slots, latent, rope = make_rows(tokens, BF16)
        cache = make_cache(tokens, page_size, 656 if fp8 else 576, torch.uint8 if fp8 else BF16)
        kv_cache.store_rows(cache, slots, latent, rope)
        kv_cache.gather(cache, slots)

    with forms_on(90) as forms:
        assert len(new_forms(forms, run, 16, 15)) == 2
        for tokens, page_size in ((1, 15), (100, 16), (30, 64), (5, 1), (7, 0)):
            assert new_forms(forms, run, tokens, page_size) == {}, page_size


@pytest.mark.parametrize("capability", [90, 120])
def test_shared_rows(capability):
    def run(tokens, top_k, rows, first=0):
        q, kv, indices, lengths = make_neighbours(BF16, tokens, 8, 64, top_k, 0, 0.8, rows)
        lengths = torch.cat([lengths[:1].expand(first), lengths])[first:]
        shared_rows.sparse_mla_shared(q, kv, indices, 0.06, lengths)

    with forms_on(capability) as forms:
        assert len(new_forms(forms, run, 9, 64, 160)) == 2
        for case in ((1, 64, 160), (16, 17, 97), (40, 200, 3000), (9, 64, 160, 1)):
            assert new_forms(forms, run, *case) == {}, case


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, BF16], ids=str)
def test_logits_of_a_prompt(capability, dtype):
    def run(tokens, keys, first=0):
        q, k = (torch.zeros(*shape, 128).to(dtype) for shape in ((tokens, 32), (keys,)))
        bound = torch.zeros(tokens + first, dtype=torch.int32)[first:]
        scale = torch.ones(keys) if dtype.itemsize == 1 else None
        weights = torch.zeros(tokens, 32)
        mqa_logits(q, k, weights, bound, bound, scale, clean=False, width=keys)

    with forms_on(capability) as forms:
        for tokens in (1, 2, 4, 8):  # capacities of a block
            run(tokens, 256)
        assert sum(map(len, forms.values())) <= 4
        for case in ((5, 300), (77, 4097), (1000, 1), (3, 33), (8, 256, 1), (7, 512, 3)):
            assert new_forms(forms, run, *case) == {}, case


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, BF16], ids=str)
def test_logits_of_decoding(dtype):
    def run(requests, queries, longest, first=0):
        fp8 = dtype.itemsize == 1
        cache = torch.zeros(20, 64, 132, dtype=torch.uint8) if fp8 else torch.zeros(20, 64, 128)
        q = torch.zeros(requests, queries, 32, 128).to(dtype)
        lens = torch.ones(requests + first, queries, dtype=torch.int32)[first:]
        table = torch.zeros(requests, -(-longest // 64), dtype=torch.int32)
        cache = cache if fp8 else cache.to(dtype)
        paged_mqa_logits(q, cache, torch.zeros(requests * queries, 32), lens, table, longest)

    with forms_on(90) as forms:
        for queries in (1, 2, 4):
            run(1, queries, 300)
        for case in ((2, 1, 1000), (64, 1, 131072), (3, 3, 77), (1, 1, 1), (8, 2, 640, 1)):
            assert new_forms(forms, run, *case) == {}, case


def test_top_k():
    def run(rows, width, first=0):
        logits = torch.empty(rows, width)
        end = torch.zeros(rows + first, dtype=torch.int32)[first:]
        top_k(logits, 2048, None, end)

    with forms_on(90) as forms:
        for width in (3000, 131_072, 262_144, 1 << 20):  # short rows, and the samples
            run(1, width)
        cases = (
            (7, 8191),
            (4, 8193),
            (5, 131_073),
            (3, 262_145),
            (2, 500_001),
            (1, 1),
            (5, 9000, 1),
        )
        for case in cases:
            assert new_forms(forms, run, *case) == {}, case


def test_slices_of_lengths_and_slots():
    def sparse(first):
        q, kv, indices, lengths = make_case(BF16, 41, 8, 64, 64, 16)
        sparse_mla.sparse_mla(q[:40], kv, indices[:40], 0.06, lengths[first : first + 40])

    def store(first):
        slots, latent, rope = make_rows(21, BF16)
        cache = make_cache(21, 16, 656, torch.uint8)
        kv_cache.store_rows(cache, slots[first : first + 20], latent, rope)
        kv_cache.gather(cache, slots[first : first + 20])

    with forms_on(90) as forms:
        for run in (sparse, store):
            assert new_forms(forms, run, 0)
            assert new_forms(forms, run, 1) == {}

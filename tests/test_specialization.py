"""Layer 3: other tokens, lengths, caches and pages compile nothing new. No GPU is needed."""

import pytest
import torch
from specialized import forms_on, new_forms
from test_kv_cache import make_cache, make_rows
from test_sparse_mla import make_case

from glm5lab.attention import kv_cache, sparse_mla

BF16 = torch.bfloat16


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8 on Hopper"])
@pytest.mark.parametrize("heads", [8, 64])
def test_sparse_mla(form, heads, monkeypatch):
    fp8 = form != "bf16"
    monkeypatch.setattr(sparse_mla, "HOPPER_FP8", form == "fp8 on Hopper")

    def run(tokens, top_k, rows, page_size=0):
        q, kv, indices, lengths = make_case(
            BF16, tokens, heads, 64, top_k, page_size, rows=rows, fp8=fp8
        )
        sparse_mla.sparse_mla(q, kv, indices, 0.06, lengths)

    every_tile = (1, 8, 20, 40, 130)  # tokens, with and without parts
    with forms_on(90) as forms:
        assert new_forms(forms, run, 1, 2048, 96)
        for tokens in every_tile:
            run(tokens, 2048, 96)
        for case in ((2, 2048, 300), (3, 512, 96), (17, 2047, 97), (50, 1024, 3000)):
            assert new_forms(forms, run, *case) == {}, case
        for tokens in every_tile:
            run(tokens, 2048, 300, 16)
        for page_size in (1, 7, 64):
            assert new_forms(forms, run, 40, 2048, 300, page_size) == {}, page_size


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

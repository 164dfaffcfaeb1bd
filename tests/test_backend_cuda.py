"""Layer 4: what the CUDA backend hands to the kernel, in Triton's interpreter, and what it refuses.

vLLM's part of the call (slots, counts, caches with gaps between pages) is made up here.
"""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import run_interpreted

from glm5lab.attention import reference

TOKENS, HEADS, LATENT, TOP_K, PAGE = 3, 8, 512, 32, 16


def make_impl(rope, fp8, returns_lse=True):
    """An impl without vLLM's constructor, which wants an engine's configuration."""
    from glm5lab.vllm_plugin.backend_cuda import TritonMLASparseImpl

    impl: Any = object.__new__(TritonMLASparseImpl)
    impl.kv_lora_rank, impl.qk_rope_head_dim, impl.scale = LATENT, rope, 0.06
    impl.need_to_return_lse_for_decode = returns_lse
    impl.pads_query = fp8 and rope == 0
    impl.looks_up_pages, impl.dcp_world_size = not fp8, 1
    return impl


def make_cache(width, fp8, gap, gen):
    """Pages [6, PAGE, row], `gap` rows apart."""
    pages = 6
    latent = torch.randn(pages * (PAGE + gap), LATENT, generator=gen)
    rope = torch.randn(len(latent), 64, generator=gen) * (width > LATENT)
    if fp8:
        rows = reference.pack_fp8_rows(latent, rope)
    else:
        rows = torch.cat([latent, rope], 1)[:, :width].contiguous()
    return rows.view(pages, PAGE + gap, -1)[:, :PAGE]


def make_call(rope, fp8, gap, device="cpu", dtype=torch.float32):
    """What vLLM hands over: query parts, cache, slots, counts; and the pages of the slots."""
    gen = torch.Generator().manual_seed(1)
    cache = make_cache(LATENT + (64 if fp8 else rope), fp8, gap, gen)
    whole = cache.as_strided((6, PAGE + gap, cache.shape[2]), cache.stride())
    cache = whole.to(device, torch.uint8 if fp8 else dtype)[:, :PAGE]  # pages apart stay apart
    counts = torch.tensor([TOP_K, 5, 0], dtype=torch.int32)
    page = torch.randint(0, 6, (TOKENS, TOP_K), generator=gen)
    slots = (page * (PAGE + gap) + torch.randint(0, PAGE, page.shape, generator=gen)).int()
    slots[torch.arange(TOP_K) >= counts[:, None]] = -1
    nope = torch.randn(HEADS, TOKENS, LATENT, generator=gen).to(device, dtype).transpose(0, 1)
    q = (nope, torch.randn(TOKENS, HEADS, rope, generator=gen).to(device, dtype))
    return q, cache, slots.to(device), counts.to(device), page.to(device)


def attend(rope, fp8, gap, device="cpu", dtype=torch.float32):
    """The impl's result and the reference's agree; slots count rows of the whole allocation."""
    impl = make_impl(rope, fp8)
    q, cache, slots, counts, page = make_call(rope, fp8, gap, device, dtype)
    stride = cache.stride(0) // cache.shape[2]
    out, lse = impl._forward_mqa_kernel(
        q, cache, slots, counts, layer=None, block_size=PAGE, is_decode=True
    )
    whole = torch.cat(q, -1).double()
    if impl.pads_query:
        whole = torch.nn.functional.pad(whole, (0, 64))
    rows = cache.as_strided((5 * stride + PAGE, cache.shape[2]), (cache.shape[2], 1))
    rows = rows if fp8 else rows.double()
    expected, expected_lse = reference.sparse_mla(whole, rows, slots, impl.scale, lengths=counts)
    assert out.shape == (TOKENS, HEADS, LATENT)
    assert out.is_contiguous()
    assert (out - expected).norm() <= 3e-3 * expected.norm()
    assert torch.all(out[2] == 0)
    assert torch.all(lse[2] == float("-inf"))
    torch.testing.assert_close(lse[:2].double(), expected_lse[:2], rtol=1e-3, atol=1e-3)
    whole_q = torch.cat(q, -1)
    again, nothing = make_impl(rope, fp8, returns_lse=False)._forward_mqa_kernel(
        whole_q, cache, slots, counts, layer=None, block_size=PAGE, is_decode=False
    )
    assert nothing is None
    torch.testing.assert_close(again, out)
    if not fp8:
        look_up(make_impl(rope, fp8), q, cache, page, slots, out)


def look_up(impl, q, cache, page, slots, expected):
    """The same rows by their places in requests, each of which has the pages in another order."""
    device = page.device
    order = torch.stack([torch.arange(6, device=device).roll(n) for n in range(TOKENS)])
    at = torch.stack([torch.argsort(row)[p] for row, p in zip(order, page, strict=True)])
    offset = slots % (cache.stride(0) // cache.shape[2])
    impl._indexer, impl._topk_indices_buffer = None, (at * PAGE + offset).int()
    impl._topk_indices_buffer[slots < 0] = -1
    requests = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    table = torch.empty(3, 6, dtype=torch.int32, device=device)
    table[requests.long()] = order.int()
    metadata = SimpleNamespace(block_table=table, req_id_per_token=requests)
    out, _ = impl.forward_mqa(q, cache, metadata, None)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8_ds_mla"])
def test_the_impl_attends_to_the_rows_of_its_slots(fp8):
    """Rows of 576 and 512, pages next to each other and with rows of other layers in between."""
    calls = (f"t.attend({rope}, {fp8}, {gap})" for rope in (64, 0) for gap in (0, 4))
    run_interpreted("import test_backend_cuda as t; " + "; ".join(calls))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("rope", [64, 0], ids=["576", "512"])
@pytest.mark.parametrize("gap", [0, 4])
def test_the_impl_attends_on_the_gpu(rope, fp8, gap):
    """GLM-5's geometry and GLM-5.3-Flash's, which has no rotary part."""
    attend(rope, fp8, gap, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rope", [64, 0], ids=["576", "512"])
def test_the_impl_attends_as_vllms_own_on_hopper(rope):
    native = pytest.importorskip("vllm.v1.attention.backends.mla.flashattn_mla_sparse")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("vLLM has no sparse MLA over bfloat16 rows here")
    q, cache, slots, counts, _ = make_call(rope, False, 0, "cuda", torch.bfloat16)
    theirs: Any = object.__new__(native.FlashAttnMLASparseImpl)
    theirs.kv_lora_rank, theirs.qk_rope_head_dim, theirs.scale = LATENT, rope, 0.06
    theirs.cu_seqlens_q_buffer = torch.arange(9, dtype=torch.int32, device="cuda")
    found = [
        impl._forward_mqa_kernel(
            q, cache, slots, counts, layer=None, block_size=PAGE, is_decode=True
        )[0][:2]
        for impl in (theirs, make_impl(rope, False))
    ]
    assert (found[0] - found[1]).float().norm() <= 6e-3 * found[0].float().norm()


def test_short_prompts_attend_densely_where_vllm_can_read_the_rows():
    code = """
import torch
from glm5lab.vllm_plugin.backend_cuda import reads_rows_back
print([reads_rows_back(*case) for case in (
    ("auto", 64, torch.float16), ("bfloat16", 0, torch.bfloat16),
    ("fp8_ds_mla", 64, torch.bfloat16), ("fp8_ds_mla", 0, torch.bfloat16),
    ("fp8_ds_mla", 64, torch.float16))])
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert child.stdout.splitlines()[-1] == "[True, True, True, False, False]"

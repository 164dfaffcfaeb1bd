"""Layer 3: what kernels refuse before they launch, and where they launch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import run_interpreted
from test_sparse_mla import TOLERANCE

from glm5lab.attention import arguments, kv_cache, reference
from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.shared_rows import sparse_mla_shared
from glm5lab.attention.sparse_mla import sparse_mla
from glm5lab.attention.topk import top_k

Q, KV = torch.zeros(2, 4, 576), torch.zeros(9, 576)
SLOTS, INDICES = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)
ONES = torch.ones(1, dtype=torch.int32)
PAGES, TABLE = torch.zeros(2, 4, 32), torch.zeros(1, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("q", lambda: sparse_mla(Q, KV, INDICES, 1.0)),
        ("q", lambda: sparse_mla_shared(Q, KV, INDICES, 1.0)),
        ("logits", lambda: top_k(torch.zeros(2, 9), 3)),
        ("q", lambda: mqa_logits(torch.zeros(1, 4, 32), torch.zeros(5, 32), torch.zeros(1, 4))),
        (
            "q",
            lambda: paged_mqa_logits(
                torch.zeros(1, 1, 4, 32), PAGES, torch.zeros(1, 4), ONES, TABLE, 4
            ),
        ),
        ("cache", lambda: kv_cache.store_rows(KV, SLOTS, Q[:, 0, :512], Q[:, 0, 512:])),
        ("cache", lambda: kv_cache.gather(KV, SLOTS)),
        (
            "cache",
            lambda: kv_cache.store_index_keys(
                torch.zeros(1, 4, 36, dtype=torch.uint8), SLOTS, torch.zeros(2, 32)
            ),
        ),
    ],
)
def test_a_cpu_tensor_is_refused(name, call):
    with pytest.raises(ValueError, match=f"{name}: expected a CUDA tensor .*, got one on cpu"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_k(torch.zeros(2, 9).double(), 3), "logits: expected float32"),
        (lambda: top_k(torch.zeros(2, 9), 9000), "k: expected at most 8192"),
        (lambda: sparse_mla(Q.double(), KV.double(), INDICES, 1.0), "q: expected float32, bf"),
        (lambda: sparse_mla(Q, KV.half(), INDICES, 1.0), "kv: expected torch.float32"),
        (lambda: sparse_mla(Q, KV, INDICES, 1.0, d_v=448), "d_v: expected at most 512 columns"),
        (lambda: sparse_mla(Q, KV, INDICES, 1.0, SLOTS.float()), "lengths: expected int32"),
        (lambda: sparse_mla(Q, KV, INDICES > 0, 1.0), "indices: expected int32 or int64"),
        (lambda: sparse_mla(Q[:, :0], KV, INDICES, 1.0), "q: expected at least one head"),
        (
            lambda: mqa_logits(
                *(torch.zeros(1, 4, 32), torch.zeros(5, 32), torch.zeros(1, 4), ONES, ONES),
                clean=False,
                width=-1,
            ),
            "width: expected at least 0, got -1",
        ),
        (
            lambda: reference.paged_mqa_logits(
                torch.zeros(1, 1, 4, 32).to(torch.float8_e4m3fn),
                torch.zeros(5 * 4 * 36 + 2, dtype=torch.uint8)[2:].view(5, 4, 36),
                *(torch.zeros(1, 4), ONES, TABLE, 4),
            ),
            "cache: expected pages of fp8 keys a multiple of 4 bytes apart",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_kernels_launch_on_the_tensors_own_gpu(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device))
    for device in ("cpu", "cuda:0", "cuda:1"):
        tensor: Any = SimpleNamespace(device=torch.device(device))
        arguments.on_device_of(tensor)
    assert entered == [torch.device("cuda:1")]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    q, kv = torch.randn(2, 8, 576).bfloat16(), torch.randn(9, 576).bfloat16()
    indices = torch.arange(8, dtype=torch.int32).view(2, 4)
    expected, _ = reference.sparse_mla(q.double(), kv.double(), indices, 0.06)
    with torch.cuda.device(0):
        out, _ = sparse_mla(q.to("cuda:1"), kv.to("cuda:1"), indices.to("cuda:1"), 0.06)
        x = torch.randn(3, 20_000)
        chosen = top_k(x.to("cuda:1"), 100)
    assert (out.cpu().double() - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]
    assert torch.equal(chosen.cpu(), reference.top_k(x, 100))


def compare_wide_bounds(device):
    """Bounds beyond int32: all there is, or nothing."""
    x = torch.arange(5.0, device=device)[None]
    given = torch.ones(1, 4, 32), torch.ones(5, 32), torch.ones(1, 4)
    q, k, weights = (y.to(device) for y in given)
    cache = torch.ones(3, 4, 32, device=device)
    table = torch.tensor([[2, 1]], device=device, dtype=torch.int32)
    for value in (2**32, 2**32 + 3, -(2**32) + 2, 2**63 - 1):
        end = torch.tensor([value], device=device)
        for low, high in ((None, end), (end, None)):
            assert torch.equal(top_k(x, 2, low, high), reference.top_k(x, 2, low, high))
            expected = reference.mqa_logits(q, k, weights, low, high)
            assert torch.equal(mqa_logits(q, k, weights, low, high), expected)
        expected = reference.paged_mqa_logits(q[None], cache, weights, end, table, 7)
        assert torch.equal(paged_mqa_logits(q[None], cache, weights, end, table, 7), expected)


def compare_short_rows(device):
    """A compact row ends at its width, though the bounds go on."""
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 32, generator=gen), torch.randn(9, 32, generator=gen)
    q, k, weights = q.to(device), k.to(device), torch.ones(2, 4, device=device)
    start = torch.zeros(2, dtype=torch.int32, device=device)
    end = torch.tensor([9, 5], dtype=torch.int32, device=device)
    got = mqa_logits(q, k, weights, start, end, clean=False, width=5)
    torch.testing.assert_close(got, reference.mqa_logits(q, k, weights)[:, :5])


def compare_heads_far_apart(device):
    """Queries that lie head by head, 2**31 elements from the first to the last."""
    stride = 2**25
    room = torch.empty(64 * stride + 576, dtype=torch.float16, device=device)
    q = room.as_strided((1, 65, 576), (576, stride, 1))
    gen = torch.Generator().manual_seed(0)
    q.copy_(torch.randn(1, 65, 576, generator=gen))
    kv = torch.randn(20, 576, generator=gen).half().to(device)
    indices = torch.arange(20, dtype=torch.int32, device=device)[None]
    expected, _ = reference.sparse_mla(q.contiguous().double(), kv.double(), indices, 0.06)
    for attend in (sparse_mla, sparse_mla_shared):
        got, _ = attend(q, kv, indices, 0.06)
        error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < TOLERANCE[torch.float16]


def compare_all(device):
    compare_wide_bounds(device)
    compare_short_rows(device)
    compare_heads_far_apart(device)


def test_bounds_and_strides_in_the_interpreter():
    run_interpreted("import test_kernel_arguments as t; t.compare_all('cpu')")


@pytest.mark.gpu
def test_bounds_and_strides_on_the_gpu():
    compare_all("cuda")

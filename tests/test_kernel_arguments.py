"""Layer 3: what kernels refuse before they launch, and where they launch."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import run_interpreted
from test_sparse_mla import TOLERANCE

from glm5lab.attention import (
    arguments,
    implementation,
    index_store_implementation,
    kv_cache,
    reference,
    store_implementation,
)
from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.shared_rows import sparse_mla_shared
from glm5lab.attention.sparse_mla import sparse_mla
from glm5lab.attention.topk import top_k

Q, KV = torch.zeros(2, 4, 576), torch.zeros(9, 576)
SLOTS, INDICES = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)
ONES = torch.ones(1, dtype=torch.int32)
INDEX_Q, WEIGHTS = torch.zeros(2, 4, 32), torch.zeros(2, 4)
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


def refuses(call, given, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**given | change)


BOUNDS = [
    ({name: bound}, f"{name}: expected {text}")
    for name in ("start", "end")
    for bound, text in (
        ([1, 2], "a tensor or None, got list [1, 2]"),
        (2, "a tensor or None, got int 2"),
        (np.array([1, 2]), "a tensor or None, got ndarray array([1, 2])"),
        (torch.ones(2, dtype=torch.bool), "integers [2], got torch.bool (2,)"),
        (torch.ones(2, dtype=torch.complex64), "integers [2], got torch.complex64 (2,)"),
    )
]


@pytest.mark.parametrize("call", [reference.sparse_mla, sparse_mla, sparse_mla_shared])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": (Q, Q, Q)},
            "q: expected a tensor or a tuple of two, got tuple (float32 (2, 4, 576) on",
        ),
        ({"q": [[1.0]]}, "q: expected a tensor or a tuple of two, got list [[1.0]]"),
        ({"q": (Q, None)}, "q: expected a tensor or a tuple of two, got tuple"),
        ({"kv": None}, "kv: expected a tensor, got NoneType"),
        ({"kv": KV.to("meta")}, "kv: expected a tensor on cpu, got meta"),
        ({"indices": [[0]]}, "indices: expected a tensor, got list [[0]]"),
        ({"indices": INDICES.to("meta")}, "indices: expected a tensor on cpu, got meta"),
        ({"lengths": SLOTS.to("meta")}, "lengths: expected a tensor on cpu, got meta"),
        ({"lengths": [1, 2]}, "lengths: expected a tensor or None, got list [1, 2]"),
        ({"lengths": np.array([1, 2])}, "lengths: expected a tensor or None, got ndarray array("),
        ({"lengths": 2}, "lengths: expected a tensor or None, got int 2"),
        ({"out": Q[..., :512].to("meta")}, "out: expected a tensor on cpu, got meta"),
        ({"out": 1}, "out: expected a tensor or None, got int 1"),
        (
            {"out": Q[:1, :, :512].expand(2, 4, 512)},
            "out: expected elements that share no memory, got shape (2, 4, 512), strides (0, 576,",
        ),
        (
            {"out": torch.zeros(4000).as_strided((2, 4, 512), (512, 512, 1))},
            "out: expected elements that share no memory",
        ),
        ({"d_v": 512.0}, "d_v: expected an integer, got float 512.0"),
        ({"scale": None}, "scale: expected a float, got NoneType"),
        ({"scale": float("nan")}, "scale: expected a finite float below 2**127, got float nan"),
        ({"scale": -float("inf")}, "scale: expected a finite float below 2**127, got float -inf"),
        ({"scale": 1e39}, "scale: expected a finite float below 2**127, got float 1e+39"),
        ({"scale": 10**5000}, "scale: expected a finite float below 2**127, got int of 16610 bits"),
        ({"scale": "1"}, "scale: expected a float, got str '1'"),
        ({"scale": torch.tensor(1.0)}, "scale: expected a float, got Tensor float32 () on cpu"),
    ],
)
def test_sparse_mla_names_what_does_not_fit(call, change, message):
    refuses(call, {"q": Q, "kv": KV, "indices": INDICES, "scale": 1.0}, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q.int()}, "bfloat16 or float16, got torch.int32"),
        ({"kv": KV.int()}, "kv: expected torch.float32 (the dtype of q) or uint8, got torch.int32"),
        ({"kv": KV.half()}, "kv: expected torch.float32 (the dtype of q) or uint8, got torch.floa"),
        (
            {"kv": KV.bfloat16()},
            "kv: expected torch.float32 (the dtype of q) or uint8, got torch.bflo",
        ),
        ({"out": Q[..., :512].half()}, "out: expected torch.float32 (the dtype of q), got"),
    ],
)
def test_the_reference_names_dtypes_that_do_not_fit(change, message):
    given = {"q": Q, "kv": KV, "indices": INDICES, "scale": 1.0}
    refuses(reference.sparse_mla, given, change, message)


@pytest.mark.parametrize("call", [reference.sparse_mla, sparse_mla])
@pytest.mark.parametrize("table", [TABLE, (TABLE,), (TABLE, [0, 0])])
def test_a_table_of_another_kind_is_named(call, table):
    given = {"q": Q, "kv": KV[None], "indices": INDICES, "scale": 1.0}
    message = f"table: expected a tuple of two tensors, got {type(table).__name__} "
    refuses(call, given, {"table": table}, message)


@pytest.mark.parametrize("call", [reference.mqa_logits, mqa_logits])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": INDEX_Q.to(torch.int8)}, "float8_e4m3fn, got torch.int8"),
        ({"q": INDEX_Q.to(torch.float8_e5m2)}, "float8_e4m3fn, got torch.float8_e5m2"),
        ({"q": INDEX_Q[:, :0], "weights": WEIGHTS[:, :0]}, "q: expected at least one head, got no"),
        ({"q": None}, "q: expected a tensor, got NoneType"),
        ({"q": INDEX_Q[..., :0], "k": PAGES[0, :, :0]}, "q: expected a width of at least 1, got 0"),
        (
            {"k": PAGES[0].to(torch.int8)},
            "k: expected float64, float32, bfloat16, float16 or float",
        ),
        ({"k": PAGES[0].to(torch.float8_e5m2)}, "float8_e4m3fn, got torch.float8_e5m2"),
        (
            {"weights": WEIGHTS.to(torch.complex64)},
            "weights: expected a floating dtype, got torch.complex64",
        ),
        ({"weights": 1.0}, "weights: expected a tensor, got float 1.0"),
        ({"k_scale": 1.0}, "k_scale: expected a tensor or None, got float 1.0"),
        *BOUNDS,
    ],
)
def test_mqa_logits_names_what_does_not_fit(call, change, message):
    refuses(call, {"q": INDEX_Q, "k": PAGES[0], "weights": WEIGHTS}, change, message)


@pytest.mark.parametrize("call", [reference.paged_mqa_logits, paged_mqa_logits])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": INDEX_Q[None].to(torch.int8)}, "float8_e4m3fn, got torch.int8"),
        ({"q": INDEX_Q[None, :, :0], "weights": WEIGHTS[:, :0]}, "q: expected at least one head"),
        ({"q": INDEX_Q[None, ..., :0]}, "q: expected a width of at least 1, got 0"),
        (
            {"cache": PAGES.to(torch.int8)},
            "cache: expected float64, float32, bfloat16, float16, fl",
        ),
        (
            {"weights": WEIGHTS.to(torch.complex64)},
            "weights: expected a floating dtype, got torch.complex64",
        ),
        ({"context_lens": [1]}, "context_lens: expected a tensor, got list [1]"),
        ({"context_lens": ONES.bool()}, "context_lens: expected an integer dtype, got torch.bool"),
        ({"block_table": [[0]]}, "block_table: expected a tensor, got list [[0]]"),
        (
            {"block_table": TABLE.to(torch.complex64)},
            "block_table: expected an integer dtype, got torch.comp",
        ),
        ({"max_len": 4.0}, "max_len: expected an integer, got float 4.0"),
        ({"max_len": None}, "max_len: expected an integer, got NoneType"),
    ],
)
def test_paged_mqa_logits_names_what_does_not_fit(call, change, message):
    given = {"q": INDEX_Q[None], "cache": PAGES, "weights": WEIGHTS, "context_lens": ONES}
    refuses(call, given | {"block_table": TABLE, "max_len": 4}, change, message)


@pytest.mark.parametrize("call", [reference.top_k, top_k])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": [[1.0]]}, "logits: expected a tensor, got list [[1.0]]"),
        (
            {"logits": Q[0].to(torch.float8_e5m2)},
            "bfloat16 or float16 [tokens, columns], got torch",
        ),
        ({"k": 2.0}, "k: expected an integer, got float 2.0"),
        ({"k": "2"}, "k: expected an integer, got str '2'"),
        ({"k": None}, "k: expected an integer, got NoneType"),
        ({"k": True}, "k: expected an integer, got bool True"),
        *BOUNDS,
    ],
)
def test_top_k_names_what_does_not_fit(call, change, message):
    refuses(call, {"logits": torch.zeros(2, 9), "k": 2}, change, message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens_at_once", 0, "tokens_at_once: expected at least 1, got 0"),
        ("tokens_at_once", None, "tokens_at_once: expected an integer, got NoneType"),
    ],
)
def test_the_reference_names_a_number_of_tokens_that_does_not_fit(name, value, message):
    given = {"q": Q, "kv": KV, "indices": INDICES, "scale": 1.0}
    refuses(reference.sparse_mla, given, {name: value}, message)


def test_the_width_of_a_compact_result_is_an_integer():
    given = {"q": INDEX_Q, "k": PAGES[0], "weights": WEIGHTS, "start": SLOTS, "end": SLOTS}
    message = "width: expected an integer, got float 4.0"
    refuses(mqa_logits, given, {"clean": False, "width": 4.0}, message)


@pytest.mark.parametrize(
    "choose", [implementation, store_implementation, index_store_implementation]
)
@pytest.mark.parametrize("kind", ["nonsense", "cuda:0", None, torch.device("cpu")])
def test_a_device_type_that_is_not_known_is_named(choose, kind):
    refuses(choose, {"device_type": kind}, {}, f'expected "cpu" or "cuda", got {kind!r}')


@pytest.mark.parametrize(
    ("kv", "table"),
    [
        (KV[:0], None),
        (PAGES.new_zeros(0, 4, 576), None),
        (PAGES.new_zeros(0, 4, 576), (TABLE, SLOTS.int())),
        (PAGES.new_zeros(3, 0, 576), (TABLE, SLOTS.int())),
        (torch.zeros(0, 656, dtype=torch.uint8), None),
    ],
)
def test_an_empty_cache_gives_zero_and_minus_infinity(kv, table):
    out = torch.full((2, 4, 512), 7.0)
    for given in (None, out):
        got, lse = reference.sparse_mla(Q, kv, INDICES - 1, 1.0, out=given, table=table)
        assert torch.equal(got, torch.zeros(2, 4, 512))
        assert torch.equal(lse, torch.full((2, 4), float("-inf")))
    assert not out.any()


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


def compare_empty_caches(device):
    """No row at all: zero and -inf from every form."""
    q, indices = Q.to(device), INDICES.to(device) - 1
    for attend in (reference.sparse_mla, sparse_mla, sparse_mla_shared):
        out, lse = attend(q, KV[:0].to(device), indices, 1.0)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def compare_numpy_integers(device):
    """A numpy integer is the integer it stands for."""
    gen = torch.Generator().manual_seed(0)
    q, kv = torch.randn(2, 4, 576, generator=gen), torch.randn(9, 576, generator=gen)
    q, kv, indices = q.half().to(device), kv.half().to(device), INDICES.to(device) + 1
    d_v: Any = np.int64(512)
    width: Any = np.int64(5)
    for attend in (reference.sparse_mla, sparse_mla, sparse_mla_shared):
        got, _ = attend(q, kv, indices, 0.06, d_v=d_v)
        assert torch.equal(got, attend(q, kv, indices, 0.06, d_v=512)[0])
    logits = kv[:, :32].float()
    given = logits[:2, None], logits, logits[:2, :1], *(SLOTS.to(device), SLOTS.to(device) + 9)
    got = mqa_logits(*given, clean=False, width=width)
    assert torch.equal(got, mqa_logits(*given, clean=False, width=5))


def compare_all(device):
    compare_numpy_integers(device)
    compare_empty_caches(device)
    compare_wide_bounds(device)
    compare_short_rows(device)
    compare_heads_far_apart(device)


def test_bounds_and_strides_in_the_interpreter():
    run_interpreted("import test_kernel_arguments as t; t.compare_all('cpu')")


@pytest.mark.gpu
def test_bounds_and_strides_on_the_gpu():
    compare_all("cuda")

"""Layer 3: the reference against an independent statement, the Triton kernel against the reference.

On a GPU the kernel is compiled; everywhere it also runs in Triton's CPU interpreter, in a process
of its own, since TRITON_INTERPRET is read when triton is imported.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from glm5lab.attention import implementation, implementation_name, reference

# One tolerance a dtype, on values of order 1: (relative, absolute).
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}

CASES = [
    # tokens, heads, rope, top_k, page_size (0: rows without pages)
    (1, 1, 64, 1, 0),
    (3, 4, 64, 16, 16),
    (5, 8, 64, 37, 7),
    (2, 17, 64, 33, 64),
    (4, 8, 0, 40, 16),
]


def make_case(dtype, tokens, heads, rope, top_k, page_size, seed=0, d_v=512, rows=96):
    """Random q and kv; slots with empty places, one token with none, and a poisoned row 0."""
    gen = torch.Generator().manual_seed(seed)
    width = d_v + rope
    q = torch.randn(tokens, heads, width, generator=gen).to(dtype)
    kv = torch.randn(rows, width, generator=gen).to(dtype)
    indices = torch.randint(1, rows, (tokens, top_k), generator=gen, dtype=torch.int32)
    indices[torch.rand(tokens, top_k, generator=gen) < 0.2] = -1
    indices[-1] = -1 if tokens > 1 else indices[-1]
    kv[0] = float("nan")  # empty places must not read it into the result
    lengths = torch.randint(1, top_k + 1, (tokens,), generator=gen, dtype=torch.int32)
    if page_size:
        pages = torch.full((-(-rows // page_size), page_size + 1, width), float("nan"), dtype=dtype)
        view = pages[:, :page_size]  # pages lie apart, as in vLLM's cache
        for slot in range(rows):
            view[slot // page_size, slot % page_size] = kv[slot]
        kv = view
    return q, kv, indices, lengths


def attend_one(q, rows, scale, d_v):
    """One token by torch's own attention: q [H, D], rows [K, D] -> [H, d_v]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, None].double(),
        rows[None].double().expand(len(q), -1, -1),
        rows[None, :, :d_v].double().expand(len(q), -1, -1),
        scale=scale,
    )
    return out[:, 0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_reference_equals_torch_attention(case, with_lengths):
    q, kv, indices, lengths = make_case(torch.float32, *case)
    scale = 256**-0.5
    out, lse = reference.sparse_mla(q, kv, indices, scale, lengths if with_lengths else None)
    for t in range(len(q)):
        slots = indices[t, : lengths[t]] if with_lengths else indices[t]
        slots = slots[slots >= 0]
        if not len(slots):
            assert torch.equal(out[t], torch.zeros_like(out[t]))
            assert torch.all(lse[t] == float("-inf"))
            continue
        rows = reference.gather_rows(kv, slots)
        rtol, atol = TOLERANCE[torch.float32]
        torch.testing.assert_close(
            out[t].double(), attend_one(q[t], rows, scale, 512), rtol=rtol, atol=atol
        )
        scores = q[t].double() @ rows.double().T * scale
        torch.testing.assert_close(lse[t].double(), scores.logsumexp(-1), rtol=rtol, atol=atol)


def compare_triton_with_reference(device, dtypes):
    """Raises where the kernel and the reference differ."""
    assert implementation_name(device) == "triton"
    kernel = implementation(device)
    assert kernel.__module__ == "glm5lab.attention.sparse_mla"
    for case, dtype, with_lengths in product(CASES, dtypes, (False, True)):
        q, kv, indices, lengths = (x.to(device) for x in make_case(dtype, *case))
        strided = torch.stack([lengths, lengths * 0], 1)[:, 0]
        given = strided if with_lengths else None
        poison = torch.full((*q.shape[:2], 512), float("nan"), dtype=dtype, device=device)
        out, lse = kernel(q, kv, indices, 256**-0.5, given, out=poison)
        assert out is poison
        expected, expected_lse = reference.sparse_mla(q, kv, indices, 256**-0.5, given)
        rtol, atol = TOLERANCE[dtype]
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(lse, expected_lse, rtol=rtol, atol=atol)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_triton_kernel_equals_reference_on_the_gpu(dtype):
    compare_triton_with_reference("cuda", [dtype])


def test_triton_kernel_equals_reference_in_the_interpreter():
    code = (
        "import test_sparse_mla as t;"
        "t.compare_triton_with_reference('cpu', list(t.TOLERANCE)); print('equal')"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.strip() == "equal"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": torch.zeros(2, 576)}, "q:"),
        ({"kv": torch.zeros(9, 512)}, "kv:"),
        ({"indices": torch.zeros(3, 4, dtype=torch.int32)}, "indices:"),
        ({"indices": torch.zeros(2, 4)}, "indices:"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths:"),
        ({"d_v": 1000}, "d_v:"),
        ({"out": torch.zeros(2, 4, 100)}, "out:"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    arguments = {
        "q": torch.zeros(2, 4, 576),
        "kv": torch.zeros(9, 576),
        "indices": torch.zeros(2, 4, dtype=torch.int32),
        "scale": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=name):
        reference.sparse_mla(**arguments)


def test_top_k_takes_the_lower_index_first_and_fills_with_minus_one():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, float("-inf"), 5.0, float("-inf")]])
    assert reference.top_k(logits, 3).tolist() == [[1, 2, 0], [2, 0, -1]]
    assert reference.top_k(logits, 6).tolist() == [[1, 2, 0, 3, -1, -1], [2, 0, -1, -1, -1, -1]]


def test_indexer_logits_by_hand():
    gen = torch.Generator().manual_seed(1)
    q, k = torch.randn(3, 4, 8, generator=gen), torch.randn(5, 8, generator=gen)
    weights = torch.randn(3, 4, generator=gen)
    start, end = torch.tensor([0, 1, 2]), torch.tensor([5, 3, 2])
    logits = reference.indexer_logits(q, k, weights, start, end)
    for t, s in product(range(3), range(5)):
        if not start[t] <= s < end[t]:
            assert logits[t, s] == float("-inf")
            continue
        by_hand = sum(float(weights[t, h]) * max(0.0, float(q[t, h] @ k[s])) for h in range(4))
        assert float(logits[t, s]) == pytest.approx(by_hand, rel=1e-5, abs=1e-5)


def test_slots_follow_the_block_table():
    positions = torch.tensor([[0, 5, -1], [3, 4, 7]], dtype=torch.int32)
    table = torch.tensor([[7, 2], [4, 0]], dtype=torch.int32)
    assert reference.slots_of(positions, table, 4).tolist() == [[28, 9, -1], [19, 0, 3]]

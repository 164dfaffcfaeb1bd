"""Shared rows for neighbouring tokens: the same result as the reference, token by token."""

import pytest
import torch
from interpreted import run_interpreted
from test_sparse_mla import LSE_TOLERANCE, TOLERANCE, apart

from glm5lab.attention import reference

CASES = [
    # tokens, heads, rope, top_k, page_size, share of the slots that neighbours have in common
    (1, 8, 64, 5, 0, 0.0),
    (9, 8, 64, 40, 16, 0.8),
    (5, 4, 0, 33, 7, 0.5),
    (3, 20, 64, 17, 0, 1.0),
    (6, 1, 64, 16, 0, 0.0),
]


def make_neighbours(dtype, tokens, heads, rope, top_k, page_size, overlap, rows=160):
    """Distinct slots a token, some places empty, the last token without any, row 0 poisoned."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, heads, 512 + rope, generator=gen).to(dtype)
    kv = torch.randn(rows, 512 + rope, generator=gen).to(dtype)
    kv[0] = float("nan")
    slots = torch.randperm(rows - 1, generator=gen)[:top_k] + 1
    lists = []
    for _ in range(tokens):
        lists.append(slots)
        kept = slots[torch.randperm(top_k, generator=gen)[: int(top_k * overlap)]]
        others = torch.randperm(rows - 1, generator=gen) + 1
        others = others[~torch.isin(others, kept)][: top_k - len(kept)]
        slots = torch.cat([kept, others])
    indices = torch.stack(lists).to(torch.int32)
    indices[torch.rand(tokens, top_k, generator=gen) < 0.2] = -1
    if tokens > 1:
        indices[-1] = -1
    lengths = torch.randint(1, top_k + 1, (tokens,), generator=gen)
    return q, apart(kv, page_size) if page_size else kv, indices, lengths


def compare_with_reference(device, dtypes):
    """Raises where the kernels and the reference differ."""
    from glm5lab.attention.shared_rows import sparse_mla_shared

    for dtype in dtypes:
        for case in CASES:
            tokens, heads, rope, top_k, page_size, overlap = case
            made = make_neighbours(dtype, tokens, heads, rope, top_k, page_size, overlap)
            q, kv, indices, lengths = (x.to(device) for x in made)
            for given in (None, lengths):
                out = torch.full((tokens, heads, 512), float("nan"), dtype=dtype, device=device)
                _, lse = sparse_mla_shared(q, kv, indices, 0.06, given, out=out)
                exact = reference.sparse_mla(q.double(), kv.double(), indices, 0.06, given)
                error = (out.double() - exact[0]).norm() / exact[0].norm().clamp_min(1e-30)
                assert error < TOLERANCE[dtype], (case, dtype, float(error))
                torch.testing.assert_close(lse.double(), exact[1], rtol=0, atol=LSE_TOLERANCE)
                assert torch.all(out[lse == float("-inf")] == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_the_reference_on_the_gpu(dtype):
    compare_with_reference("cuda", [dtype])


def test_equals_the_reference_in_the_interpreter():
    run_interpreted(
        "import test_shared_rows as t, test_sparse_mla as s;"
        "t.compare_with_reference('cpu', s.INTERPRETED)"
    )


def test_fp8_rows_are_refused():
    from glm5lab.attention.shared_rows import sparse_mla_shared

    indices = torch.zeros(1, 1, dtype=torch.int32)
    kv = torch.zeros(4, 656, dtype=torch.uint8)
    with pytest.raises(ValueError, match="kv: expected rows in the dtype of q, got uint8"):
        sparse_mla_shared(torch.zeros(1, 1, 576), kv, indices, 1.0)

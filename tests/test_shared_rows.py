"""Shared rows for neighbouring tokens: the same result as the reference, token by token."""

from unittest.mock import patch

import pytest
import torch
from gluon_simulated import Simulated
from interpreted import run_interpreted
from test_sparse_mla import LSE_TOLERANCE, TOLERANCE, apart

from glm5lab.attention import reference
from glm5lab.attention.problem import Lists, Problem

CASES = [
    # tokens, heads, rope, top_k, page_size, share of the slots that neighbours have in common
    (1, 8, 64, 5, 0, 0.0),
    (9, 8, 64, 40, 16, 0.8),
    (5, 4, 0, 33, 7, 0.5),
    (3, 20, 64, 17, 0, 1.0),
    (6, 1, 64, 16, 0, 0.0),
]
# Too long for the interpreter: many blocks a union, groups of one token, several programs a group.
# Where they can they use what the cases above have compiled.
GPU_CASES = [
    (37, 8, 64, 300, 16, 0.8),
    (17, 8, 0, 1000, 0, 0.5),
    (9, 1, 64, 700, 0, 0.9),
    (5, 20, 64, 500, 0, 0.8),
    (3, 64, 64, 200, 0, 0.5),
    (2, 128, 0, 129, 16, 0.0),
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


def compare_with_reference(device, dtypes, cases=CASES, rows=160):
    """Raises where the kernels and the reference differ."""
    from glm5lab.attention.shared_rows import sparse_mla_shared

    for dtype in dtypes:
        for case in cases:
            tokens, heads, rope, top_k, page_size, overlap = case
            made = make_neighbours(dtype, tokens, heads, rope, top_k, page_size, overlap, rows)
            q, kv, indices, lengths = (x.to(device) for x in made)
            for given in (None, lengths):
                out = torch.full((tokens, heads, 512), float("nan"), dtype=dtype, device=device)
                _, lse = sparse_mla_shared(q, kv, indices, 0.06, given, out=out)
                check(out, lse, reference.sparse_mla(q.double(), kv.double(), indices, 0.06, given))


def check(out, lse, exact):
    """Raises where output or LSE are not those of the reference."""
    error = (out.double() - exact[0]).norm() / exact[0].norm().clamp_min(1e-30)
    assert error < TOLERANCE[out.dtype], (out.shape, out.dtype, float(error))
    torch.testing.assert_close(lse.double(), exact[1], rtol=0, atol=LSE_TOLERANCE)
    assert torch.all(out[lse == float("-inf")] == 0)


def compare_in_spans(device, dtypes):
    """As above, the marks of a program covering 14 to 64 slots of the cache at a time."""
    from glm5lab.attention import shared_rows_union

    with patch.object(shared_rows_union, "SPAN_WORDS", 2):
        compare_with_reference(device, dtypes)


def compare_doubled(device, dtypes):
    """Slots that a token names twice, beside each other and far apart, count once."""
    from glm5lab.attention.shared_rows import sparse_mla_shared

    for dtype in dtypes:
        q, kv, indices, _ = make_neighbours(dtype, 9, 8, 64, 40, 0, 0.8)
        once = torch.cat([indices, torch.full_like(indices, -1)], 1).to(device)
        twice = torch.cat([indices, indices.roll(3, 1)], 1).to(device)
        twice[:, 1] = twice[:, 0]
        once[:, 1] = -1
        twice[:, 44] = -1  # where the slot that column 1 had stands again
        q, kv = q.to(device), kv.to(device)
        out, lse = sparse_mla_shared(q, kv, twice, 0.06)
        check(out, lse, reference.sparse_mla(q.double(), kv.double(), once, 0.06))


@pytest.fixture(params=["hopper", "any GPU"])
def form(request):
    """Both forms of the kernel; where the GPU is no Hopper, they are the same."""
    from glm5lab.attention import shared_rows

    if request.param == "hopper":
        yield
    else:
        with patch.object(shared_rows, "fits_hopper", return_value=False):
            yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_the_reference_on_the_gpu(dtype, form):
    # Half a minute of compiling is enough: float16 differs from bfloat16 in one instruction.
    compare_with_reference("cuda", [dtype], CASES[:2] if dtype == torch.float16 else CASES)
    compare_doubled("cuda", [dtype])


@pytest.mark.gpu
def test_long_unions_and_many_heads(form):
    compare_with_reference("cuda", [torch.bfloat16], GPU_CASES, rows=3000)
    compare_in_spans("cuda", [torch.bfloat16])


@pytest.mark.gpu
def test_a_cache_beyond_4_gb(form):
    from glm5lab.attention.shared_rows import sparse_mla_shared

    rows = 4_000_000
    q, few, indices, _ = make_neighbours(torch.bfloat16, 9, 8, 64, 60, 0, 0.8)
    kv = torch.zeros(rows, 576, dtype=torch.bfloat16, device="cuda")
    kv[-len(few) :] = few.cuda()
    far = torch.where(indices < 0, indices, indices + rows - len(few)).cuda()
    out, lse = sparse_mla_shared(q.cuda(), kv, far, 0.06)
    check(out.cpu(), lse.cpu(), reference.sparse_mla(q.double(), few.double(), indices, 0.06))


@pytest.mark.gpu
def test_other_tokens_lengths_and_caches_compile_nothing_new(form):
    from glm5lab.attention import shared_rows, shared_rows_hopper, shared_rows_union

    kernels = [shared_rows._attend_shared_kernel, shared_rows_union._union_kernel]
    kernels.append(shared_rows_hopper._attend_hopper_kernel)

    def compiled():
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    def run(tokens, top_k, rows):
        case = make_neighbours(torch.bfloat16, tokens, 8, 64, top_k, 0, 0.8, rows)
        q, kv, indices, lengths = (x.cuda() for x in case)
        shared_rows.sparse_mla_shared(q, kv, indices, 0.06, lengths)

    run(9, 64, 160)
    before = compiled()
    assert before >= 2
    for tokens, top_k, rows in ((1, 64, 160), (16, 17, 97), (40, 200, 3000)):
        run(tokens, top_k, rows)
    assert compiled() == before


def unions(problem, group):
    """The lists that `list_unions` makes, by dictionaries; poisoned where they end."""
    groups, capacity = -(-problem.tokens // group), group * problem.top_k
    slots = torch.full((groups, capacity), -12345, dtype=torch.int32)
    members = torch.full((groups, capacity), 255, dtype=torch.uint8)
    counts = torch.zeros(groups, dtype=torch.int32)
    for g in range(groups):
        found: dict[int, int] = {}
        for t in range(g * group, min((g + 1) * group, problem.tokens)):
            length = problem.top_k if problem.lengths is None else int(problem.lengths[t])
            for slot in problem.indices[t, :length].tolist():
                if slot >= 0:
                    found[slot] = found.get(slot, 0) | 1 << (t - g * group)
        counts[g] = len(found)
        slots[g, : len(found)] = torch.tensor(list(found), dtype=torch.int32)
        members[g, : len(found)] = torch.tensor(list(found.values()), dtype=torch.uint8)
    return Lists(slots, members, counts, group)


@pytest.mark.parametrize("case", [*CASES, (9, 8, 64, 130, 16, 0.8), (2, 128, 0, 129, 16, 0.0)])
def test_the_form_for_hopper_in_a_simulation(case, monkeypatch):
    from glm5lab.attention import shared_rows_hopper

    kernel = Simulated(shared_rows_hopper._attend_hopper_kernel)
    monkeypatch.setattr(shared_rows_hopper, "_attend_hopper_kernel", kernel)
    tokens, heads, *_ = case
    for dtype in (torch.bfloat16, torch.float16):
        q, kv, indices, lengths = make_neighbours(dtype, *case)
        for given in (None, lengths):
            problem = Problem(q, kv, indices, given, 0.06, 512)
            out = torch.full((tokens, heads, 512), float("nan"), dtype=dtype)
            lse = torch.full((tokens, heads), float("nan"))
            lists = unions(problem, max(1, min(8, 64 // heads)))
            shared_rows_hopper.attend_hopper(problem, lists, out, lse)
            exact = reference.sparse_mla(q.double(), kv.double(), indices, 0.06, given)
            check(out, lse, exact)


def test_equals_the_reference_in_the_interpreter():
    run_interpreted(
        "import test_shared_rows as t, test_sparse_mla as s;"
        "t.compare_with_reference('cpu', s.INTERPRETED);"
        "t.compare_in_spans('cpu', s.INTERPRETED[:1]);"
        "t.compare_doubled('cpu', s.INTERPRETED[:1])"
    )


def test_fp8_rows_are_refused():
    from glm5lab.attention.shared_rows import sparse_mla_shared

    indices = torch.zeros(1, 1, dtype=torch.int32)
    kv = torch.zeros(4, 656, dtype=torch.uint8)
    with pytest.raises(ValueError, match="kv: expected rows in the dtype of q, got uint8"):
        sparse_mla_shared(torch.zeros(1, 1, 576), kv, indices, 1.0)

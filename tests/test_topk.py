"""Layer 3: exact top-k. The reference against torch.topk, the Triton kernel against the reference.

On a GPU the kernel is compiled; everywhere it also runs in Triton's CPU interpreter, in a process
of its own, since TRITON_INTERPRET is read when triton is imported.
"""

import random

import pytest
import torch
from interpreted import run_interpreted

from glm5lab.attention import reference

KINDS = (
    "normal",
    "equal",
    "two levels",
    "one bin",
    "rising",
    "falling",
    "infinities",
    "denormal",
    "zeros",
    "sawtooth",
)


def make_rows(kind, rows, width, device="cpu"):
    """Logits [rows, width] of a distribution that some way of choosing finds hard."""
    x = torch.randn(rows, width, device=device)
    column = torch.arange(width, device=device).float().expand(rows, width)
    if kind == "equal":
        return torch.full_like(x, 0.25)
    if kind == "two levels":
        return (x > 1).float()
    if kind == "one bin":  # the same upper bits, as in a histogram's coarse bin
        return 1 + x.abs() * 1e-6
    if kind == "rising":
        return column.contiguous()
    if kind == "falling":
        return -column
    if kind == "infinities":
        x[:, ::3], x[:, 1::3], x[:, 2::9] = float("inf"), float("-inf"), float("nan")
        x[:, 5::9] = -x[:, 2:3]
        return x
    if kind == "denormal":
        return (x * 100).abs().int().view(torch.float32) * x.sign()
    if kind == "zeros":
        return torch.where(x > 0, 0.0, -0.0)
    if kind == "sawtooth":  # the great ones stand in step with the kernel's threads
        return torch.where(column % 256 == 7, column, x)
    return x


def bounds(rows, width, device="cpu"):
    """Start and end of each row; some rows have nothing, some ends lie past the width."""
    start = torch.randint(0, width // 2 + 1, (rows,), device=device)
    return start, torch.randint(0, width + 5, (rows,), device=device)


def compare_triton_with_reference(device, shapes, kinds=KINDS):
    """Raises where the kernel and the reference differ."""
    from glm5lab.attention.topk import top_k

    for number, (rows, width, k) in enumerate(shapes):
        torch.manual_seed(number)
        kind = kinds[number % len(kinds)]
        x = make_rows(kind, rows, width, device)
        start, end = bounds(rows, width, device)
        for low, high in ((None, None), (start, end)):
            chosen, expected = top_k(x, k, low, high), reference.top_k(x, k, low, high)
            assert torch.equal(chosen, expected), (kind, rows, width, k, low is not None)


def compare_small_lists_with_reference():
    """Lists so short that they fill up, parts, ties, and samples that see only great values."""
    from glm5lab.attention.topk import Cut, top_k

    cut = Cut(warps=1, depth=8, step=2, sample=2, programs=5)
    for kind in ("normal", "two levels", "rising"):
        for rows, width, k in ((1, 1500, 50), (5, 700, 120)):
            x = make_rows(kind, rows, width)
            x[:, :32] += 1000  # where the sample looks, which then expects too much of the rest
            x[:, width // 2 : width // 2 + 32] += 1000
            assert torch.equal(top_k(x, k, cut=cut), reference.top_k(x, k)), (kind, rows)


def random_shapes(count, widest):
    """Rows, width and k; most rows long, some shorter than k."""
    gen = random.Random(0)
    shapes = []
    for _ in range(count):
        width = int(2 ** gen.uniform(1, widest))
        rows = max(1, min(gen.choice((1, 2, 7, 64, 300)), 2**24 // width))
        shapes.append((rows, width, gen.choice((1, 16, 100, 512, 2048, 2048, 2048, 5000))))
    return shapes


@pytest.mark.gpu
def test_kernel_equals_the_reference_on_the_gpu():
    million = [(1, 2**20, 2048)] * len(KINDS)
    compare_triton_with_reference("cuda", random_shapes(230, 20) + million)


@pytest.mark.gpu
def test_kernel_equals_torch_topk_on_the_gpu():
    from glm5lab.attention.topk import top_k

    for rows, width, k in random_shapes(40, 20):
        x = torch.rand(rows, width, device="cuda", dtype=torch.float64).float()
        k = min(k, width)
        values = x.gather(1, top_k(x, k).long())
        assert torch.equal(values.sort(-1, descending=True).values, torch.topk(x, k).values)


def test_kernel_equals_the_reference_in_the_interpreter():
    run_interpreted(
        "import test_topk as t;"
        "shapes = [(1, 3000, 16)] * 10 + [(1, 6000, 60)] * 3 + [(3, 40, 64), (2, 1, 1)];"
        "t.compare_triton_with_reference('cpu', shapes);"
        "t.compare_small_lists_with_reference()"
    )


@pytest.mark.parametrize("kind", ["normal", "two levels", "one bin", "falling", "denormal"])
def test_reference_equals_torch_topk(kind):
    torch.manual_seed(0)
    x = make_rows(kind, 5, 700)
    for k in (1, 40, 700):
        chosen = reference.top_k(x, k)
        assert torch.equal(chosen, chosen.sort(-1).values)
        values = x.gather(1, chosen.long()).sort(-1, descending=True).values
        assert torch.equal(values, torch.topk(x, k).values)


def test_ties_bounds_and_empty_places():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, -inf, 5.0, nan], [-0.0, 0.0, inf, 0.0]])
    assert reference.top_k(logits, 2).tolist() == [[1, 2], [0, 2], [0, 2]]
    assert reference.top_k(logits, 5).tolist() == [
        [0, 1, 2, 3, -1],
        [0, 2, -1, -1, -1],
        [0, 1, 2, 3, -1],
    ]
    start, end = torch.tensor([0, 1, 3]), torch.tensor([2, 9, 3])
    assert reference.top_k(logits, 2, start, end).tolist() == [[0, 1], [2, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"logits": torch.zeros(4)}, "logits:"),
        ({"logits": torch.zeros(2, 4, dtype=torch.int32)}, "logits:"),
        ({"k": 0}, "k:"),
        ({"start": torch.zeros(3, dtype=torch.int32)}, "start:"),
        ({"end": torch.zeros(2)}, "end:"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    with pytest.raises(ValueError, match=name):
        reference.top_k(**{"logits": torch.zeros(2, 4), "k": 1, **change})

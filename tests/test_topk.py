"""Layer 3: exact top-k. The reference against torch.topk, the Triton kernel against the reference.

On a GPU the kernel is compiled; everywhere it also runs in Triton's CPU interpreter, in a process
of its own, since TRITON_INTERPRET is read when triton is imported.
"""

from dataclasses import replace

import pytest
import torch
from interpreted import run_interpreted
from memory import poisoned

from glm5lab.attention import reference
from glm5lab.kernel_bench.top_k_cases import KINDS, bounds, make_rows, random_shapes, verdict


def cuts(k, width):
    """How the work is cut, by whether one program does a whole row: few rows (False) and many."""
    from glm5lab.attention.tiles import INTERPRETER
    from glm5lab.attention.topk import choose_cut

    large = replace(INTERPRETER, multiprocessors=1000)
    few, many = (choose_cut(k, width, rows, large) for rows in (1, 1000))
    assert (few.whole, many.whole) == (False, True)
    return {False: few, True: many}


def compare_triton_with_reference(device, shapes, kinds=KINDS):
    """Raises where the kernels and the reference differ, whole rows to a program or in parts."""
    from glm5lab.attention.topk import top_k

    for number, (rows, width, k) in enumerate(shapes):
        torch.manual_seed(number)
        kind = kinds[number % len(kinds)]
        x = make_rows(kind, rows, width, device)
        start, end = bounds(rows, width, device)
        for low, high in ((None, None), (start, end)):
            expected = reference.top_k(x, k, low, high)
            # The interpreter takes long: there every kind of row goes through each form once.
            for whole in (False, True) if device == "cuda" else (number % 2 == (low is None),):
                with poisoned():
                    chosen = top_k(x, k, low, high, cuts(k, width)[whole])
                assert torch.equal(chosen, expected), (kind, rows, width, k, low is not None, whole)
                check_values(x, k, low, high, chosen)


def check_values(x, k, start, end, chosen):
    """Raises where the values chosen are not torch.topk's, -inf in empty places."""
    column = torch.arange(x.shape[1], device=x.device)
    barred = x.isnan()
    for bound, outside in ((start, torch.lt), (end, torch.ge)):
        if bound is not None:
            barred |= outside(column, bound[:, None])
    x = x.masked_fill(barred, float("-inf"))
    values = x.gather(1, chosen.clamp_min(0).long()).masked_fill(chosen < 0, float("-inf"))
    values = values.sort(-1, descending=True).values
    expected = torch.topk(x, min(k, x.shape[1])).values
    assert torch.equal(values[:, : expected.shape[1]], expected)
    assert torch.all(values[:, expected.shape[1] :] == float("-inf"))


def compare_small_lists_with_reference(device):
    """Lists so short that they fill up, and samples that expect too much or too little."""
    from glm5lab.attention.topk import Cut, top_k

    for surplus in (0, 30, -1000):
        for kind in ("normal", "two levels", "rising", "lowest"):
            for rows, width, k in ((1, 1000, 50), (2, 600, 120)):
                x = make_rows(kind, rows, width, device)
                cut = Cut(512, 128, surplus, whole=(rows > 1) == (surplus < 30))
                for low, high in ((None, None), bounds(rows, width, device)):
                    with poisoned():
                        chosen = top_k(x, k, low, high, cut)
                    expected = reference.top_k(x, k, low, high)
                    assert torch.equal(chosen, expected), (kind, rows, cut)


def compare_bounds_beyond_rows():
    """Bounds before and behind the row, start behind end, and more than int32 holds."""
    from glm5lab.attention.topk import Cut, top_k

    start = torch.tensor([-5, 2**40, 1499, 700, 2**31 - 1, -(2**40)])
    end = torch.tensor([2**40, 5, 10, 700, -(2**31) + 9000, 1400])
    x = make_rows("two levels", len(start), 1500)
    expected = reference.top_k(x, 50, start, end)
    for whole in (False, True):
        chosen = top_k(x, 50, start, end, Cut(512, 128, whole=whole))
        assert torch.equal(chosen, expected), whole


def sampled_columns(width, cut):
    """The columns of a row at which the kernels look for a level."""
    chunk, chunks = cut.chunk, cut.sample // cut.chunk
    number = torch.arange(cut.sample) // chunk
    random = ((number * 2654435761) % 2**32) >> 20
    first = number * width // chunks + ((random * (width // chunks)) >> 12)
    column = first // chunk * chunk + torch.arange(cut.sample) % chunk
    return column[column < width]


def compare_rows_lowest_where_sampled(device):
    """Rows of -inf whose only finite values, the lowest of all, stand where the sample looks.

    The level is then the lowest value with a last column: the list is not complete.
    """
    from glm5lab.attention.topk import top_k

    for width, k in ((20_000, 1000), (131_072, 2048)):
        for whole, cut in cuts(k, width).items():
            x = torch.full((1, width), float("-inf"))
            x[0, sampled_columns(width, cut)] = torch.finfo(torch.float32).min
            x = x.to(device)
            expected = reference.top_k(x, k)
            assert torch.all(expected >= 0)
            assert torch.equal(top_k(x, k, cut=cut), expected), (width, k, whole)


def great_where_not_sampled(width, cut):
    """A row [1, width] of which a sample sees the low values only."""
    x = torch.randn(1, width) + 10
    x[0, sampled_columns(width, cut)] -= 20
    return x


def compare_tries(device):
    """A sample of which one is to reach the level misleads; what was found then leads to a list.

    Where it sees the low values only, no try finds a list: the row is read again.
    """
    from list_kernel import list_kernel

    from glm5lab.attention.topk import Cut, top_k

    torch.manual_seed(0)
    cut = Cut(1024, 256, -1000, whole=True)
    led = torch.randn(1, 1500)
    for row, leads in ((led, True), (great_where_not_sampled(1500, cut), False)):
        x = row.to(device)
        found = torch.zeros(2048, dtype=torch.int32, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        list_kernel[(1,)](x.view(torch.int32), found, count, 1500, 50, SURPLUS=-1000, num_warps=8)
        if leads:
            columns = found[1024 : 1024 + count.item()].long()
            assert 50 <= len(columns) <= 1024
            assert torch.equal(columns, (x[0] >= x[0, columns].min()).nonzero()[:, 0])
        else:
            assert count.item() == -1
        assert torch.equal(top_k(x, 50, cut=cut), reference.top_k(x, 50)), leads


@pytest.mark.gpu
def test_lists_on_the_gpu():
    compare_rows_lowest_where_sampled("cuda")
    compare_small_lists_with_reference("cuda")
    compare_tries("cuda")


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
        "shapes = [(1, 2500, 16)] * 13 + [(2, 5000, 60)] * 3 + [(3, 40, 64), (2, 1, 1)];"
        "t.compare_triton_with_reference('cpu', shapes);"
        "t.compare_triton_with_reference('cpu', [(2, 300, 16)], ('widest',));"
        "t.compare_small_lists_with_reference('cpu');"
        "t.compare_tries('cpu');"
        "t.compare_bounds_beyond_rows();"
        "t.compare_rows_lowest_where_sampled('cpu')"
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


@pytest.mark.parametrize("whole", [False, True])
def test_sizes_compile_nothing_new(monkeypatch, whole):
    """What Triton compiles by is the same for all rows, widths, k, strides and bounds of a cut."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from glm5lab.attention import topk
    from glm5lab.attention.tiles import Device

    forms: dict[str, set[str]] = {}

    class Recorder:
        """Stands for a kernel: binds what a launch gives, and launches nothing."""

        def __init__(self, kernel):
            backend = make_backend(GPUTarget("cuda", 90, 32))
            self.name = kernel.__name__
            self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def __getitem__(self, grid):
            return lambda *a, **kw: forms.setdefault(self.name, set()).add(
                str(self.bind(*a, **kw)[1:])
            )

    for name in ("_row_kernel", "_level_kernel", "_collect_kernel", "_select_kernel"):
        monkeypatch.setattr(topk, name, Recorder(getattr(topk, name)))
    monkeypatch.setattr(topk, "check_kernels_run_on", lambda name, tensor: None)
    monkeypatch.setattr(topk, "INTERPRETER", Device(90, 132, 232_448))
    cut = topk.Cut(4096, 4096, whole=whole)
    for rows, width, k, beside in ((1, 4097, 1, 0), (3, 4112, 16, 1), (64, 8192, 1000, 16)):
        logits = torch.zeros(rows, width + beside)[:, :width]
        bounds = torch.zeros(rows + 1, dtype=torch.int32)
        for start, end in ((bounds[1:], bounds[:-1]), (bounds[:-1], bounds[1:])):
            topk.top_k(logits, k, start, end, cut)
    kernels = ["_row_kernel"] if whole else ["_collect_kernel", "_level_kernel", "_select_kernel"]
    assert {name: len(found) for name, found in forms.items()} == dict.fromkeys(kernels, 1)


def test_a_list_too_short_is_named():
    from glm5lab.attention.topk import Cut, top_k

    with pytest.raises(ValueError, match="cut: expected a capacity of at least 516, got 512"):
        top_k(torch.zeros(1, 600), 129, cut=Cut(512, 128))
    with pytest.raises(ValueError, match="cut: expected a Cut or None, got str 'x'"):
        top_k(torch.zeros(1, 600), 129, cut="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((500, 128), "capacity: expected a power of two, got 500"),
        ((512, 0), "sample: expected a power of two, got 0"),
        ((512, 128, 8, 3), "chunk: expected a power of two, got 3"),
        ((512, 128, 8, 256), "chunk: expected at most sample, 128, got 256"),
        ((4, 4), "capacity: expected at least 8, got 4"),
        ((512.0, 128), "capacity: expected an integer, got float 512.0"),
        ((512, 128, "a"), "surplus: expected an integer, got str 'a'"),
    ],
)
def test_sizes_of_a_cut_are_checked(sizes, message):
    from glm5lab.attention.topk import Cut

    with pytest.raises(ValueError, match=message):
        Cut(*sizes)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([1, 2, 0], ""),
        ([1, 2, 3], "ties not by column"),
        ([1, 2, 4], "wrong values"),
        ([1, 2, -1], "wrong values"),
        ([1, 2, 2], "columns chosen twice"),
        ([1, 2, 5], "columns out of bounds"),
    ],
)
def test_verdict_on_a_choice(chosen, expected):
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 0.0, 9.0]])
    end = torch.tensor([5], dtype=torch.int32)
    right = reference.top_k(logits, 3, None, end)
    assert right.tolist() == [[0, 1, 2]]
    assert verdict(logits, end, torch.tensor([chosen], dtype=torch.int32), right) == expected

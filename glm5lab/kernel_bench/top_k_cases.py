"""Hard cases of top-k: the tests put them to our kernel, `glm5lab bench top-k` to vLLM's too."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from glm5lab.attention import reference, topk
from glm5lab.kernel_bench import peers

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
    "blocks",
    "lowest",
    "widest",
)
PEER_K = (512, 2048)  # vLLM's kernels take 512, 1024 and 2048
Kernel = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


def make_rows(kind: str, rows: int, width: int, device: str = "cpu") -> torch.Tensor:
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
    if kind == "lowest":  # the lowest finite value in place of -inf
        return torch.where(x > 1, torch.finfo(torch.float32).min, float("-inf"))
    if kind == "widest":  # the ends' order differs by more than int32 holds
        greatest = torch.where(x > 2, float("inf"), 3e38 + 1e37 * x)
        return torch.where(x > 0, greatest, torch.where(x < -2, -1e38, x))
    if kind == "sawtooth":  # the great ones repeat
        return torch.where(column % 256 == 7, column, x)
    if kind == "blocks":  # neighbours are alike
        level = torch.randn(rows, width // 64 + 1, device=device).repeat_interleave(64, 1)
        return x + 3 * level[:, :width]
    return x


def bounds(rows: int, width: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Start and end of each row; some rows have nothing, some ends lie past the width."""
    start = torch.randint(0, width // 2 + 1, (rows,), device=device)
    return start, torch.randint(0, width + 5, (rows,), device=device)


def random_shapes(count: int, widest: float) -> list[tuple[int, int, int]]:
    """Rows, width (at most 2**widest) and k; most rows long, some shorter than k."""
    gen = random.Random(0)
    shapes = []
    for _ in range(count):
        width = int(2 ** gen.uniform(1, widest))
        rows = max(1, min(gen.choice((1, 2, 7, 64, 300)), 2**24 // width))
        shapes.append((rows, width, gen.choice((1, 16, 100, 512, 2048, 2048, 2048, 5000))))
    return shapes


def _ours(logits: torch.Tensor, k: int, end: torch.Tensor) -> torch.Tensor:
    return topk.top_k(logits, k, None, end)


KERNELS: dict[str, Kernel] = {
    "glm5lab": _ours,
    "vLLM top_k_per_row_prefill": lambda x, k, end: peers.vllm_per_row(x, k, end)(0),
    "vLLM persistent_topk": lambda x, k, end: peers.vllm_persistent(x, k, end)(0),
}


def verdict(
    logits: torch.Tensor, end: torch.Tensor, chosen: torch.Tensor, expected: torch.Tensor
) -> str:
    """What is wrong with a choice: "" where it is the reference's, in any order.

    Args:
        logits: [T, S] float32.
        end: [T] int32; columns from there on must not be chosen.
        chosen: [T, k] int32, -1 for none.
        expected: the reference's choice.
    """
    chosen = chosen.long().sort(-1).values
    expected = expected.long().sort(-1).values
    if torch.equal(chosen, expected):
        return ""
    width = logits.shape[1]
    if bool(((chosen < -1) | (chosen >= end.clamp(max=width)[:, None])).any()):
        return "columns out of bounds"
    if bool(((chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)).any()):
        return "columns chosen twice"

    def values(columns: torch.Tensor) -> torch.Tensor:
        found = logits.gather(1, columns.clamp(min=0))
        return found.masked_fill(columns < 0, float("-inf")).sort(-1).values

    if torch.equal(values(chosen), values(expected)):
        return "ties not by column"
    return "wrong values"


def exactness(shapes: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Every kernel on every shape, its kind of rows changing from shape to shape.

    NaN, of which vLLM states nothing, is -inf here. Its kernels get the shapes whose k they take.

    Yields:
        kernel, kind, rows, width, k, verdict ("" where exact; why it did not run, else).
    """
    for number, (rows, width, k) in enumerate(shapes):
        torch.manual_seed(number)
        kind = KINDS[number % len(KINDS)]
        logits = make_rows(kind, rows, width, "cuda")
        logits = logits.masked_fill(logits.isnan(), float("-inf"))
        end = torch.randint(0, width + 1, (rows,), device="cuda", dtype=torch.int32)
        expected = reference.top_k(logits, k, None, end)
        for name, kernel in KERNELS.items():
            if kernel is not _ours and k not in PEER_K:
                continue
            try:
                found = verdict(logits, end, kernel(logits, k, end), expected)
            except Exception as error:
                found = f"did not run: {str(error).strip().splitlines()[0][:120]}"
            yield {
                "kernel": name,
                "kind": kind,
                "rows": rows,
                "width": width,
                "k": k,
                "verdict": found,
            }

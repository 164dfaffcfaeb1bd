"""The cases of `glm5lab bench kernels`."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from glm5lab.attention import reference
from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.shared_rows import sparse_mla_shared
from glm5lab.attention.sparse_mla import checked_problem, run, sparse_mla
from glm5lab.attention.tiles import device_of, shared_memory_of
from glm5lab.attention.topk import top_k
from glm5lab.kernel_bench import peers
from glm5lab.kernel_bench.inputs import (
    INDEX_WIDTH,
    SCALE,
    TOP_K,
    WIDTH,
    Logits,
    Paged,
    Sparse,
    enough_inputs,
    fp8_rows,
    neighbours,
)
from glm5lab.kernel_bench.timing import Row, copy_rate, measure, prepared, relative

TOKENS = (1, 4, 16, 64, 256, 1024)
ROWS = 1 << 21  # of the cache, as many as lists of 1024 tokens: 2.4 GB in bf16, many times any L2
LSE_BOUND = 1e-3
Kind = Callable[[Sparse], Callable[[int], Any]]
Measure = Callable[..., Iterator[Row]]


def ours(s: Sparse) -> Callable[[int], Any]:
    """The kernel of `sparse_mla`."""
    return lambda i: sparse_mla(s.q[i], s.kv, s.indices[i], SCALE, s.lengths)


def within(s: Sparse) -> Callable[[int], Any]:
    """The kernel of `sparse_mla` with tiles within the 101,376 bytes that a block of SM120 may use.

    A multiprocessor holds as many of them as it does; SM120's has room for fewer.
    """
    small = replace(device_of(torch.cuda.current_device()), shared_memory=shared_memory_of(120))

    def call(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = (s.q[i], s.kv, s.indices[i], SCALE, s.lengths, 512, None, False)
        problem, out, lse = checked_problem(*given)
        run(problem, out, lse, small)
        return out, lse

    return call


def shared(s: Sparse) -> Callable[[int], Any]:
    """The form for neighbouring tokens."""
    return lambda i: sparse_mla_shared(s.q[i], s.kv, s.indices[i], SCALE, s.lengths)


BF16: dict[str, Kind] = {
    "glm5lab": ours,
    "glm5lab in 99 KiB": within,
    "FlashAttention-3": peers.flash_attention_3,
    "FlashMLA": peers.flashmla,
    "FlashInfer": peers.flashinfer,
}
FP8: dict[str, Kind] = {
    "glm5lab": ours,
    "glm5lab in 99 KiB": within,
    "FlashMLA": peers.flashmla_fp8,
}


def sparse_case(
    measure: Measure, case: str, s: Sparse, kinds: Mapping[str, Kind], floor_us: float = math.nan
) -> Iterator[Row]:
    """One size of sparse MLA by every implementation."""
    expected = s.expected()
    calls = {name: prepared(partial(kind, s)) for name, kind in kinds.items()}
    yield from measure(case, calls, len(s.q), partial(sparse_error, expected=expected), floor_us)


def sparse_error(got: Any, expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Relative error of an output, or of an output and its LSE.

    Raises:
        ValueError: the LSE is wrong.
    """
    if isinstance(got, tuple):
        got, lse = got
        apart = float((lse.double() - expected[1]).abs().max())
        if not apart <= LSE_BOUND:
            raise ValueError(f"its LSE is {apart:.2g} off: expected at most {LSE_BOUND}")
    return relative(got, expected[0])


def decode(measure: Measure, rate: float) -> Iterator[Row]:
    """Places of lists are drawn at random from all rows, none twice."""
    for fp8 in (False, True):
        kv = fp8_rows(ROWS) if fp8 else (torch.randn(ROWS, WIDTH, device="cuda") * 0.5).bfloat16()
        kinds, text = (FP8, "fp8_ds_mla") if fp8 else (BF16, "bf16")
        for heads in (8, 64):
            for tokens in TOKENS:
                row_bytes = kv.shape[1] * kv.itemsize
                s = Sparse(tokens, heads, kv, enough_inputs(tokens, row_bytes))
                floor_us = tokens * TOP_K * row_bytes / rate
                case = f"{text}, {heads} heads, {tokens} tokens"
                yield from sparse_case(measure, case, s, kinds, floor_us)
        # FlashMLA has no lengths for these rows: it would attend to all 2048.
        some = {name: f for name, f in kinds.items() if name != "FlashMLA"}
        short = Sparse(64, 8, kv, 12, valid=128)
        case = f"{text}, 8 heads, 64 tokens, 128 of 2048 valid"
        yield from sparse_case(measure, case, short, some)


def prefill(measure: Measure) -> Iterator[Row]:
    """4096 neighbouring tokens of one sequence of 32768."""
    kv = (torch.randn(32768, WIDTH, device="cuda") * 0.5).bfloat16()
    s = Sparse(4096, 8, kv, 1, [neighbours(4096, 32768)])
    kinds = {"glm5lab, shared rows": shared, **BF16}
    yield from sparse_case(measure, "bf16, 8 heads, 4096 neighbours, 80 % shared", s, kinds)


def indexer(measure: Measure, rate: float) -> Iterator[Row]:
    """Logits for a prompt and for decoding."""
    x = Logits(1024, 131072)
    expected = x.expected()
    implementations = {
        "glm5lab": lambda _: mqa_logits(x.q, x.k, x.weights, x.start, x.end, x.k_scale),
        "DeepGEMM": prepared(lambda: peers.deepgemm_logits(x)),
    }
    yield from measure(
        "fp8 MQA logits, 1024 x 131072",
        implementations,
        1,
        lambda out: relative(out[:2, :4096], expected),
    )
    p = Paged(8, 131072)
    first = p.expected()
    implementations = {
        "glm5lab": lambda _: paged_mqa_logits(p.q, p.cache, p.weights, p.lens, p.table, p.width),
        "DeepGEMM": prepared(lambda: peers.deepgemm_paged(p)),
    }
    yield from measure(
        "paged logits, 8 requests at 131072",
        implementations,
        1,
        lambda out: relative(out.reshape(8, -1)[0, :512], first),
        8 * p.width * (INDEX_WIDTH + 4) / rate,
    )


def selection(measure: Measure, rate: float) -> Iterator[Row]:
    """Exact top-k of long rows; the error counts wrong places in eight rows."""
    logits = torch.randn(1024, 131072, device="cuda")
    expected = reference.top_k(logits[:8], TOP_K)
    implementations: dict[str, Callable[[int], torch.Tensor]] = {
        "glm5lab": lambda _: top_k(logits, TOP_K),
        "torch.topk": lambda _: torch.topk(logits, TOP_K).indices,
        "vLLM top_k_per_row_prefill": prepared(lambda: peers.vllm_per_row(logits)),
        "vLLM persistent_topk": prepared(lambda: peers.vllm_persistent(logits)),
    }
    yield from measure(
        "top-k 2048 of 1024 x 131072",
        implementations,
        1,
        lambda out: float((out[:8].sort().values != expected).sum()),
        logits.nbytes / rate,
        bound=0,
    )


def bench_kernels(architecture: str | None = None) -> tuple[float, Iterator[Row]]:
    """The copy kernel's rate in bytes a microsecond, and all rows as they are measured.

    Args:
        architecture: such as "sm120": Triton generates code as for it, with its tiles and its
            shared memory, and only our kernels are measured; None for the device's own.
    """
    torch.manual_seed(0)
    rate = copy_rate()
    kept = partial(measure, prefix="glm5lab" if architecture else "")

    def rows() -> Iterator[Row]:
        before = triton.knobs.runtime.override_arch
        try:
            if architecture:
                triton.knobs.runtime.override_arch = architecture
            yield from decode(kept, rate)
            yield from prefill(kept)
            yield from indexer(kept, rate)
            yield from selection(kept, rate)
        finally:
            triton.knobs.runtime.override_arch = before

    return rate, rows()

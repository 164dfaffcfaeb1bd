"""The cases of `glm5lab bench kernels`."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import triton

from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.shared_rows import sparse_mla_shared
from glm5lab.attention.sparse_mla import sparse_mla
from glm5lab.attention.topk import top_k
from glm5lab.errors import Glm5labError
from glm5lab.kernel_bench import peers
from glm5lab.kernel_bench.inputs import (
    INDEX_WIDTH,
    SCALE,
    TOP_K,
    WIDTH,
    Logits,
    Paged,
    Sparse,
    fp8_rows,
    neighbours,
)
from glm5lab.kernel_bench.timing import Row, copy_rate, measure, relative

TOKENS = (1, 4, 16, 64, 256, 1024)
ROWS = 1 << 20  # of the cache: 1.2 GB in bf16, many times any L2
Kind = Callable[[Sparse, int], torch.Tensor]
Measure = Callable[..., Iterator[Row]]


def ours(s: Sparse, i: int) -> torch.Tensor:
    """The kernel of `sparse_mla`."""
    return sparse_mla(s.q[i], s.kv, s.indices[i], SCALE, s.lengths)[0]


def shared(s: Sparse, i: int) -> torch.Tensor:
    """The form for neighbouring tokens."""
    return sparse_mla_shared(s.q[i], s.kv, s.indices[i], SCALE, s.lengths)[0]


BF16: dict[str, Kind] = {
    "glm5lab": ours,
    "FlashAttention-3": peers.flash_attention_3,
    "FlashMLA": peers.flashmla,
}
FP8: dict[str, Kind] = {"glm5lab": ours, "FlashMLA": peers.flashmla_fp8}


def sparse_case(
    measure: Measure, case: str, s: Sparse, kinds: Mapping[str, Kind], floor_us: float = math.nan
) -> Iterator[Row]:
    """One size of sparse MLA by every implementation."""
    expected = s.expected()
    implementations = {name: (lambda i, f=function: f(s, i)) for name, function in kinds.items()}
    yield from measure(
        case,
        implementations,
        len(s.q),
        lambda out: relative(out[: len(expected)], expected),
        floor_us,
    )


def decode(measure: Measure, rate: float) -> Iterator[Row]:
    """Every place of every list is another random row."""
    for fp8 in (False, True):
        kv = fp8_rows(ROWS) if fp8 else (torch.randn(ROWS, WIDTH, device="cuda") * 0.5).bfloat16()
        kinds, text = (FP8, "fp8_ds_mla") if fp8 else (BF16, "bf16")
        for heads in (8, 64):
            for tokens in TOKENS:
                s = Sparse(tokens, heads, kv, 12 if tokens <= 64 else 2)
                floor_us = tokens * TOP_K * kv.shape[1] * kv.itemsize / rate
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
        "DeepGEMM": lambda _: peers.deepgemm_logits(x),
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
        "DeepGEMM": lambda _: peers.deepgemm_paged(p),
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
    expected = torch.topk(logits[:8], TOP_K).indices.sort().values
    implementations: dict[str, Callable[[int], torch.Tensor]] = {
        "glm5lab": lambda _: top_k(logits, TOP_K),
        "torch.topk": lambda _: torch.topk(logits, TOP_K).indices,
        "vLLM top_k_per_row_prefill": lambda _: peers.vllm_per_row(logits),
        "vLLM persistent_topk": lambda _: peers.vllm_persistent(logits),
    }
    yield from measure(
        "top-k 2048 of 1024 x 131072",
        implementations,
        1,
        lambda out: float((out[:8].long().sort().values != expected).sum()),
        logits.nbytes / rate,
    )


def bench_kernels(architecture: str | None = None) -> tuple[float, Iterator[Row]]:
    """The copy kernel's rate in bytes a microsecond, and all rows as they are measured.

    Args:
        architecture: such as "sm120": Triton generates code as for it, with its tiles and its
            shared memory, and only our kernels are measured; None for the device's own.

    Raises:
        Glm5labError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise Glm5labError("no CUDA device: `glm5lab bench kernels` times kernels on a GPU")
    if architecture:
        triton.knobs.runtime.override_arch = architecture
    torch.manual_seed(0)
    rate = copy_rate()
    kept = partial(measure, prefix="glm5lab" if architecture else "")

    def rows() -> Iterator[Row]:
        yield from decode(kept, rate)
        yield from prefill(kept)
        yield from indexer(kept, rate)
        yield from selection(kept, rate)

    return rate, rows()

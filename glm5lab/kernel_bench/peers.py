"""Peers of our kernels: FlashMLA, FlashAttention-3, DeepGEMM and vLLM's own top-k; FlashInfer.

Each function prepares a peer for inputs and returns what is timed. What vLLM's own backends make
once a step or once for all (schedules, bounds, buffers, queries in two parts) is prepared; what
they do in every layer (FlashMLA's padding to 64 heads) is timed.
"""

from collections.abc import Callable
from typing import Any

import torch

from glm5lab.attention.reference import FP8_LATENT, FP8_ROW_BYTES
from glm5lab.kernel_bench.inputs import SCALE, TOP_K, Logits, Paged, Sparse

TOPK_WORKSPACE = 1 << 20  # bytes, as vLLM's indexer allocates
FLASHINFER_WORKSPACE = 1 << 27
Attend = Callable[[int], torch.Tensor]  # of input number i


def _flashmla() -> Any:
    import vllm.v1.attention.ops.flashmla as module

    return module


def flashmla(s: Sparse) -> Attend:
    """FlashMLA over bf16 rows, which takes 64 or 128 heads: fewer are padded."""
    attend = _flashmla().flash_mla_sparse_fwd
    kv = s.kv[:, None]

    def call(i: int) -> torch.Tensor:
        q = torch.nn.functional.pad(s.q[i], (0, 0, 0, max(0, 64 - s.heads)))
        out = attend(q, kv, s.indices[i][:, None], SCALE, FP8_LATENT)
        return out[0][:, : s.heads]

    return call


def flashmla_fp8(s: Sparse) -> Attend:
    """FlashMLA over fp8_ds_mla rows, heads padded to 64; one schedule, as for all of its layers."""
    module = _flashmla()
    pages = s.kv.view(-1, 64, 1, FP8_ROW_BYTES)
    metadata, _ = module.get_mla_metadata()

    def call(i: int) -> torch.Tensor:
        q = torch.nn.functional.pad(s.q[i], (0, 0, 0, max(0, 64 - s.heads)))[:, None]
        slots = s.indices[i][:, None]
        out = module.flash_mla_with_kvcache(
            q, pages, None, None, FP8_LATENT, metadata, None, SCALE, False, True, slots
        )
        return out[0][:, 0, : s.heads]

    return call


def _in_two(s: Sparse) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries as their producers write them: the columns of values, and those of rope."""
    return [(q[..., :FP8_LATENT].contiguous(), q[..., FP8_LATENT:].contiguous()) for q in s.q]


def _lengths(s: Sparse) -> torch.Tensor:
    whole = torch.full((s.tokens,), TOP_K, device="cuda", dtype=torch.int32)
    return whole if s.lengths is None else s.lengths


def flash_attention_3(s: Sparse) -> Attend:
    """FlashAttention-3 with the slots as a page table of one row a page."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    queries, lengths = _in_two(s), _lengths(s)
    starts = torch.arange(s.tokens + 1, device="cuda", dtype=torch.int32)

    def call(i: int) -> torch.Tensor:
        latent, rope = queries[i]
        return flash_attn_varlen_func(
            q=rope,
            k=s.kv[:, FP8_LATENT:][:, None, None],
            v=s.kv[:, :FP8_LATENT][:, None, None],
            q_v=latent,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=TOP_K,
            seqused_k=lengths,
            block_table=s.indices[i],
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )

    return call


def flashinfer(s: Sparse) -> Attend:
    """FlashInfer's MLA for Hopper, planned for the slots as pages of one row.

    Through FlashInfer itself, with the arguments of vLLM's FLASHINFER_MLA_SPARSE_SM90.
    """
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    space = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")
    lengths = _lengths(s).cpu()
    starts = torch.arange(s.tokens + 1, dtype=torch.int32)
    ends = torch.cat([starts[:1], lengths.cumsum(0, dtype=torch.int32)])
    rope = s.kv.shape[1] - FP8_LATENT
    planned = []
    for indices in s.indices:
        slots = torch.cat([row[:n] for row, n in zip(indices, lengths.tolist(), strict=True)])
        wrapper = BatchMLAPagedAttentionWrapper(space, backend="fa3")
        sizes = (s.heads, FP8_LATENT, rope, 1, False, SCALE, s.q[0].dtype, s.kv.dtype)
        wrapper.plan(starts, ends, slots, lengths, *sizes)
        planned.append(wrapper)
    queries, rows = _in_two(s), s.kv[:, None]

    def call(i: int) -> torch.Tensor:
        return planned[i].run(*queries[i], rows[..., :FP8_LATENT], rows[..., FP8_LATENT:])

    return call


def deepgemm_logits(x: Logits) -> Attend:
    """DeepGEMM's fp8 MQA logits."""
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    keys, count = (x.k, x.k_scale), len(x.k)
    return lambda _: fp8_fp4_mqa_logits((x.q, None), keys, x.weights, x.start, x.end, count)


def deepgemm_paged(x: Paged) -> Attend:
    """DeepGEMM's paged MQA logits; the schedule is made once, as vLLM does for a batch."""
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    lens, pages = x.lens[:, None], x.cache[:, :, None]
    schedule = get_paged_mqa_logits_metadata(lens, x.cache.shape[1], processors)
    return lambda _: fp8_fp4_paged_mqa_logits(
        (x.q, None), pages, x.weights, lens, x.table, schedule, x.width
    )


def vllm_per_row(logits: torch.Tensor, k: int = TOP_K, end: torch.Tensor | None = None) -> Attend:
    """The kernel top_k_per_row_prefill of vLLM; int32 [rows] ends, None for the width."""
    import vllm._custom_ops  # noqa: F401

    rows, width = logits.shape
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    last = torch.full_like(start, width) if end is None else end
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")

    def call(_: int) -> torch.Tensor:
        torch.ops._C.top_k_per_row_prefill(logits, start, last, out, rows, *logits.stride(), k)
        return out

    return call


def vllm_persistent(
    logits: torch.Tensor, k: int = TOP_K, end: torch.Tensor | None = None
) -> Attend:
    """The kernel persistent_topk of vLLM; int32 [rows] ends, None for the width."""
    import vllm._custom_ops  # noqa: F401

    rows, width = logits.shape
    last = torch.full((rows,), width, dtype=torch.int32, device="cuda") if end is None else end
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    space = torch.empty(TOPK_WORKSPACE, dtype=torch.uint8, device="cuda")

    def call(_: int) -> torch.Tensor:
        torch.ops._C.persistent_topk(logits, last, out, space, k, width)
        return out

    return call

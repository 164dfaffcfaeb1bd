"""Peers of our kernels, through vLLM: FlashMLA, FlashAttention-3, DeepGEMM, vLLM's own top-k."""

from functools import cache
from typing import Any

import torch

from glm5lab.attention.reference import FP8_LATENT, FP8_ROW_BYTES
from glm5lab.kernel_bench.inputs import SCALE, TOP_K, Logits, Paged, Sparse

TOPK_WORKSPACE = 1 << 20  # bytes, as vLLM's indexer allocates


@cache
def _flashmla() -> Any:
    import vllm.v1.attention.ops.flashmla as module

    return module


def flashmla(s: Sparse, i: int) -> torch.Tensor:
    """FlashMLA over bf16 rows, which takes 64 or 128 heads: fewer are padded."""
    q = torch.nn.functional.pad(s.q[i], (0, 0, 0, max(0, 64 - s.heads)))
    kv, indices = s.kv[:, None], s.indices[i][:, None]
    out = _flashmla().flash_mla_sparse_fwd(q, kv, indices, SCALE, FP8_LATENT)
    return out[0][:, : s.heads]


def flashmla_fp8(s: Sparse, i: int) -> torch.Tensor:
    """FlashMLA over fp8_ds_mla rows, heads padded to 64."""
    module = _flashmla()
    q = torch.nn.functional.pad(s.q[i], (0, 0, 0, max(0, 64 - s.heads)))[:, None]
    pages = s.kv.view(-1, 64, 1, FP8_ROW_BYTES)
    metadata, _ = module.get_mla_metadata()
    out = module.flash_mla_with_kvcache(
        q, pages, None, None, FP8_LATENT, metadata, None, SCALE, False, True, s.indices[i][:, None]
    )
    return out[0][:, 0, : s.heads]


def flash_attention_3(s: Sparse, i: int) -> torch.Tensor:
    """FlashAttention-3 with the slots as a page table of one row a page."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    whole = torch.full((s.tokens,), TOP_K, device="cuda", dtype=torch.int32)
    return flash_attn_varlen_func(
        q=s.q[i][..., FP8_LATENT:].contiguous(),
        k=s.kv[:, FP8_LATENT:][:, None, None],
        v=s.kv[:, :FP8_LATENT][:, None, None],
        q_v=s.q[i][..., :FP8_LATENT].contiguous(),
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(s.tokens + 1, device="cuda", dtype=torch.int32),
        max_seqlen_k=TOP_K,
        seqused_k=whole if s.lengths is None else s.lengths,
        block_table=s.indices[i],
        softmax_scale=SCALE,
        causal=True,
        fa_version=3,
    )


def deepgemm_logits(x: Logits) -> torch.Tensor:
    """DeepGEMM's fp8 MQA logits."""
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    return fp8_fp4_mqa_logits((x.q, None), (x.k, x.k_scale), x.weights, x.start, x.end, len(x.k))


def deepgemm_paged(x: Paged) -> torch.Tensor:
    """DeepGEMM's paged MQA logits; the schedule is made once, as vLLM does for a batch."""
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits

    pages = x.cache[:, :, None]
    lens = x.lens[:, None]
    return fp8_fp4_paged_mqa_logits(
        (x.q, None), pages, x.weights, lens, x.table, _schedule(x), x.width
    )


@cache
def _schedule(x: Paged) -> torch.Tensor:
    from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return get_paged_mqa_logits_metadata(x.lens[:, None], x.cache.shape[1], processors)


def vllm_per_row(
    logits: torch.Tensor, k: int = TOP_K, end: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel top_k_per_row_prefill of vLLM; int32 [rows] ends, None for the width."""
    import vllm._custom_ops  # noqa: F401

    rows, width = logits.shape
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    end = torch.full_like(start, width) if end is None else end
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    torch.ops._C.top_k_per_row_prefill(logits, start, end, out, rows, *logits.stride(), k)
    return out


def vllm_persistent(
    logits: torch.Tensor, k: int = TOP_K, end: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel persistent_topk of vLLM; int32 [rows] ends, None for the width."""
    import vllm._custom_ops  # noqa: F401

    rows, width = logits.shape
    end = torch.full((rows,), width, dtype=torch.int32, device="cuda") if end is None else end
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    space = torch.empty(TOPK_WORKSPACE, dtype=torch.uint8, device="cuda")
    torch.ops._C.persistent_topk(logits, end, out, space, k, width)
    return out

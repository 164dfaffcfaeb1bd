"""The lightning indexer on CUDA devices without DeepGEMM: our logits and top-k in vLLM's op.

vLLM's indexer op keeps its shape (chunks of prompts, padded decodes, context parallelism, sharded
rows); only the functions that it calls for logits and top-k are replaced, by functions that take
and return what those do. Keys and scales lie in vLLM's cache as they always do.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from glm5lab.attention.indexer import mqa_logits
from glm5lab.attention.indexer_paged import paged_mqa_logits
from glm5lab.attention.topk import top_k

INDEXER = "GLM5LAB_INDEXER"


def why_triton() -> str | None:
    """Why the Triton indexer serves here; None where DeepGEMM does.

    Raises:
        ValueError: GLM5LAB_INDEXER holds an unknown value, or asks for Triton on a data-center
            Blackwell, whose keys have another kind of scale.
    """
    value = os.environ.get(INDEXER, "") or "auto"
    if value not in ("auto", "triton", "deepgemm"):
        raise ValueError(f"{INDEXER}: expected auto, triton or deepgemm, got {value!r}")
    if current_platform.is_device_capability_family(100):
        if value == "triton":
            raise ValueError(
                f"{INDEXER}=triton: on data-center Blackwells vLLM stores scales that only "
                "DeepGEMM reads; leave the variable unset"
            )
        return None
    if value == "auto":
        return why_no_deep_gemm()
    return f"{INDEXER}=triton" if value == "triton" else None


def why_no_deep_gemm() -> str | None:
    """What DeepGEMM lacks on this device or machine; None where it runs."""
    from vllm.utils.import_utils import has_deep_gemm

    capability = current_platform.get_device_capability()
    if not current_platform.support_deep_gemm():
        return f"DeepGEMM has no kernels for SM{capability.major}{capability.minor}"
    if not has_deep_gemm():
        return "DeepGEMM is not installed"
    return None if find_nvcc() else "DeepGEMM compiles with nvcc, which is not there"


def find_nvcc() -> str | None:
    """The CUDA compiler that DeepGEMM would find."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for home in (*homes, "/usr/local/cuda"):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def prompt_logits(
    q: tuple[torch.Tensor, Any],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    max_seqlen_k: int,
) -> torch.Tensor:
    """Scores of a prompt's tokens; stands for vllm.utils.deep_gemm.fp8_fp4_mqa_logits.

    Args:
        q: [T, H, 128] float8_e4m3fn, and None.
        kv: [N, 128] float8_e4m3fn and [N] float32.
        weights: [T, H] float32.
        cu_seqlen_ks: [T] int32, first key of a token.
        cu_seqlen_ke: [T] int32, the key behind its last.
        max_seqlen_k: columns of the result.

    Returns:
        [T, max_seqlen_k] float32; column j is key cu_seqlen_ks + j, undefined behind the last.
    """
    keys, scales = kv
    return mqa_logits(
        q[0],
        keys,
        weights,
        cu_seqlen_ks,
        cu_seqlen_ke,
        scales,
        clean=False,
        width=max_seqlen_k,
    )


def decode_logits(
    q: tuple[torch.Tensor, Any],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: Any,
    max_model_len: int,
    indices: Any = None,
) -> torch.Tensor:
    """Scores of decoded tokens; stands for vllm.utils.deep_gemm.fp8_fp4_paged_mqa_logits.

    Args:
        q: [B, N, H, 128] float8_e4m3fn, and None.
        kv_cache: [pages, page_size, 1, 132] uint8.
        weights: [B * N, H] float32.
        context_lens: [B, N] int32, what each query sees.
        block_tables: [B, pages] int32.
        schedule_metadata: not used.
        max_model_len: columns of the result.
        indices: not used.

    Returns:
        [B * N, max_model_len] float32, undefined behind each query's context.
    """
    return paged_mqa_logits(
        q[0], kv_cache[:, :, 0], weights, context_lens, block_tables, max_model_len, clean=False
    )


def prompt_top_k(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Top-k of rows with bounds; stands for vllm._custom_ops.top_k_per_row_prefill."""
    chosen = top_k(logits, topk_tokens, cu_seqlen_ks, cu_seqlen_ke)
    raw_topk_indices.copy_(chosen)


class DecodeTopK:
    """Top-k of decoded tokens; stands for what vLLM's get_indexer_topk returns."""

    def __call__(
        self,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        max_seq_len: int,
    ) -> None:
        """Write the columns of the greatest logits [R, W] into topk_indices [R, top_k].

        Args:
            logits: [R, W] float32.
            seq_lens: [R] or [R / next_n, next_n] int32, what each row sees; or [R / next_n, 1],
                what the last of a request's next_n rows does.
            next_n: rows of a request.
            topk_indices: [R, top_k] int32, written; -1 where a row has fewer.
            topk_tokens: top_k.
            max_seq_len: not used.
        """
        ends = seq_lens.reshape(-1)
        if len(ends) != len(logits):
            steps = torch.arange(1 - next_n, 1, dtype=torch.int32, device=logits.device)
            ends = (ends[:, None] + steps).clamp_min(0).reshape(-1)
        topk_indices.copy_(top_k(logits, topk_tokens, end=ends))


def decode_top_k(backend: str) -> DecodeTopK:
    """Stands for vLLM's get_indexer_topk; the name of vLLM's kernel plays no part."""
    return DecodeTopK()

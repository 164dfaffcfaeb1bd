"""vLLM's CPU platform with sparse MLA; vLLM loads this module by name."""

from typing import Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from glm5lab.vllm_plugin import BACKEND

logger = init_logger("vllm.glm5lab")

# Models whose attention is vLLM's sparse MLA with the indexer of deepseek_v2.py.
SPARSE_MLA_MODELS = ("glm_moe_dsa", "deepseek_v32")
# Rows a page of the cache where the user names none: vLLM's usual page for sparse MLA.
PAGE_SIZE = 64
# GiB of cache where the user has not said; vLLM takes 92 % of the machine.
CPU_CACHE_GIB = 1


def has_sparse_attention(vllm_config: Any) -> bool:
    """Whether the model attends with sparse MLA as GLM-5 and DeepSeek-V3.2 do."""
    model = vllm_config.model_config
    return model is not None and model.hf_text_config.model_type in SPARSE_MLA_MODELS


class Glm5CpuPlatform(CpuPlatform):
    """CpuPlatform that serves sparse MLA with TRITON_MLA_SPARSE and leaves the rest unchanged."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As CpuPlatform, but for sparse models without the limits of its dense MLA kernels.

        CpuPlatform forces pages of 16 rows and takes away chunked prefill and prefix caching,
        because its own MLA kernels can do neither.
        """
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
            cache.block_size if cache.user_specified_block_size else PAGE_SIZE,
        )
        super().check_and_update_config(vllm_config)
        # vllm.config asks for the platform, so it cannot be imported while that is being found.
        from vllm.config import CompilationMode

        if has_sparse_attention(vllm_config):
            (
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
                cache.enable_prefix_caching,
                cache.block_size,
            ) = kept
            untouched = type(cache)().gpu_memory_utilization == cache.gpu_memory_utilization
            if cache.kv_cache_memory_bytes is None and untouched:
                cache.kv_cache_memory_bytes = CPU_CACHE_GIB << 30
                logger.info_once(
                    "The cache takes %d GiB; --kv-cache-memory-bytes asks for more.", CPU_CACHE_GIB
                )
            # The indexer loops over requests in Python: nothing for torch.compile to trace.
            vllm_config.compilation_config.mode = CompilationMode.NONE
            logger.info_once("Sparse MLA keeps chunked prefill and prefix caching as configured.")

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """TRITON_MLA_SPARSE for sparse MLA; vLLM's own choice for anything else.

        Raises:
            ValueError: another backend, or a cache of another dtype than the model's, was asked
                for by name; neither works for sparse MLA on a CPU.
        """
        if not (attn_selector_config.use_sparse and attn_selector_config.use_mla):
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        if selected_backend is not None and selected_backend.name != BACKEND:
            raise ValueError(
                f"--attention-backend {selected_backend.name}: does not serve sparse MLA on a CPU; "
                f"use {BACKEND}, or leave the option out"
            )
        cache_dtype = attn_selector_config.kv_cache_dtype
        model_dtype = str(attn_selector_config.dtype).removeprefix("torch.")
        if cache_dtype not in (None, "auto", model_dtype):
            raise ValueError(
                f"--kv-cache-dtype {cache_dtype}: on a CPU {BACKEND} keeps rows in the model's "
                f"{model_dtype}; use auto"
            )
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        logger.info_once("Using %s attention backend.", BACKEND)
        return AttentionBackendEnum[BACKEND].get_path()

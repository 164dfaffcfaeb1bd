"""TRITON_MLA_SPARSE: the backend as vLLM's selection sees it; vLLM loads it by name.

What it accepts stands here. What runs stands in `backend_cuda` and `backend_cpu`, of which only
the present platform's is imported.
"""

from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from glm5lab.vllm_plugin import BACKEND

# Widths of a cached row: GLM-5 with its rotary part, and GLM-5.3-Flash without.
HEAD_SIZES = (576, 512)
# Rows a page where the user names none: DeepGEMM's indexer takes no other page.
PAGE_SIZE = 64
FP8_NAMES = ("fp8", "fp8_e4m3")


def refuse_unsupported(**features: object) -> None:
    """Raise NotImplementedError naming the first feature of attention that a model asks for."""
    for name, value in features.items():
        if value:
            raise NotImplementedError(f"{name}: {BACKEND} does not support it (got {value})")


class TritonMLASparseBackend(AttentionBackend):
    """Sparse MLA over rows in the model's own dtype, or as fp8_ds_mla."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16]
    # fp8 and fp8_e4m3 become fp8_ds_mla, see patches.read_fp8_as_ds_mla.
    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16", "float16", "fp8_ds_mla", *FP8_NAMES]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type:
        if current_platform.is_cpu():
            from glm5lab.vllm_plugin.backend_cpu import TritonMLASparseCpuImpl

            return TritonMLASparseCpuImpl
        from glm5lab.vllm_plugin.backend_cuda import TritonMLASparseImpl

        return TritonMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type:
        if current_platform.is_cpu():
            from glm5lab.vllm_plugin.backend_cpu import TritonMLASparseCpuMetadataBuilder

            return TritonMLASparseCpuMetadataBuilder
        from glm5lab.vllm_plugin.backend_cuda import TritonMLASparseMetadataBuilder

        return TritonMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Pages of any size: the kernels see the cache as rows."""
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if default_block_size % PAGE_SIZE == 0 else PAGE_SIZE

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Pages lie a whole number of rows apart, which is what makes the cache rows."""
        from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows

        return spec if current_platform.is_cpu() else align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and later: before it there are neither bfloat16 nor asynchronous copies."""
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """What a cache row may be beside the model's dtype, and how long a top-k."""
        from vllm.config import get_current_vllm_config_or_none

        named = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(kv_cache_dtype or "")
        if named not in (None, dtype):
            return f"rows are kept in the model's {dtype} or as fp8_ds_mla, not as {kv_cache_dtype}"
        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None:
            return None
        top_k = getattr(config.model_config.hf_text_config, "index_topk", None)
        # vLLM turns positions into slots 128 at a time.
        if top_k is None or top_k % 128:
            return f"index_topk must be a multiple of 128, got {top_k}"
        return None

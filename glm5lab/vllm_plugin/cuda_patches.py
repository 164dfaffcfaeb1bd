"""Changes to vLLM's behaviour on CUDA devices; `patches` installs them.

As there, each function says why it exists, where upstream the matter lies, and when it can go.
Every one may be called again.
"""

import functools
from collections.abc import Callable
from typing import Any

from glm5lab.vllm_plugin import BACKEND


def parts() -> tuple[Callable[[], None], ...]:
    """What to install on the present platform: everything here on CUDA, nothing elsewhere."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return ()
    return (
        offer_on_cuda,
        explain_choice,
        read_fp8_as_ds_mla,
        score_with_triton,
        do_without_e4m3_conversions,
        warm_up_before_ready,
    )


def replace(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Put wrapper(attribute) in an attribute's place, once; the original stays reachable.

    Args:
        owner: module or class that holds the attribute.
        name: of the attribute.
        wrapper: from the original to what replaces it.
    """
    original = vars(owner)[name]
    method = isinstance(original, classmethod)
    function = original.__func__ if method else original
    if hasattr(function, "_glm5lab_original"):
        return
    replacement = wrapper(function)
    replacement._glm5lab_original = original
    setattr(owner, name, classmethod(replacement) if method else replacement)


def offer_on_cuda() -> None:
    """Offer TRITON_MLA_SPARSE for every compute capability, after vLLM's own backends.

    Why: the list of backends a capability is fixed; it has no sparse MLA for (8, x), and for
    (12, x) only one that refuses bfloat16 rows.
    Upstream: vllm/platforms/cuda.py, _get_backend_priorities.
    Goes when: a registered backend can name its priority.
    """
    from vllm.platforms import cuda

    from glm5lab.vllm_plugin.selection import with_ours

    replace(cuda, "_get_backend_priorities", with_ours)


def explain_choice() -> None:
    """Log why TRITON_MLA_SPARSE was chosen where it was.

    Why: vLLM names the chosen backend; the others' reasons it logs at debug level only.
    Upstream: vllm/platforms/cuda.py, CudaPlatformBase.get_attn_backend_cls.
    Goes when: vLLM says why it passes over backends of a higher priority.
    """
    from vllm.platforms.cuda import CudaPlatformBase

    from glm5lab.vllm_plugin.selection import explaining

    replace(CudaPlatformBase, "get_valid_backends", explaining)


def read_fp8_as_ds_mla() -> None:
    """Let kv-cache-dtype fp8 and fp8_e4m3 mean fp8_ds_mla for TRITON_MLA_SPARSE, too.

    Why: for vLLM's own sparse backends they do, by their names.
    Upstream: vllm/model_executor/layers/attention/mla_attention.py,
    _canonicalize_sparse_mla_kv_cache_dtype.
    Goes when: the backend is asked for the format of its cache.
    """
    from vllm.model_executor.layers.attention import mla_attention

    replace(mla_attention, "_canonicalize_sparse_mla_kv_cache_dtype", _with_our_fp8)


def _with_our_fp8(canonical: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
    from glm5lab.vllm_plugin.backend import FP8_NAMES

    @functools.wraps(canonical)
    def canonical_dtype(attn_backend: Any, kv_cache_dtype: str) -> str:
        if attn_backend.get_name() == BACKEND and kv_cache_dtype in FP8_NAMES:
            return "fp8_ds_mla"
        return canonical(attn_backend, kv_cache_dtype)

    return canonical_dtype


def _instead(replacement: Any, original: Any) -> Any:
    return replacement


def score_with_triton() -> None:
    """Compute the indexer's logits and top-k with our kernels where DeepGEMM does not run.

    Why: vLLM's sparse indexer on CUDA is DeepGEMM's, which knows SM90, SM100 and SM120 only and
    compiles with nvcc at run time. Its own top-k for SM120 has dropped candidates
    (https://github.com/vllm-project/vllm/issues/51782), so the two are replaced together.
    Upstream: vllm/model_executor/layers/sparse_attn_indexer.py, sparse_attn_indexer;
    vllm/v1/attention/backends/mla/indexer.py, which plans DeepGEMM's work.
    Goes when: vLLM's indexer has a path without DeepGEMM.
    """
    from glm5lab.vllm_plugin import indexer_cuda

    if indexer_cuda.why_triton() is None:
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.v1.attention.backends.mla import indexer

    for owner, name, replacement in (
        (sparse_attn_indexer, "fp8_fp4_mqa_logits", indexer_cuda.prompt_logits),
        (sparse_attn_indexer, "fp8_fp4_paged_mqa_logits", indexer_cuda.decode_logits),
        (sparse_attn_indexer, "get_indexer_topk", indexer_cuda.decode_top_k),
        (_custom_ops, "top_k_per_row_prefill", indexer_cuda.prompt_top_k),
        # The op refuses to start without DeepGEMM, and the planner plans for it.
        (sparse_attn_indexer, "has_deep_gemm", lambda: True),
        (indexer, "has_deep_gemm", lambda: False),
    ):
        replace(owner, name, functools.partial(_instead, replacement))


def do_without_e4m3_conversions() -> None:
    """Replace GLM-5's fused norms, rotations and cache writes on GPUs before Ada.

    Why: vLLM's kernels for them convert to e4m3 in Triton, which does so from SM89 on; the index
    keys are e4m3 whatever the cache's dtype, so the model would not run at all. Its kernel that
    packs ragged queries does so, too; with one row a query nothing is packed.
    Upstream: vllm/models/deepseek_v32/common/kernels.py, fused_norm_rope and fused_q;
    vllm/v1/attention/backends/mla/indexer.py, _supports_native_decode.
    Goes when: vLLM's model runs on SM80.
    """
    from vllm.platforms import current_platform

    if current_platform.has_device_capability(89):
        return
    from vllm.models.deepseek_v32 import attention
    from vllm.v1.attention.backends.mla import indexer

    from glm5lab.vllm_plugin import ampere

    for owner, name, replacement in (
        (attention, "fused_norm_rope", ampere.norm_rope),
        (attention, "fused_q", ampere.query),
        (indexer, "_supports_native_decode", lambda next_n: next_n == 1),
    ):
        replace(owner, name, functools.partial(_instead, replacement))


def warm_up_before_ready() -> None:
    """Compile our kernels where vLLM compiles its own, before a server reports ready.

    Why: vLLM warms kernels up by the names of its backends; one that a dummy batch does not
    reach would be compiled under the first request that does.
    Upstream: vllm/model_executor/warmup/kernel_warmup.py, kernel_warmup.
    Goes when: a backend can name what it wants warmed up.
    """
    from vllm.v1.worker import gpu_worker

    replace(gpu_worker, "kernel_warmup", _and_ours)


def _and_ours(kernel_warmup: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(kernel_warmup)
    def warm_up_all(worker: Any) -> None:
        from glm5lab.vllm_plugin.warmup import warm_up

        kernel_warmup(worker)
        warm_up(worker.vllm_config)

    return warm_up_all

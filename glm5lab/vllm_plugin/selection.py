"""Where TRITON_MLA_SPARSE stands among vLLM's backends, and why it is chosen.

vLLM keeps one list of backends a compute capability and takes the first that accepts the
configuration. TRITON_MLA_SPARSE comes last, so no native choice changes, unless
GLM5LAB_PRIORITY=first puts it in front.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from glm5lab.vllm_plugin import BACKEND

PRIORITY = "GLM5LAB_PRIORITY"


def comes_first() -> bool:
    """Whether GLM5LAB_PRIORITY puts TRITON_MLA_SPARSE before vLLM's own backends.

    Raises:
        ValueError: the variable holds neither "first" nor "last".
    """
    value = os.environ.get(PRIORITY, "") or "last"
    if value not in ("first", "last"):
        raise ValueError(f"{PRIORITY}: expected first or last, got {value!r}")
    return value == "first"


def with_ours(priorities: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The function of vLLM from a capability to its backends, with TRITON_MLA_SPARSE among them."""

    @functools.wraps(priorities)
    def with_triton_mla_sparse(use_mla: bool, *args: Any, **kwargs: Any) -> list[Any]:
        backends = priorities(use_mla, *args, **kwargs)
        if not use_mla:
            return backends
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        ours = AttentionBackendEnum[BACKEND]
        others = [backend for backend in backends if backend is not ours]
        return [ours, *others] if comes_first() else [*others, ours]

    return with_triton_mla_sparse


def explaining(valid_backends: Callable[..., Any]) -> Callable[..., Any]:
    """The function of vLLM that finds valid backends; says why when ours is the first of them.

    When another is, vLLM's own line names it and, behind it, TRITON_MLA_SPARSE.
    """

    @functools.wraps(valid_backends)
    def explained(
        cls: Any, device_capability: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> Any:
        # vLLM passes these by name.
        config = attn_selector_config
        valid, refused = valid_backends(cls, device_capability, config, num_heads)
        chosen = min(valid, key=lambda candidate: candidate.priority, default=None)
        if config.use_sparse and chosen is not None and chosen.backend.name == BACKEND:
            from vllm.logger import init_logger

            reasons = {backend.name: why for backend, (_, why) in refused.items()}
            init_logger("vllm.glm5lab").info_once(
                "%s", why_chosen(device_capability, config.kv_cache_dtype, reasons)
            )
        return valid, refused

    return explained


def why_chosen(
    capability: tuple[int, int], kv_cache_dtype: str | None, refused: dict[str, list[str]]
) -> str:
    """One line: which device and cache, and what vLLM's own sparse backends lack for them.

    Args:
        capability: of the device.
        kv_cache_dtype: as vLLM names it.
        refused: backend -> why it does not take the configuration.
    """
    where = f"{BACKEND} for SM{capability[0]}{capability[1]}, cache {kv_cache_dtype or 'auto'}"
    if comes_first():
        return f"{where}: {PRIORITY}=first."
    sparse = {
        name: reasons
        for name, reasons in refused.items()
        if "SPARSE" in name and "sparse not supported" not in reasons
    }
    if not sparse:
        return f"{where}: vLLM has no sparse MLA of its own for this device."
    why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in sparse.items())
    return f"{where}: no backend of vLLM's takes it ({why})."

"""What the functions take: checks that the references and the kernels share, and devices."""

from contextlib import AbstractContextManager, nullcontext

import torch

from glm5lab.attention import triton_interpreted

INDEX_DTYPES = (torch.int32, torch.int64)


def check_kernels_run_on(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError where Triton's kernels do not run on a tensor's device."""
    if tensor.device.type != "cuda" and not triton_interpreted():
        raise ValueError(
            f"{name}: expected a CUDA tensor (or TRITON_INTERPRET=1), got one on {tensor.device}; "
            "glm5lab.attention.reference runs anywhere"
        )


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes a tensor's GPU the current one: Triton launches there, whatever its arguments are."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def int32_bounds(bounds: torch.Tensor) -> torch.Tensor:
    """Bounds as contiguous int32; what int32 does not hold becomes its least or greatest."""
    if bounds.dtype == torch.int64:
        limits = torch.iinfo(torch.int32)
        bounds = bounds.clamp(limits.min, limits.max)
    return bounds.to(torch.int32).contiguous()


def _check_bounds(tokens: int, start: torch.Tensor | None, end: torch.Tensor | None) -> None:
    """Raise ValueError unless both bounds are absent or integers, one a token."""
    for name, bound in (("start", start), ("end", end)):
        if bound is None:
            continue
        if bound.shape != (tokens,) or bound.is_floating_point():
            raise ValueError(
                f"{name}: expected integers [{tokens}], got {bound.dtype} {tuple(bound.shape)}"
            )


def check_devices(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError naming the first tensor that is on another device than `first`."""
    for name, other in others.items():
        if other is not None and other.device != first.device:
            raise ValueError(f"{name}: expected a tensor on {first.device}, got {other.device}")


def check_mqa_logits_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    k_scale: torch.Tensor | None,
) -> None:
    """Raise ValueError naming the first argument of `mqa_logits` that does not fit."""
    if q.dim() != 3:
        raise ValueError(f"q: expected [tokens, heads, width], got shape {tuple(q.shape)}")
    tokens, heads, width = q.shape
    if k.dim() != 2 or k.shape[1] != width:
        raise ValueError(
            f"k: expected [keys, {width}] (the width of q), got shape {tuple(k.shape)}"
        )
    if weights.shape != (tokens, heads):
        raise ValueError(f"weights: expected [{tokens}, {heads}], got {tuple(weights.shape)}")
    if k_scale is not None and (k_scale.numel() != len(k) or k_scale.dtype != torch.float32):
        raise ValueError(
            f"k_scale: expected float32 [{len(k)}], got {k_scale.dtype} {tuple(k_scale.shape)}"
        )
    _check_bounds(tokens, start, end)
    check_devices(q, k=k, weights=weights, start=start, end=end, k_scale=k_scale)


def check_paged_mqa_logits_arguments(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
) -> None:
    """Raise ValueError naming the first argument of `paged_mqa_logits` that does not fit."""
    if q.dim() != 4:
        raise ValueError(
            f"q: expected [requests, queries, heads, width], got shape {tuple(q.shape)}"
        )
    requests, queries, heads, width = q.shape
    row = width + 4 if cache.dtype == torch.uint8 else width
    if cache.dim() != 3 or cache.shape[2] != row:
        raise ValueError(
            f"cache: expected [pages, page_size, {row}] ({cache.dtype}, q of width {width}), "
            f"got shape {tuple(cache.shape)}"
        )
    if cache.stride(2) != 1 or (cache.dtype == torch.uint8 and cache.stride(1) != row):
        raise ValueError(f"cache: expected contiguous pages, got strides {cache.stride()}")
    if cache.dtype == torch.uint8 and (cache.stride(0) % 4 or cache.storage_offset() % 4):
        raise ValueError(
            "cache: expected pages of fp8 keys a multiple of 4 bytes apart and from the start of "
            f"their memory, got strides {cache.stride()}, offset {cache.storage_offset()}"
        )
    if weights.shape not in ((requests * queries, heads), (requests, queries, heads)):
        raise ValueError(
            f"weights: expected [{requests * queries}, {heads}], got {tuple(weights.shape)}"
        )
    if context_lens.shape not in ((requests,), (requests, queries)):
        raise ValueError(
            f"context_lens: expected [{requests}] or [{requests}, {queries}], "
            f"got {tuple(context_lens.shape)}"
        )
    for name, whole in (("context_lens", context_lens), ("block_table", block_table)):
        if whole.is_floating_point():
            raise ValueError(f"{name}: expected an integer dtype, got {whole.dtype}")
    if block_table.dim() != 2 or block_table.shape[0] != requests:
        raise ValueError(
            f"block_table: expected [{requests}, pages], got {tuple(block_table.shape)}"
        )
    if max_len < 0:
        raise ValueError(f"max_len: expected at least 0, got {max_len}")
    check_devices(
        q, cache=cache, weights=weights, context_lens=context_lens, block_table=block_table
    )


def check_top_k_arguments(
    logits: torch.Tensor, k: int, start: torch.Tensor | None, end: torch.Tensor | None
) -> None:
    """Raise ValueError naming the first argument of `top_k` that does not fit."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits: expected floating point [tokens, columns], "
            f"got {logits.dtype} {tuple(logits.shape)}"
        )
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    _check_bounds(logits.shape[0], start, end)
    check_devices(logits, start=start, end=end)

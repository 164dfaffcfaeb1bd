"""What the functions take: checks that the references and the kernels share, and devices."""

import reprlib
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral

import torch

from glm5lab.attention import triton_interpreted

INDEX_DTYPES = (torch.int32, torch.int64)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INDEX_KEYS = (*FLOATS, torch.float8_e4m3fn)


class _Shown(reprlib.Repr):
    """Values as text, cut off where they are long; a tensor's stay on its device."""

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
        if isinstance(x, int) and x.bit_length() > 1000:  # Python writes out 4300 digits at most
            return f"of {x.bit_length()} bits"
        return super().repr1(x, level)


def shown(value: object) -> str:
    """Type and value for an error's text."""
    text = "" if value is None else " " + " ".join(_Shown().repr(value).split())
    return f"{type(value).__name__}{text}"


def named(dtypes: tuple[torch.dtype, ...]) -> str:
    """Names of dtypes for an error's text."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def check_tensors(optional: bool = False, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError naming the first that is no tensor; None passes where it is optional."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) and not (optional and tensor is None):
            raise ValueError(
                f"{name}: expected a tensor{' or None' if optional else ''}, got {shown(tensor)}"
            )


def check_integer(name: str, value: object, least: int | None = None) -> None:
    """Raise ValueError unless a value is an integer (a numpy one too), at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}: expected an integer, got {shown(value)}")
    if least is not None and int(value) < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def check_finite(name: str, value: object) -> None:
    """Raise ValueError unless a value is a number of Python's, finite in float32 too."""
    if not isinstance(value, (float, int)) or isinstance(value, bool):
        raise ValueError(f"{name}: expected a float, got {shown(value)}")
    if not abs(value) < 2**127:  # so that float32 holds it times log2(e) too
        raise ValueError(f"{name}: expected a finite float below 2**127, got {shown(value)}")


def check_width(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError where a tensor's last dimension has no element."""
    if not tensor.shape[-1]:
        raise ValueError(f"{name}: expected a width of at least 1, got 0")


def check_apart(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError where elements of a tensor share memory, as an expanded one's do."""
    reach = 0
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in sizes if pair[1] > 1):
        if stride <= reach and tensor.numel():
            raise ValueError(
                f"{name}: expected elements that share no memory, got shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}; it is written in place, so allocate it whole"
            )
        reach += stride * (size - 1)


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
    check_tensors(optional=True, start=start, end=end)
    for name, bound in (("start", start), ("end", end)):
        if bound is None:
            continue
        if bound.shape != (tokens,) or bound.dtype not in INTEGERS:
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
    check_tensors(q=q, k=k, weights=weights)
    check_tensors(optional=True, k_scale=k_scale)
    if q.dim() != 3:
        raise ValueError(f"q: expected [tokens, heads, width], got shape {tuple(q.shape)}")
    tokens, heads, width = q.shape
    _check_index_queries(q, heads)
    if k.dim() != 2 or k.shape[1] != width:
        raise ValueError(
            f"k: expected [keys, {width}] (the width of q), got shape {tuple(k.shape)}"
        )
    if k.dtype not in INDEX_KEYS:
        raise ValueError(f"k: expected {named(INDEX_KEYS)}, got {k.dtype}")
    _check_weights(weights)
    if weights.shape != (tokens, heads):
        raise ValueError(f"weights: expected [{tokens}, {heads}], got {tuple(weights.shape)}")
    if k_scale is not None and (k_scale.numel() != len(k) or k_scale.dtype != torch.float32):
        raise ValueError(
            f"k_scale: expected float32 [{len(k)}], got {k_scale.dtype} {tuple(k_scale.shape)}"
        )
    _check_bounds(tokens, start, end)
    check_devices(q, k=k, weights=weights, start=start, end=end, k_scale=k_scale)


def _check_index_queries(q: torch.Tensor, heads: int) -> None:
    if q.dtype not in INDEX_KEYS:
        raise ValueError(f"q: expected {named(INDEX_KEYS)}, got {q.dtype}")
    if not heads:
        raise ValueError("q: expected at least one head, got none")
    check_width("q", q)


def _check_weights(weights: torch.Tensor) -> None:
    if not weights.is_floating_point():
        raise ValueError(f"weights: expected a floating dtype, got {weights.dtype}")


def _check_index_cache(cache: torch.Tensor, width: int) -> None:
    row = width + 4 if cache.dtype == torch.uint8 else width
    if cache.dtype not in (*INDEX_KEYS, torch.uint8):
        raise ValueError(f"cache: expected {named((*INDEX_KEYS, torch.uint8))}, got {cache.dtype}")
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


def check_paged_mqa_logits_arguments(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
) -> None:
    """Raise ValueError naming the first argument of `paged_mqa_logits` that does not fit."""
    check_tensors(q=q, cache=cache, weights=weights)
    check_tensors(context_lens=context_lens, block_table=block_table)
    if q.dim() != 4:
        raise ValueError(
            f"q: expected [requests, queries, heads, width], got shape {tuple(q.shape)}"
        )
    requests, queries, heads, width = q.shape
    _check_index_queries(q, heads)
    _check_index_cache(cache, width)
    _check_weights(weights)
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
        if whole.dtype not in INTEGERS:
            raise ValueError(f"{name}: expected an integer dtype, got {whole.dtype}")
    if block_table.dim() != 2 or block_table.shape[0] != requests:
        raise ValueError(
            f"block_table: expected [{requests}, pages], got {tuple(block_table.shape)}"
        )
    check_integer("max_len", max_len, 0)
    check_devices(
        q, cache=cache, weights=weights, context_lens=context_lens, block_table=block_table
    )


def check_top_k_arguments(
    logits: torch.Tensor, k: int, start: torch.Tensor | None, end: torch.Tensor | None
) -> None:
    """Raise ValueError naming the first argument of `top_k` that does not fit."""
    check_tensors(logits=logits)
    if logits.dim() != 2 or logits.dtype not in FLOATS:
        raise ValueError(
            f"logits: expected {named(FLOATS)} [tokens, columns], "
            f"got {logits.dtype} {tuple(logits.shape)}"
        )
    check_integer("k", k, 1)
    _check_bounds(logits.shape[0], start, end)
    check_devices(logits, start=start, end=end)

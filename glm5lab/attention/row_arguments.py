"""What `row_formats` and `kv_cache` take: checks that the references and the kernels share."""

import torch

from glm5lab.attention.arguments import (
    FLOATS,
    INTEGERS,
    check_apart,
    check_devices,
    check_tensors,
    check_width,
    named,
    shown,
)

# An fp8_ds_mla row: e4m3 values, a float32 scale for each group of them, bfloat16 values.
FP8_LATENT, FP8_GROUP, FP8_ROPE = 512, 128, 64
FP8_ROW_BYTES = FP8_LATENT + 4 * (FP8_LATENT // FP8_GROUP) + 2 * FP8_ROPE
INDEX_SCALE_BYTES = 4


def check_store_arguments(
    cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor | None
) -> None:
    """Raise ValueError naming the first argument of `store_rows` that does not fit."""
    check_tensors(cache=cache, slots=slots, latent=latent)
    check_tensors(optional=True, rope=rope)
    _check_slots(slots)
    parts = {"latent": latent} if rope is None else {"latent": latent, "rope": rope}
    for name, part in parts.items():
        _check_stored(name, part, len(slots))
    check_width("latent", latent)
    widths = tuple(part.shape[1] for part in parts.values())
    if cache.dtype == torch.uint8 and widths != (FP8_LATENT, FP8_ROPE):
        raise ValueError(
            f"latent, rope: fp8_ds_mla rows need widths {FP8_LATENT} and {FP8_ROPE}, got {widths}"
        )
    _check_cache(cache, FP8_ROW_BYTES if cache.dtype == torch.uint8 else sum(widths))
    check_apart("cache", cache)
    check_devices(cache, slots=slots, latent=latent, rope=rope)


def check_gather_arguments(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """Raise ValueError naming the first argument of `gather` that does not fit."""
    check_tensors(cache=cache, slots=slots)
    _check_slots(slots)
    _check_cache(cache, FP8_ROW_BYTES if cache.dtype == torch.uint8 else None)
    if not cache.shape[-1] or (len(slots) and not cache.numel()):
        raise ValueError(f"cache: expected a row at least, got shape {tuple(cache.shape)}")
    if dtype is not None:
        _check_dtype(dtype)
    check_devices(cache, slots=slots)


def check_store_index_arguments(
    cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor
) -> None:
    """Raise ValueError naming the first argument of `store_index_keys` that does not fit."""
    check_tensors(cache=cache, slots=slots, keys=keys)
    _check_slots(slots)
    _check_stored("keys", keys, len(slots))
    check_width("keys", keys)
    width = keys.shape[1]
    row = width + INDEX_SCALE_BYTES
    if cache.dtype != torch.uint8 or cache.dim() != 3 or cache.shape[2] != row or width % 4:
        raise ValueError(
            f"cache: expected uint8 [pages, page_size, {row}] (keys of width {width}, a multiple "
            f"of 4), got {cache.dtype} {tuple(cache.shape)}"
        )
    if cache.stride()[1:] != (row, 1) or cache.stride(0) % 4:
        raise ValueError(
            f"cache: expected contiguous pages a multiple of 4 bytes apart, got strides "
            f"{cache.stride()}"
        )
    check_apart("cache", cache)
    check_devices(cache, slots=slots, keys=keys)


def check_pack_arguments(latent: torch.Tensor, rope: torch.Tensor) -> None:
    """Raise ValueError naming the first argument of `pack_fp8_rows` that does not fit."""
    _check_part("latent", latent, FP8_LATENT)
    _check_part("rope", rope, FP8_ROPE)
    if rope.shape[:-1] != latent.shape[:-1]:
        shape = [*latent.shape[:-1], FP8_ROPE]
        raise ValueError(f"rope: expected {shape}, beside latent, got {tuple(rope.shape)}")
    check_devices(latent, rope=rope)


def check_unpack_arguments(rows: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError naming the first argument of `unpack_fp8_rows` that does not fit."""
    check_tensors(rows=rows)
    if not rows.dim() or rows.shape[-1] != FP8_ROW_BYTES or rows.dtype != torch.uint8:
        raise ValueError(
            f"rows: expected uint8 [..., {FP8_ROW_BYTES}], got {rows.dtype} {tuple(rows.shape)}"
        )
    _check_dtype(dtype)


def _check_slots(slots: torch.Tensor) -> None:
    if slots.dim() != 1 or slots.dtype not in INTEGERS:
        raise ValueError(f"slots: expected integers [N], got {slots.dtype} {tuple(slots.shape)}")


def _check_stored(name: str, part: torch.Tensor, slots: int) -> None:
    """Raise ValueError unless what is stored has a row for each slot."""
    if part.dim() != 2 or part.shape[0] < slots or not part.is_floating_point():
        raise ValueError(
            f"{name}: expected floating point [{slots} or more, width], "
            f"got {part.dtype} {tuple(part.shape)}"
        )


def _check_cache(cache: torch.Tensor, width: int | None) -> None:
    """Raise ValueError unless a cache has rows of a width (None: of any)."""
    rows = cache.dim() in (2, 3) and cache.stride(-1) == 1
    if not rows or cache.shape[-1] != (width or cache.shape[-1]):
        shape = width or "width"
        raise ValueError(
            f"cache: expected [rows, {shape}] or [pages, page_size, {shape}] of {cache.dtype} with "
            f"contiguous rows, got shape {tuple(cache.shape)}, strides {cache.stride()}"
        )
    if cache.dtype not in (*FLOATS, torch.uint8):
        raise ValueError(f"cache: expected {named((*FLOATS, torch.uint8))}, got {cache.dtype}")


def _check_dtype(dtype: object) -> None:
    if dtype not in FLOATS:
        got = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise ValueError(f"dtype: expected {named(FLOATS)}, got {got}")


def _check_part(name: str, part: torch.Tensor, width: int) -> None:
    check_tensors(False, **{name: part})
    if not part.dim() or part.shape[-1] != width or not part.is_floating_point():
        raise ValueError(
            f"{name}: expected floating point [..., {width}], got {part.dtype} {tuple(part.shape)}"
        )

"""What `sparse_mla` takes: checks that the reference and the kernels share."""

from typing import Any

import torch

from glm5lab.attention.arguments import (
    FLOATS,
    INDEX_DTYPES,
    check_apart,
    check_devices,
    check_finite,
    check_integer,
    check_tensors,
    named,
    shown,
)
from glm5lab.attention.row_arguments import FP8_LATENT, FP8_ROPE, FP8_ROW_BYTES

# Queries, or their latent and their rotary part.
Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# Page numbers of requests, and the request of each token.
Table = tuple[torch.Tensor, torch.Tensor]


def check_sparse_mla_arguments(
    q: Query,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None,
    d_v: int,
    out: torch.Tensor | None,
    check: bool = False,
    table: Table | None = None,
) -> None:
    """Raise ValueError naming the first argument of `sparse_mla` that does not fit."""
    if isinstance(q, torch.Tensor):
        parts: tuple[torch.Tensor, ...] = (q,)
    elif _two_tensors(q):
        parts = q
    else:
        raise ValueError(f"q: expected a tensor or a tuple of two, got {shown(q)}")
    first = parts[0]
    check_tensors(kv=kv, indices=indices)
    check_tensors(optional=True, lengths=lengths, out=out)
    # A tensor would be read from the device, or be part of a kernel's addresses.
    check_finite("scale", scale)
    if not isinstance(check, bool):
        raise ValueError(f"check: expected True or False, got {shown(check)}")
    check_integer("d_v", d_v)
    width = _query_width(parts, d_v)
    tokens, heads = first.shape[:2]
    _check_rows(kv, first.dtype, width, d_v)
    if indices.dim() != 2 or indices.shape[0] != tokens:
        raise ValueError(f"indices: expected [{tokens}, top_k], got shape {tuple(indices.shape)}")
    if indices.dtype not in INDEX_DTYPES:
        raise ValueError(f"indices: expected int32 or int64, got {indices.dtype}")
    if not 0 < d_v <= width:
        raise ValueError(f"d_v: expected 1 to {width} (the width of q), got {d_v}")
    if lengths is not None and (lengths.shape != (tokens,) or lengths.dtype not in INDEX_DTYPES):
        raise ValueError(
            f"lengths: expected int32 or int64 [{tokens}], "
            f"got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if out is not None:
        _check_out(out, (tokens, heads, d_v), first.dtype)
    check_devices(first, kv=kv, indices=indices, lengths=lengths, out=out)
    if table is not None:
        _check_table(table, tokens, kv, check)
    elif check:
        _check_slots(indices, kv[..., 0].numel())


def _check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out.shape != shape:
        raise ValueError(f"out: expected {list(shape)}, got shape {tuple(out.shape)}")
    if out.dtype != dtype:
        raise ValueError(f"out: expected {dtype} (the dtype of q), got {out.dtype}")
    check_apart("out", out)


def _two_tensors(x: Any) -> bool:
    two = isinstance(x, tuple) and len(x) == 2
    return bool(two and isinstance(x[0], torch.Tensor) and isinstance(x[1], torch.Tensor))


def _query_width(parts: tuple[torch.Tensor, ...], d_v: int) -> int:
    """Columns of the queries; ValueError where they, or their two parts, do not fit."""
    first = parts[0]
    if first.dim() != 3:
        raise ValueError(f"q: expected [tokens, heads, width], got shape {tuple(first.shape)}")
    if first.dtype not in FLOATS:
        raise ValueError(f"q: expected {named(FLOATS)}, got {first.dtype}")
    if not first.shape[1]:
        raise ValueError("q: expected at least one head, got none")
    return first.shape[2] + (_rope_width(*parts, d_v) if len(parts) == 2 else 0)


def _check_rows(kv: torch.Tensor, dtype: torch.dtype, width: int, d_v: int) -> None:
    """Raise ValueError unless kv has rows for queries of a dtype and width."""
    if kv.dtype == torch.uint8:
        _check_fp8_rows(kv, width, d_v)
    elif kv.dim() not in (2, 3) or kv.shape[-1] != width:
        raise ValueError(
            f"kv: expected [rows, {width}] or [pages, page_size, {width}] "
            f"(the width of q), got shape {tuple(kv.shape)}"
        )
    # float64 is for the reference alone, which judges kernels over the rows they had.
    wide = dtype == torch.float64 and kv.dtype in FLOATS
    if kv.dtype not in (dtype, torch.uint8) and not wide:
        raise ValueError(f"kv: expected {dtype} (the dtype of q) or uint8, got {kv.dtype}")
    if kv.stride(-1) != 1:
        raise ValueError(
            "kv: expected a contiguous last dimension, got strides "
            f"{tuple(kv.stride())}; pass kv.contiguous()"
        )


def _check_table(table: Table, tokens: int, kv: torch.Tensor, check: bool) -> None:
    if not _two_tensors(table):
        raise ValueError(f"table: expected a tuple of two tensors, got {shown(table)}")
    pages, requests = table
    if pages.dim() != 2 or requests.shape != (tokens,) or kv.dim() != 3:
        raise ValueError(
            f"table: expected [requests, pages] and [{tokens}] beside kv in pages, got shapes "
            f"{tuple(pages.shape)} and {tuple(requests.shape)} beside {tuple(kv.shape)}"
        )
    for part in table:
        if (part.dtype, part.device) != (torch.int32, kv.device):
            raise ValueError(
                f"table: expected int32 on {kv.device}, got {part.dtype} on {part.device}"
            )
    if check:
        raise ValueError("check: expected False beside a table, whose places it cannot judge")


def _rope_width(latent: torch.Tensor, rope: torch.Tensor, d_v: int) -> int:
    """Columns of a query's second part; ValueError where the two parts do not belong together."""
    shape = (*latent.shape[:2], d_v)
    if latent.shape != shape or rope.dim() != 3 or rope.shape[:2] != shape[:2]:
        raise ValueError(
            f"q: expected parts {list(shape)} and [{shape[0]}, {shape[1]}, rope], "
            f"got shapes {tuple(latent.shape)} and {tuple(rope.shape)}"
        )
    if (rope.dtype, rope.device) != (latent.dtype, latent.device):
        raise ValueError(
            f"q: expected parts of one dtype and device, got {latent.dtype} on {latent.device} "
            f"and {rope.dtype} on {rope.device}"
        )
    return rope.shape[2]


def _check_fp8_rows(kv: torch.Tensor, width: int, d_v: int) -> None:
    if kv.dim() not in (2, 3) or kv.shape[-1] != FP8_ROW_BYTES:
        raise ValueError(
            f"kv: expected fp8_ds_mla rows of {FP8_ROW_BYTES} bytes, got shape {tuple(kv.shape)}"
        )
    if (width, d_v) != (FP8_LATENT + FP8_ROPE, FP8_LATENT):
        raise ValueError(
            f"q: fp8_ds_mla rows need a width of {FP8_LATENT + FP8_ROPE} and d_v {FP8_LATENT}, "
            f"got {width} and {d_v}"
        )


def _check_slots(indices: torch.Tensor, slots: int) -> None:
    wrong = (indices < -1) | (indices >= slots)
    if bool(wrong.any()):
        token, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"indices[{token}, {place}] is {int(indices[token, place])}: expected -1 (empty) or a "
            f"slot below {slots}, the size of kv"
        )

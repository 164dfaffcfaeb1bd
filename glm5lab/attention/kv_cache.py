"""Writing rows and index keys into a paged cache, and reading rows back, as Triton kernels.

Same signatures as `row_formats.store_rows`, `gather` and `store_index_keys`, where the formats and
the quantization rule stand. One program a token. e4m3 bytes are made and read with integer
operations, so that every device, Ampere and Triton's interpreter included, runs the same code to
the same bits; a row is small beside what attention does with it.
"""

from itertools import product

import torch
import triton
import triton.language as tl

from glm5lab.attention.arguments import check_kernels_run_on, on_device_of
from glm5lab.attention.compile import Compilation
from glm5lab.attention.row_arguments import (
    FP8_LATENT,
    FP8_ROPE,
    check_gather_arguments,
    check_store_arguments,
    check_store_index_arguments,
)
from glm5lab.attention.row_formats import ROW_DTYPES, page_parts, pages_of
from glm5lab.attention.tiles import Device

LEAST = tl.constexpr(1e-4)
E4M3_MAX = tl.constexpr(448.0)
# Of an fp8_ds_mla row: where scales and rotary part begin, in elements of their own.
SCALES_AT = tl.constexpr(128)
ROPE_AT = tl.constexpr(264)


@triton.jit
def _place(slot, page_size, stride_page, stride_row):
    """Offset of a slot; a cache may exceed 2**31 elements, so slots are int64."""
    slot = slot.to(tl.int64)
    return slot // page_size * stride_page + slot % page_size * stride_row


@triton.jit
def _magnitude(b_x):
    """|x|, and 0 where x is NaN: what counts for the largest magnitude."""
    return tl.where(b_x == b_x, tl.abs(b_x), 0.0)


@triton.jit
def _power_of_two(b_x):
    """The least power of two that is not below x, positive normal float32."""
    b_bits = (b_x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(b_x):
    """float32 as e4m3 bytes: to nearest even, at most 448, NaN to 0x7F without a sign."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_abs = b_bits & 0x7FFFFFFF
    # Normal numbers: a half of the last kept place is added, a bit less where that place is even;
    # the carry may run into the exponent. The exponent's bias falls from 127 to 7.
    b_code = (b_abs + 0x7FFFF + ((b_abs >> 20) & 1) - (120 << 23)) >> 20
    # Below 2**-6 a step is 2**-9: the last place of a float32 between 2**14 and 2**15.
    b_steps = (b_abs.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    b_code = tl.where(b_abs < 0x3C800000, b_steps - 0x46800000, tl.minimum(b_code, 0x7E))
    b_code = tl.where(b_abs > 0x7F800000, 0x7F, b_code | ((b_bits >> 24) & 0x80))
    return b_code.to(tl.uint8)


@triton.jit
def _value(b_byte):
    """e4m3 bytes as float32, exact."""
    b_bits = b_byte.to(tl.uint16)
    # The same fields as fp16's, four places further down: value / 256.
    b_half = (((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((b_bits & 0x7F) == 0x7F, float("nan"), b_half.to(tl.float32) * 256.0)


@triton.jit(do_not_specialize=["page_size"], do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(
    latent_ptr,
    rope_ptr,
    slots_ptr,
    cache_ptr,
    page_size,
    stride_latent,
    stride_rope,
    stride_page,
    stride_row,
    D_V: tl.constexpr,
    D_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Copy one row, in the cache's dtype."""
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_n)
    if slot >= 0:
        o_v = tl.arange(0, BLOCK_V)
        p_row = cache_ptr + _place(slot, page_size, stride_page, stride_row)
        # [BLOCK_V]
        b_v = tl.load(latent_ptr + i_n * stride_latent + o_v, mask=o_v < D_V)
        tl.store(p_row + o_v, b_v.to(cache_ptr.dtype.element_ty), mask=o_v < D_V)
        if D_ROPE > 0:
            o_r = tl.arange(0, BLOCK_R)
            # [BLOCK_R]
            b_r = tl.load(rope_ptr + i_n * stride_rope + o_r, mask=o_r < D_ROPE)
            tl.store(p_row + D_V + o_r, b_r.to(cache_ptr.dtype.element_ty), mask=o_r < D_ROPE)


@triton.jit(
    do_not_specialize=["page_size", "stride_page", "stride_row"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _store_fp8_kernel(
    latent_ptr,
    rope_ptr,
    slots_ptr,
    byte_ptr,
    scale_ptr,
    tail_ptr,
    page_size,
    stride_latent,
    stride_rope,
    stride_page,
    stride_row,
):
    """Quantize one fp8_ds_mla row: one cache under three pointers (uint8, float32, bfloat16).

    Row and page strides count 16-byte units, which tells the compiler that every row is aligned.
    """
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_n)
    if slot >= 0:
        o_g = tl.arange(0, 4)
        o_v = o_g[:, None] * 128 + tl.arange(0, 128)[None, :]
        o_r = tl.arange(0, 64)
        o_row = _place(slot, page_size, stride_page, stride_row)
        # [4, 128]
        b_v = tl.load(latent_ptr + i_n * stride_latent + o_v).to(tl.float32)
        b_amax = tl.max(_magnitude(b_v), 1)
        b_scale = _power_of_two(tl.maximum(tl.div_rn(b_amax, E4M3_MAX), LEAST))
        tl.store(byte_ptr + o_row * 16 + o_v, _e4m3(tl.div_rn(b_v, b_scale[:, None])))
        tl.store(scale_ptr + o_row * 4 + SCALES_AT + o_g, b_scale)
        # [64]
        b_r = tl.load(rope_ptr + i_n * stride_rope + o_r)
        tl.store(tail_ptr + o_row * 8 + ROPE_AT + o_r, b_r.to(tail_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["page_size"], do_not_specialize_on_alignment=["slots_ptr"])
def _store_index_kernel(
    keys_ptr,
    slots_ptr,
    byte_ptr,
    scale_ptr,
    page_size,
    stride_keys,
    stride_page,
    stride_scale_page,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Quantize one index key; its page holds keys, then scales."""
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_n)
    if slot >= 0:
        o_d = tl.arange(0, BLOCK_D)
        m_d = o_d < DIM
        # [BLOCK_D]
        b_k = tl.load(keys_ptr + i_n * stride_keys + o_d, mask=m_d, other=0.0).to(tl.float32)
        amax = tl.maximum(tl.max(_magnitude(b_k), 0), LEAST)
        scale = _power_of_two(tl.div_rn(amax, E4M3_MAX))
        p_key = byte_ptr + _place(slot, page_size, stride_page, DIM)
        tl.store(p_key + o_d, _e4m3(tl.div_rn(b_k, scale)), mask=m_d)
        tl.store(scale_ptr + _place(slot, page_size, stride_scale_page, 1), scale)


@triton.jit(do_not_specialize=["page_size"], do_not_specialize_on_alignment=["slots_ptr"])
def _gather_kernel(
    cache_ptr,
    slots_ptr,
    out_ptr,
    page_size,
    stride_page,
    stride_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the row of one slot, in the output's dtype."""
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_n)
    o = tl.arange(0, BLOCK)
    p_row = cache_ptr + _place(tl.maximum(slot, 0), page_size, stride_page, stride_row)
    # [BLOCK]
    b_x = tl.load(p_row + o, mask=(o < WIDTH) & (slot >= 0), other=0.0)
    tl.store(out_ptr + i_n * WIDTH + o, b_x.to(out_ptr.dtype.element_ty), mask=o < WIDTH)


@triton.jit(
    do_not_specialize=["page_size", "stride_page", "stride_row"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _gather_fp8_kernel(
    byte_ptr, scale_ptr, tail_ptr, slots_ptr, out_ptr, page_size, stride_page, stride_row
):
    """The values of one fp8_ds_mla row; pointers and strides as in `_store_fp8_kernel`."""
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_n)
    o_g = tl.arange(0, 4)
    o_v = o_g[:, None] * 128 + tl.arange(0, 128)[None, :]
    o_r = tl.arange(0, 64)
    o_row = _place(tl.maximum(slot, 0), page_size, stride_page, stride_row)
    # [4, 128], [4] and [64]
    b_v = tl.load(byte_ptr + o_row * 16 + o_v, mask=(o_v >= 0) & (slot >= 0), other=0)
    m_s = (o_g >= 0) & (slot >= 0)
    b_scale = tl.load(scale_ptr + o_row * 4 + SCALES_AT + o_g, mask=m_s, other=0.0)
    b_r = tl.load(tail_ptr + o_row * 8 + ROPE_AT + o_r, mask=(o_r >= 0) & (slot >= 0), other=0.0)
    b_v = _value(b_v) * b_scale[:, None]
    p_out = out_ptr + i_n * 576
    tl.store(p_out + o_v, b_v.to(out_ptr.dtype.element_ty))
    tl.store(p_out + 512 + o_r, b_r.to(out_ptr.dtype.element_ty))


def store_rows(
    cache: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor | None = None,
) -> None:
    """Write rows [latent | rope] into the slots of a cache.

    As `row_formats.store_rows`, without float64. Slots are not checked: one beyond the cache's must
    not be given, since its row is written to whatever memory it points to.

    Args:
        cache: [S, width] or [P, page_size, width], float32, bfloat16 or float16; or uint8 of width
            656, fp8_ds_mla, rows and pages aligned to 16 bytes. Written in place; rows are
            contiguous and share no memory.
        slots: [N] integers; a negative one marks padding and is left out.
        latent: [N or more, latent] float32, bfloat16 or float16; rows beyond N are padding.
        rope: as latent, [N or more, rope], or None for rows without it.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_store_arguments(cache, slots, latent, rope)
    _check_dtypes(latent=latent, rope=rope)
    check_kernels_run_on("cache", cache)
    pages, latent = pages_of(cache), _contiguous_rows(latent)
    rope_or_any = latent if rope is None else _contiguous_rows(rope)
    if not len(slots):
        return
    strides = (latent.stride(0), rope_or_any.stride(0))
    if cache.dtype == torch.uint8:
        with on_device_of(cache):
            _store_fp8_kernel[(len(slots),)](
                latent,
                rope_or_any,
                slots.contiguous(),
                *_fp8_views(pages),
                pages.shape[1],
                *strides,
                pages.stride(0) // 16,
                pages.stride(1) // 16,
            )
        return
    _check_dtypes(cache=cache)
    d_rope = 0 if rope is None else rope.shape[1]
    with on_device_of(cache):
        _store_kernel[(len(slots),)](
            latent,
            rope_or_any,
            slots.contiguous(),
            pages,
            pages.shape[1],
            *strides,
            pages.stride(0),
            pages.stride(1),
            D_V=latent.shape[1],
            D_ROPE=d_rope,
            BLOCK_V=triton.next_power_of_2(latent.shape[1]),
            BLOCK_R=triton.next_power_of_2(max(d_rope, 1)),
        )


def store_index_keys(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Quantize index keys and write them into the slots of their cache.

    As `row_formats.store_index_keys`, without float64. Slots are not checked: one beyond the
    cache's must not be given, since its key is written to whatever memory it points to.

    Args:
        cache: uint8 [P, page_size, width + 4], see `row_formats.page_parts`; written in place.
        slots: [N] integers; a negative one marks padding and is left out.
        keys: [N or more, width] float32, bfloat16 or float16; rows beyond N are padding.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_store_index_arguments(cache, slots, keys)
    _check_dtypes(keys=keys)
    check_kernels_run_on("cache", cache)
    if not len(slots):
        return
    keys, dim = _contiguous_rows(keys), keys.shape[1]
    codes, scales = page_parts(cache, dim)
    assert scales is not None
    with on_device_of(cache):
        _store_index_kernel[(len(slots),)](
            keys,
            slots.contiguous(),
            codes.view(torch.uint8),
            scales,
            cache.shape[1],
            keys.stride(0),
            codes.stride(0),
            scales.stride(0),
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=1,
        )


def gather(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The values in the slots of a cache as contiguous rows: the inverse of `store_rows`.

    As `row_formats.gather`, without float64. Slots are not checked: one beyond the cache's must not
    be given, since whatever memory it points to is read.

    Args:
        cache: as for `store_rows`; it has a row at least, unless no slot is given.
        slots: [N] integers; a negative one gives a row of zeros.
        dtype: of the result, float32, bfloat16 or float16; the cache's own where None, bfloat16 for
            fp8_ds_mla.

    Returns:
        [N, width], or [N, 576] from fp8_ds_mla rows.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_gather_arguments(cache, slots, dtype)
    pages, fp8 = pages_of(cache), cache.dtype == torch.uint8
    dtype = dtype or (torch.bfloat16 if fp8 else cache.dtype)
    width = FP8_LATENT + FP8_ROPE if fp8 else cache.shape[-1]
    out = torch.empty(len(slots), width, dtype=dtype, device=cache.device)
    _check_dtypes(dtype=out)
    check_kernels_run_on("cache", cache)
    if not len(slots):
        return out
    if fp8:
        with on_device_of(cache):
            _gather_fp8_kernel[(len(slots),)](
                *_fp8_views(pages),
                slots.contiguous(),
                out,
                pages.shape[1],
                pages.stride(0) // 16,
                pages.stride(1) // 16,
            )
        return out
    _check_dtypes(cache=cache)
    with on_device_of(cache):
        _gather_kernel[(len(slots),)](
            pages,
            slots.contiguous(),
            out,
            pages.shape[1],
            pages.stride(0),
            pages.stride(1),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
        )
    return out


def _fp8_views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8_ds_mla pages as bytes, float32 and bfloat16.

    Raises:
        ValueError: rows or pages are not aligned to 16 bytes.
    """
    if pages.stride(0) % 16 or pages.stride(1) % 16 or pages.data_ptr() % 16:
        raise ValueError(
            "cache: expected fp8_ds_mla rows and pages aligned to 16 bytes, "
            f"got strides {pages.stride()}"
        )
    return pages, pages.view(torch.float32), pages.view(torch.bfloat16)


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_dtypes(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError naming the first tensor whose dtype the kernels do not know."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in ROW_DTYPES:
            raise ValueError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")


def compilations(device: Device) -> list[Compilation]:
    """What the functions above launch for GLM-5: bfloat16 rows and keys, slots as vLLM's int64."""
    fp8 = {"byte_ptr": "*u8", "scale_ptr": "*fp32", "tail_ptr": "*bf16"}
    rows = {"latent_ptr": "*bf16", "rope_ptr": "*bf16", "slots_ptr": "*i64"}
    found = [Compilation("store fp8_ds_mla", "_store_fp8_kernel", rows | fp8, {})]
    for rope in (64, 0):
        constants = {"D_V": 512, "D_ROPE": rope, "BLOCK_V": 512, "BLOCK_R": max(rope, 1)}
        types = rows | {"cache_ptr": "*bf16"}
        found.append(Compilation(f"store bf16 rope {rope}", "_store_kernel", types, constants))
    types = {"keys_ptr": "*bf16", "slots_ptr": "*i64", "byte_ptr": "*u8", "scale_ptr": "*fp32"}
    constants = {"DIM": 128, "BLOCK_D": 128}
    found.append(Compilation("store index keys", "_store_index_kernel", types, constants, warps=1))
    for slots, out in product(("*i32", "*i64"), ("*bf16", "*fp32")):
        types = {"slots_ptr": slots, "out_ptr": out}
        name = f"{out[1:]} by {slots[1:]}"
        found.append(
            Compilation(f"gather fp8_ds_mla as {name}", "_gather_fp8_kernel", types | fp8, {})
        )
        found.append(
            Compilation(
                f"gather bf16 as {name}",
                "_gather_kernel",
                types | {"cache_ptr": "*bf16"},
                {"WIDTH": 576, "BLOCK": 1024},
            )
        )
    return found

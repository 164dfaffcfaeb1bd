"""How rows lie in a cache, in plain PyTorch: packing, storing, gathering, and their checks.

A latent row is [latent | rope] in a 16- or 32-bit dtype, or fp8_ds_mla: 656 bytes that hold 512
e4m3 values, 4 float32 scales for 128 of them each, and 64 bfloat16 values. An index-key page holds
all its e4m3 keys first, then one float32 scale a key. A cache is rows [S, width], or pages
[P, page_size, width] with any strides between pages; slot s is row s, or page s // page_size, row
s % page_size.

Both fp8 formats are vLLM 0.33.0's to the bit for bfloat16 input. Its rule, read in its machine code
(_C_stable_libtorch, sm_90: concat_and_cache_ds_mla_kernel, indexer_k_quant_and_cache_kernel) and in
https://github.com/vllm-project/vllm/pull/49435, in float32 throughout:

    fp8_ds_mla   scale = 2 ** ceil(log2(max(amax / 448, 1e-4)))   of each group of 128
    index keys   scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))   of each key
    both         value = e4m3(x / scale), to nearest even, at most 448, NaN to 0x7F

amax ignores NaN, and divisions are IEEE's. Before that pull request the scale of fp8_ds_mla rows
was amax / 448 itself. vLLM takes a float16's bits for an integer when it looks for amax; here
float16 and float32 follow the rule.
"""

import torch

from glm5lab.attention.row_arguments import (
    FP8_GROUP,
    FP8_LATENT,
    FP8_ROPE,
    check_gather_arguments,
    check_pack_arguments,
    check_store_arguments,
    check_store_index_arguments,
    check_unpack_arguments,
)

E4M3_MAX = 448.0
LEAST = 1e-4

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pages_of(cache: torch.Tensor) -> torch.Tensor:
    """The cache with its page dimension, one page where it has none."""
    return cache if cache.dim() == 3 else cache[None]


def _quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes of x / scale: to nearest even, saturated, every NaN 0x7F."""
    values = (x / scale).clamp(-E4M3_MAX, E4M3_MAX)
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes)


def _amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude along the last dimension, which stays; NaN does not count."""
    return x.abs().nan_to_num(0.0, posinf=float("inf")).amax(-1, keepdim=True)


def _over_448(x: torch.Tensor) -> torch.Tensor:
    # By a tensor: PyTorch's CUDA kernels multiply by the reciprocal of a number.
    return x / torch.full_like(x, E4M3_MAX)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below x, positive normal float32.

    By bits, where vLLM rounds log2 to float32. The two differ only within 2**-18 above a power of
    two, where no quotient of a 16-bit number and 448 lies.
    """
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def pack_fp8_rows(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """fp8_ds_mla rows, to the rule above.

    Args:
        latent: floating point [..., 512].
        rope: floating point [..., 64].

    Returns:
        uint8 [..., 656]; see `unpack_fp8_rows`.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_pack_arguments(latent, rope)
    groups = latent.float().unflatten(-1, (-1, FP8_GROUP))
    scales = _power_of_two(_over_448(_amax(groups)).clamp_min(LEAST))
    codes = _quantize(groups, scales).flatten(-2)
    tail = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([codes, scales.squeeze(-1).contiguous().view(torch.uint8), tail], -1)


def unpack_fp8_rows(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of fp8_ds_mla rows.

    Args:
        rows: uint8 [..., 656]: 512 e4m3 values, 4 float32 scales (one for 128 values each, in
            order), 64 bfloat16 values.
        dtype: of the result: float64, float32, bfloat16 or float16.

    Returns:
        [..., 576]: latent (value times scale) and rotary part.

    Raises:
        ValueError: an argument has the wrong shape or dtype; the message names it.
    """
    check_unpack_arguments(rows, dtype)
    latent, scales, rope = rows.split([FP8_LATENT, 16, 2 * FP8_ROPE], dim=-1)
    values = latent.contiguous().view(torch.float8_e4m3fn).to(dtype)
    groups = values.unflatten(-1, (-1, FP8_GROUP))
    scaled = groups * scales.contiguous().view(torch.float32).to(dtype)[..., None]
    return torch.cat([scaled.flatten(-2), rope.contiguous().view(torch.bfloat16).to(dtype)], -1)


def store_rows(
    cache: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor | None = None,
) -> None:
    """Write rows [latent | rope] into the slots of a cache.

    Slots beyond the cache's must not be given: here they are an IndexError of PyTorch's or, on a
    GPU, a failed assertion in its kernel; `kv_cache` does not check them.

    Args:
        cache: [S, width] or [P, page_size, width], float64, float32, bfloat16 or float16, width
            that of latent and rope together; or uint8 of width 656, fp8_ds_mla. Written in place;
            rows are contiguous and share no memory.
        slots: [N] integers; a negative one marks padding and is left out.
        latent: floating point [N or more, latent]; rows beyond N are padding.
        rope: floating point [N or more, rope], or None for rows without it.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_store_arguments(cache, slots, latent, rope)
    kept = slots >= 0
    latent = latent[: len(slots)][kept]
    rope = latent[:, :0] if rope is None else rope[: len(slots)][kept]
    if cache.dtype == torch.uint8:
        rows = pack_fp8_rows(latent, rope)
    else:
        rows = torch.cat([latent.to(cache.dtype), rope.to(cache.dtype)], -1)
    pages, slots = pages_of(cache), slots[kept].long()
    pages[slots // pages.shape[1], slots % pages.shape[1]] = rows


def gather_rows(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a cache by slot number, as they are stored.

    Args:
        kv: [rows, width], or [pages, page_size, width] with any strides between pages.
        slots: integer, any shape, each at least 0.

    Returns:
        [*slots.shape, width], in kv's dtype.
    """
    pages, slots = pages_of(kv), slots.long()
    return pages[slots // pages.shape[1], slots % pages.shape[1]]


def gather(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The values in the slots of a cache as contiguous rows: the inverse of `store_rows`.

    Slots beyond the cache's must not be given, see `store_rows`.

    Args:
        cache: [S, width] or [P, page_size, width], float64, float32, bfloat16 or float16, or
            fp8_ds_mla; rows are contiguous. It has a row at least, unless no slot is given.
        slots: [N] integers; a negative one gives a row of zeros.
        dtype: of the result, float64, float32, bfloat16 or float16; the cache's own where None,
            bfloat16 for fp8_ds_mla. Values of fp8_ds_mla rows are multiplied in float32, and in
            float64 for float64.

    Returns:
        [N, width], or [N, 576] from fp8_ds_mla rows.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_gather_arguments(cache, slots, dtype)
    rows = gather_rows(cache, slots.clamp_min(0))
    if cache.dtype == torch.uint8:
        dtype = dtype or torch.bfloat16
        rows = unpack_fp8_rows(rows, torch.float64 if dtype == torch.float64 else torch.float32)
    return rows.to(dtype or cache.dtype).masked_fill(slots[:, None] < 0, 0.0)


def page_parts(cache: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and scales of an index-key cache, both views of it.

    Args:
        cache: [pages, page_size, width + 4] bytes: a page holds all its e4m3 keys first, then
            their float32 scales, as vLLM's indexer_k_quant_and_cache writes them; or
            [pages, page_size, width] of a plain dtype, without scales.
        width: the width of a key.

    Returns:
        Keys [pages, page_size, width], and float32 scales [pages, page_size] or None.
    """
    if cache.dtype != torch.uint8:
        return cache, None
    pages, page_size, row = cache.shape
    flat = cache.as_strided((pages, page_size * row), (cache.stride(0), 1))
    keys = flat[:, : page_size * width].view(torch.float8_e4m3fn)
    scales = flat[:, page_size * width :].view(torch.float32)
    return keys.unflatten(1, (page_size, width)), scales


def quantize_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index keys or queries in e4m3, to the rule above.

    Args:
        x: floating point [..., width].

    Returns:
        Values [..., width] float8_e4m3fn, and their scales [...] float32.
    """
    x = x.float()
    scale = _power_of_two(_over_448(_amax(x).clamp_min(LEAST)))
    return _quantize(x, scale).view(torch.float8_e4m3fn), scale[..., 0]


def store_index_keys(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Quantize index keys and write them into the slots of their cache.

    Slots beyond the cache's must not be given, see `store_rows`.

    Args:
        cache: uint8 [P, page_size, width + 4], see `page_parts`; written in place.
        slots: [N] integers; a negative one marks padding and is left out.
        keys: floating point [N or more, width]; rows beyond N are padding.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device; the message names it.
    """
    check_store_index_arguments(cache, slots, keys)
    kept = slots >= 0
    values, scale = quantize_index(keys[: len(slots)][kept])
    slots = slots[kept].long()
    codes, scales = page_parts(cache, keys.shape[1])
    assert scales is not None
    place = (slots // cache.shape[1], slots % cache.shape[1])
    codes.view(torch.uint8)[place] = values.view(torch.uint8)
    scales[place] = scale

"""Lightning-indexer logits against contiguous keys (prefill) as a Triton kernel.

Same signature as `reference.mqa_logits`; `indexer_paged` does it for a paged cache. One matrix
product holds a block of keys (rows) against all heads of a few queries (columns), so that the sum
over heads stays within the threads that own a key's row. Keys and queries are fp8 (e4m3), or bf16,
fp16 or fp32. A device without fp8 matrix units decodes e4m3 bytes to fp16, which is exact.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from glm5lab.attention import triton_interpreted
from glm5lab.attention.arguments import (
    check_integer,
    check_kernels_run_on,
    check_mqa_logits_arguments,
    int32_bounds,
    on_device_of,
)
from glm5lab.attention.compile import Compilation
from glm5lab.attention.tiles import INTERPRETER, Device, device_of

# e4m3 bits moved into a float16 give the value times 2**-8, for each of the two operands.
DECODED_SCALE = tl.constexpr(65536.0)
RUNTIME = ["tokens", "keys", "chunk", "stride_out"]


@triton.jit
def operand(b_x, DECODE: tl.constexpr, DOT_FP32: tl.constexpr):
    """A loaded tile in the dtype that is multiplied; see DECODED_SCALE for DECODE."""
    if DECODE:
        b_bits = b_x.to(tl.uint16)
        # Sign, exponent and mantissa stand in the same order in e4m3 and in float16.
        b_x = (((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    if DOT_FP32:
        b_x = b_x.to(tl.float32)
    return b_x


@triton.jit
def tile_logits(
    b_k,
    b_q,
    b_w,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DECODE: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """[BLOCK_S, BLOCK_T]: sum over heads of weight * ReLU(key . query)."""
    b_k = operand(b_k, DECODE, DOT_FP32)
    # [BLOCK_S, BLOCK_T * BLOCK_H]
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
    b_s = tl.reshape(b_s, (BLOCK_S, BLOCK_T, BLOCK_H))
    b_s = tl.sum(tl.maximum(b_s, 0.0) * b_w[None, :, :], 2)
    if DECODE:
        b_s = b_s * DECODED_SCALE
    return b_s


@triton.jit
def fill(p_out, m_t, first, last, BLOCK_S: tl.constexpr):
    """Write -inf to columns first..last of the rows p_out [1, BLOCK_T]."""
    for i_s in range(first, last, BLOCK_S):
        o_s = i_s + tl.arange(0, BLOCK_S)
        b_fill = tl.full([BLOCK_S, p_out.shape[1]], float("-inf"), tl.float32)
        tl.store(p_out + o_s[:, None], b_fill, mask=(o_s < last)[:, None] & m_t[None, :])


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=["start_ptr", "end_ptr"])
def _mqa_logits_kernel(
    q_ptr,
    k_ptr,
    scale_ptr,
    weights_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    tokens,
    keys,
    chunk,
    stride_qt,
    stride_qh,
    stride_k,
    stride_w,
    stride_out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    CLEAN: tl.constexpr,
    COMPACT: tl.constexpr,
    DECODE: tl.constexpr,
    DOT_FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_t = tl.program_id(0) * BLOCK_T
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, keys)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_T * BLOCK_H)
    o_nt = i_t + o_n // BLOCK_H
    o_nh = o_n % BLOCK_H
    o_t = i_t + tl.arange(0, BLOCK_T)
    o_h = tl.arange(0, BLOCK_H)
    m_t = o_t < tokens
    m_d = o_d < DIM

    # [BLOCK_T * BLOCK_H, BLOCK_D]
    p_q = q_ptr + o_nt.to(tl.int64)[:, None] * stride_qt + o_nh[:, None] * stride_qh
    m_n = (o_nt < tokens) & (o_nh < HEADS)
    b_q = tl.load(p_q + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
    b_q = operand(b_q, DECODE, DOT_FP32)
    # [BLOCK_T, BLOCK_H]
    p_w = weights_ptr + o_t.to(tl.int64)[:, None] * stride_w + o_h[None, :]
    b_w = tl.load(p_w, mask=m_t[:, None] & (o_h < HEADS)[None, :], other=0.0)

    low = first
    high = last
    if HAS_START:
        b_start = tl.load(start_ptr + o_t, mask=m_t, other=keys)
        # A block begins at a multiple of BLOCK_S, so that chunks do not overlap.
        seen = tl.minimum(tl.maximum(tl.min(b_start, 0), first), last)
        low = first + (seen - first) // BLOCK_S * BLOCK_S
    if HAS_END:
        b_end = tl.load(end_ptr + o_t, mask=m_t, other=0)
        high = tl.minimum(tl.maximum(tl.max(b_end, 0), low), last)

    p_out = out_ptr + o_t.to(tl.int64)[None, :] * stride_out
    if COMPACT:
        p_out -= b_start[None, :]
        b_end = tl.minimum(b_end, b_start + stride_out)  # its row ends there
    if CLEAN:
        fill(p_out, m_t, first, low, BLOCK_S)
    for i_s in tl.range(low, high, BLOCK_S, num_stages=STAGES):
        o_s = i_s + tl.arange(0, BLOCK_S)
        m_s = o_s < last
        # [BLOCK_S, BLOCK_D]
        p_k = k_ptr + o_s.to(tl.int64)[:, None] * stride_k + o_d[None, :]
        b_k = tl.load(p_k, mask=m_s[:, None] & m_d[None, :], other=0.0)
        b_s = tile_logits(b_k, b_q, b_w, BLOCK_S, BLOCK_T, BLOCK_H, DECODE, DOT_FP32)
        if HAS_SCALE:
            b_s = b_s * tl.load(scale_ptr + o_s, mask=m_s, other=0.0)[:, None]
        if HAS_START:
            b_s = tl.where(o_s[:, None] >= b_start[None, :], b_s, float("-inf"))
        if HAS_END:
            b_s = tl.where(o_s[:, None] < b_end[None, :], b_s, float("-inf"))
        m_out = m_s[:, None] & m_t[None, :]
        if COMPACT:
            m_out &= (o_s[:, None] >= b_start[None, :]) & (o_s[:, None] < b_end[None, :])
        tl.store(p_out + o_s[:, None], b_s, mask=m_out)
    if CLEAN:
        done = low + (high - low + BLOCK_S - 1) // BLOCK_S * BLOCK_S
        fill(p_out, m_t, done, last, BLOCK_S)


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: keys and query-head columns a block, warps, pipeline stages."""

    keys: int
    columns: int
    warps: int
    stages: int


# fp8 on Hopper: the best of twelve for 1024 x 131072 on an H200 (torch 2.11, Triton 3.6). What it
# takes now is in kernels.json.
WIDE = Tile(keys=64, columns=256, warps=4, stages=3)
# By bytes a value; each takes at most 67 KB of shared memory, and spills nowhere from sm_80
# to sm_120.
NARROW = {
    1: Tile(keys=64, columns=128, warps=4, stages=3),
    2: Tile(keys=64, columns=128, warps=4, stages=2),
    4: Tile(keys=32, columns=32, warps=4, stages=1),
}
# Blocks of keys that one program walks: enough to hide the load of its queries.
PREFILL_BLOCKS = 32


def kernel_device(x: torch.Tensor) -> Device:
    """The device that runs a tensor's kernels."""
    return device_of(x.device.index) if x.device.type == "cuda" else INTERPRETER


def prefill_tile(device: Device, itemsize: int) -> Tile:
    """The cut for a device and the bytes of a value."""
    return WIDE if itemsize == 1 and device.capability == 90 else NARROW[itemsize]


def kernel_operands(
    q: torch.Tensor, *keys: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, bool]]:
    """Query and key tensors as the kernels load them, and how they are multiplied."""
    tensors = [q, *keys]
    # Matrix units for e4m3 come with the conversions, with Ada; the interpreter decodes too.
    decode = q.dtype == torch.float8_e4m3fn and not kernel_device(q).converts_fp8
    if decode:
        tensors = [x.view(torch.uint8) for x in tensors]
    # Triton's interpreter multiplies bfloat16 wrongly, and its dot accumulates in fp32 anyway.
    return tensors, {
        "DECODE": decode,
        "DOT_FP32": triton_interpreted() or q.dtype == torch.float32,
    }


def column_blocks(tile: Tile, queries: int, heads: int, dim: int) -> dict[str, int]:
    """Block sizes for a number of query tokens, heads and head width."""
    block_h = triton.next_power_of_2(heads)
    # tl.dot takes at least 16 columns, and 32 fp8 values along the product.
    few = max(triton.cdiv(16, block_h), triton.next_power_of_2(queries))
    return {
        "HEADS": heads,
        "DIM": dim,
        "BLOCK_T": max(1, triton.cdiv(16, block_h), min(few, tile.columns // block_h)),
        "BLOCK_H": block_h,
        "BLOCK_S": tile.keys,
        "BLOCK_D": max(32, triton.next_power_of_2(dim)),
        "STAGES": tile.stages,
    }


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    clean: bool = True,
    tile: Tile | None = None,
    width: int | None = None,
) -> torch.Tensor:
    """Lightning-indexer scores against contiguous keys.

    Arguments, result and errors are those of `reference.mqa_logits`, with these differences: q and
    k are float8_e4m3fn, bfloat16, float16 or float32, both of one dtype;
    ReLU makes 0 of NaN; and where e4m3 bytes are decoded (Ampere, interpreter), their NaN reads
    as 480.

    Args:
        q: see `reference.mqa_logits`; so are k, weights, start, end and k_scale.
        k: as above.
        weights: as above.
        start: as above.
        end: as above.
        k_scale: as above.
        clean: write -inf outside start..end; False leaves those columns undefined, which saves
            their bytes where the reader (`top_k`) has the same bounds.
        tile: how the work is cut (default: `prefill_tile`).
        width: for a compact result [tokens, width], whose column j is key start + j of each token;
            no column outside start..end is written, and no key from start + width on.

    Returns:
        [tokens, keys] float32, or [tokens, width]; -inf outside start..end, or undefined there
        without `clean`.

    Raises:
        ValueError: as `reference.mqa_logits`; `width` without start, end or with `clean`.
    """
    check_mqa_logits_arguments(q, k, weights, start, end, k_scale)
    check_dtypes(q, "k", k)
    if width is not None and (start is None or end is None or clean):
        raise ValueError("width: a compact result needs start and end, and clean=False")
    if width is not None:
        check_integer("width", width, 0)
    check_kernels_run_on("q", q)
    tile = tile or prefill_tile(kernel_device(q), q.itemsize)
    tokens, heads, dim = q.shape
    keys = k.shape[0]
    columns = keys if width is None else int(width)
    out = torch.empty(tokens, columns, dtype=torch.float32, device=q.device)
    if tokens == 0 or keys == 0 or columns == 0:
        return out
    (q, k), flags = kernel_operands(with_rows(q), with_rows(k))
    weights = with_rows(weights.float())
    blocks = column_blocks(tile, tokens, heads, dim)
    chunk = tile.keys * PREFILL_BLOCKS
    grid = (triton.cdiv(tokens, blocks["BLOCK_T"]), triton.cdiv(keys, chunk))
    with on_device_of(q):
        _mqa_logits_kernel[grid](
            q,
            k,
            weights if k_scale is None else k_scale.reshape(-1).contiguous(),
            weights,
            weights if start is None else int32_bounds(start),
            weights if end is None else int32_bounds(end),
            out,
            tokens,
            keys,
            chunk,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            weights.stride(0),
            out.stride(0),
            HAS_SCALE=k_scale is not None,
            HAS_START=start is not None,
            HAS_END=end is not None,
            CLEAN=clean,
            COMPACT=width is not None,
            num_warps=tile.warps,
            **blocks,
            **flags,
        )
    return out


def check_dtypes(q: torch.Tensor, name: str, keys: torch.Tensor) -> None:
    """Raise ValueError unless queries and keys have one dtype that the kernels multiply."""
    known = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
    if q.dtype not in known:
        raise ValueError(f"q: expected float8_e4m3fn, bfloat16, float16 or float32, got {q.dtype}")
    if keys.dtype != q.dtype:
        raise ValueError(f"{name}: expected {q.dtype} (the dtype of q), got {keys.dtype}")


def compiled_forms(
    device: Device, kernel: str, tiles: dict[int, Tile], flags: dict[str, Any], what: str = ""
) -> list[Compilation]:
    """What a function of the indexer launches for GLM-5's 32 heads of 128.

    fp8, bfloat16 and fp32 keys; float16 takes bfloat16's tile.

    Args:
        device: for which device.
        kernel: name of the kernel.
        tiles: the cut by bytes a value.
        flags: the constants that only this kernel has, and CLEAN.
        what: for the name.
    """
    found = []
    for itemsize, tile in tiles.items():
        decode = itemsize == 1 and not device.converts_fp8
        dtype = {1: "fp8", 2: "bf16", 4: "fp32"}[itemsize]
        key = "*u8" if decode else "*fp8e4nv" if itemsize == 1 else f"*{dtype}"
        types = {"q_ptr": key, "k_ptr": key, "key_ptr": key, "scale_ptr": "*fp32"}
        types |= {"weights_ptr": "*fp32", "start_ptr": "*i32", "end_ptr": "*i32"}
        types |= {"table_ptr": "*i32", "out_ptr": "*fp32"}
        constants = flags | {"HAS_SCALE": itemsize == 1, "DECODE": decode}
        constants["DOT_FP32"] = itemsize == 4
        cuts = [column_blocks(tile, queries, 32, 128) for queries in (1, 2, 4, 8)]
        for blocks in {cut["BLOCK_T"]: cut for cut in cuts}.values():
            name = f"{kernel[1:-7]} {dtype} {blocks['BLOCK_T']} queries{what}"
            found.append(Compilation(name, kernel, types, constants | blocks, tile.warps))
    return found


def compilations(device: Device) -> list[Compilation]:
    """What `mqa_logits` launches: logits with -inf outside the bounds, and compact fp8 ones.

    Without -inf but not compact (`clean`) stores are left out, nothing else.
    """
    tiles = {itemsize: prefill_tile(device, itemsize) for itemsize in (1, 2, 4)}
    flags = {"HAS_START": True, "HAS_END": True}
    kernel = "_mqa_logits_kernel"
    found = compiled_forms(device, kernel, tiles, flags | {"COMPACT": False, "CLEAN": True})
    flags |= {"COMPACT": True, "CLEAN": False}
    return found + compiled_forms(device, kernel, {1: tiles[1]}, flags, " compact")

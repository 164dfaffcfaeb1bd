"""The sparse-MLA kernel over fp8_ds_mla rows: 512 e4m3 values, 4 float32 scales, 64 bf16 values.

Scores and outputs are computed in four groups of 128 columns, each with its own scale, as one
batched product whose batches are the groups. A group's scale multiplies scores and probabilities
instead of values, so that a value costs one conversion (e4m3 to fp16 is exact) and no product. The
scales that enter the probabilities are kept relative to the largest one met so far, as the running
maximum is, so that fp16 does not underflow. Heads lie along the columns of the products: eight
heads are a whole tile there and half of one along the rows.

Where bytes are converted by integer operations (Ampere, interpreter) the NaN of e4m3 reads as 480.
Probabilities are fp16 relative to the largest scale met: rows that count for all but whose values
are below 2**-17 of others' in the list lose digits (1.1e-2 at 2**-20).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm5lab.attention import triton_interpreted
from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import ANYWHERE, LN2, RUNTIME, Parts, Problem
from glm5lab.attention.reference import FP8_ROW_BYTES
from glm5lab.attention.tiles import Device, Tile, device_of, sparse_mla_tiles

# How four e4m3 bytes become fp16: the instruction (Ada and later), integer operations in PTX
# (Ampere), or integer operations in Triton (the interpreter). The last two give value / 256.
BY_INSTRUCTION, BY_BITS, BY_TRITON = 0, 1, 2


@triton.jit
def _half_of_byte(b_byte):
    """e4m3 bits as fp16 bits of value / 256: the same fields, four places further up."""
    b_bits = ((b_byte & 0x80) << 8) | ((b_byte & 0x7F) << 7)
    return b_bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _halves(b_word, ROWS: tl.constexpr, HOW: tl.constexpr):
    """[4, ROWS, 32] int32 words of four e4m3 each -> [4, ROWS, 128] fp16, in order."""
    if HOW == 0:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi; .reg .b32 pair;
            mov.b32 {lo, hi}, $4;
            cvt.rn.f16x2.e4m3x2 pair, lo; mov.b32 {$0, $1}, pair;
            cvt.rn.f16x2.e4m3x2 pair, hi; mov.b32 {$2, $3}, pair;
            }""",
            "=h,=h,=h,=h,r",
            [b_word],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    elif HOW == 1:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, low;
            prmt.b32 bytes, $4, 0, 0x1404; shr.u32 low, bytes, 1; and.b32 low, low, 0x3f803f80;
            lop3.b32 bytes, bytes, 0x80008000, low, 0xea; mov.b32 {$0, $1}, bytes;
            prmt.b32 bytes, $4, 0, 0x3424; shr.u32 low, bytes, 1; and.b32 low, low, 0x3f803f80;
            lop3.b32 bytes, bytes, 0x80008000, low, 0xea; mov.b32 {$2, $3}, bytes;
            }""",
            "=h,=h,=h,=h,r",
            [b_word],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        b_0 = _half_of_byte(b_word)
        b_1 = _half_of_byte(b_word >> 8)
        b_2 = _half_of_byte(b_word >> 16)
        b_3 = _half_of_byte(b_word >> 24)
    return tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), [4, ROWS, 128])


@triton.jit(do_not_specialize=[*RUNTIME, "stride_page"], do_not_specialize_on_alignment=ANYWHERE)
def _attend_fp8_kernel(
    q_ptr,
    word_ptr,
    scale_ptr,
    rope_ptr,
    indices_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    heads,
    top_k,
    slots,
    page_size,
    part,
    parts,
    stride_qt,
    stride_qh,
    stride_page,
    stride_it,
    stride_ot,
    stride_op,
    stride_oh,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EARLY: tl.constexpr,
    HOW: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attend to fp8_ds_mla rows, one cache under three pointers (int32, float32, bfloat16).

    Row and page strides count 16-byte units, which tells the compiler that every row is aligned.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    i_p = tl.program_id(2)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_head = o_h.to(tl.int64)  # q may be [H, T, D] in memory, with large strides
    o_g = tl.arange(0, 4)
    o_c = tl.arange(0, 128)
    o_w = tl.arange(0, 32)
    o_r = tl.arange(0, 16)
    o_k = tl.arange(0, BLOCK_K)
    m_h = (o_h < heads)[None, None, :]
    # The bit conversions give value / 256; the scales take the factor back.
    UNIT: tl.constexpr = 1.0 if HOW == 0 else 256.0

    length = top_k
    if HAS_LENGTHS:
        length = tl.minimum(top_k, tl.load(lengths_ptr + i_t))
    start = i_p * part
    end = tl.minimum(start + part, length)
    p_i = indices_ptr + i_t * stride_it
    b_slot = tl.load(p_i + start + o_k, mask=start + o_k < end, other=-1)

    # [4, 128, BLOCK_H] and [4, 16, BLOCK_H]. Divided by a power of two above its maximum, a bf16
    # query is exact in fp16, down to 2**-14 of that maximum.
    p_q = q_ptr + i_t * stride_qt + o_head[None, None, :] * stride_qh
    b_q = tl.load(p_q + (o_g[:, None] * 128 + o_c[None, :])[:, :, None], mask=m_h, other=0.0)
    b_q = b_q.to(tl.float32)
    b_qr = tl.load(p_q + 512 + (o_g[:, None] * 16 + o_r[None, :])[:, :, None], mask=m_h, other=0.0)
    b_qmax = tl.maximum(tl.max(tl.max(tl.abs(b_q), 1), 0), 1e-30)
    b_qmax = tl.exp2(tl.ceil(tl.log2(b_qmax)))
    b_q = (b_q * (1.0 / b_qmax)[None, None, :]).to(tl.float16)
    if DOT_FP32:
        b_q, b_qr = b_q.to(tl.float32), b_qr.to(tl.float32)

    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_unit = tl.full([4], 1e-30, tl.float32)
    b_acc = tl.zeros([4, 128, BLOCK_H], tl.float32)
    for block in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        m_k = (b_slot >= 0) & (b_slot < slots)
        b_row = tl.where(m_k, b_slot, 0).to(tl.int64)
        if PAGED:
            i_page = b_row // page_size
            b_row = i_page * stride_page + (b_row - i_page * page_size) * 41
        else:
            b_row = b_row * 41
        p_w = word_ptr + (b_row * 4)[None, :, None] + (o_g * 32)[:, None, None] + o_w[None, None, :]
        b_word = tl.load(p_w, mask=m_k[None, :, None], other=0)
        p_g = scale_ptr + (b_row * 4)[None, :] + 128 + o_g[:, None]
        b_g = tl.load(p_g, mask=m_k[None, :], other=0.0) * UNIT
        p_r = rope_ptr + (b_row * 8)[None, :, None] + 264
        p_r += (o_g * 16)[:, None, None] + o_r[None, None, :]
        b_r = tl.load(p_r, mask=m_k[None, :, None], other=0.0).to(q_ptr.dtype.element_ty)
        o_next = block + BLOCK_K + o_k
        b_slot = tl.load(p_i + o_next, mask=o_next < end, other=-1)
        b_v = _halves(b_word, BLOCK_K, HOW)
        if DOT_FP32:
            b_v, b_r = b_v.to(tl.float32), b_r.to(tl.float32)

        # [4, BLOCK_K, BLOCK_H], a group's part of the scores
        b_s = tl.dot(b_v, b_q, input_precision="ieee")
        b_s = b_s * b_g[:, :, None] * b_qmax[None, None, :]
        b_s = tl.sum(tl.dot(b_r, b_qr, b_s, input_precision="ieee"), 0)
        b_s = tl.where(m_k[:, None], b_s * scale_log2, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 0))
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_ref[None, :])
        b_old = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_old + tl.sum(b_p, 0)
        b_next = tl.maximum(b_unit, tl.max(b_g, 1))
        b_w = b_p[None, :, :] * (b_g / b_next[:, None])[:, :, None]
        b_acc = b_acc * ((b_unit / b_next)[:, None] * b_old[None, :])[:, None, :]
        b_w = b_w.to(b_v.dtype)
        b_acc = tl.dot(tl.permute(b_v, (0, 2, 1)), b_w, b_acc, input_precision="ieee")
        b_unit = b_next
        b_max = b_new

    m_any = b_sum != 0  # NaN too
    b_scale = b_unit[:, None] * (1.0 / tl.where(m_any, b_sum, 1.0))[None, :]
    b_lse = tl.where(m_any, (b_max + tl.log2(tl.where(m_any, b_sum, 1.0))) * LN2, float("-inf"))
    p_out = out_ptr + i_t * stride_ot + i_p * stride_op + o_head[None, None, :] * stride_oh
    p_out += (o_g[:, None] * 128 + o_c[None, :])[:, :, None]
    tl.store(p_out, (b_acc * b_scale[:, None, :]).to(out_ptr.dtype.element_ty), mask=m_h)
    tl.store(lse_ptr + (i_t * parts + i_p) * heads + o_h, b_lse, mask=o_h < heads)


def attend_fp8(problem: Problem, parts: Parts, tile: Tile) -> None:
    """Launch the kernel over uint8 rows of 656 bytes.

    Raises:
        ValueError: rows or pages are not aligned to 16 bytes.
    """
    q, pages = problem.q, problem.pages
    if pages.stride(1) != FP8_ROW_BYTES or pages.stride(0) % 16 or pages.data_ptr() % 16:
        raise ValueError(
            "kv: expected fp8_ds_mla rows next to each other and pages aligned to 16 bytes, got "
            f"strides {tuple(problem.kv.stride())}"
        )
    interpreted = triton_interpreted()
    how = BY_TRITON
    if not interpreted:
        how = BY_INSTRUCTION if device_of(q.device.index or 0).converts_fp8 else BY_BITS
    _attend_fp8_kernel[parts.grid(problem, tile)](
        q,
        pages.view(torch.int32),
        pages.view(torch.float32),
        pages.view(torch.bfloat16),
        *parts.arguments(problem, problem.page_stride // 16),
        BLOCK_H=tile.heads,
        BLOCK_K=tile.rows,
        STAGES=tile.stages,
        **parts.constants(problem),
        HOW=how,
        DOT_FP32=interpreted,
        num_warps=tile.warps,
        **parts.options,
        **tile.options,
    )


def compilations(device: Device) -> list[Compilation]:
    """Everything that `sparse_mla` can launch on a device for fp8_ds_mla rows."""
    types = {"q_ptr": "*bf16", "word_ptr": "*i32", "scale_ptr": "*fp32", "rope_ptr": "*bf16"}
    types |= {"indices_ptr": "*i32", "lengths_ptr": "*i32", "lse_ptr": "*fp32"}
    found = []
    tiles = [t for t in sparse_mla_tiles(device, itemsize=2, fp8=True) if not t.hopper]
    for tile in tiles:
        for split in (True, False):
            constants = {
                "BLOCK_H": tile.heads,
                "BLOCK_K": tile.rows,
                "STAGES": tile.stages,
                "PAGED": True,
                "HAS_LENGTHS": True,
                "EARLY": split and device.dependent_launch,
                "HOW": BY_INSTRUCTION if device.converts_fp8 else BY_BITS,
                "DOT_FP32": False,
            }
            out = {"out_ptr": "*fp32" if split else "*bf16", "scale_log2": "fp32"}
            name = f"sparse_mla fp8 {tile.name} {'split' if split else 'whole'}"
            kernel = "_attend_fp8_kernel"
            found.append(Compilation.of_tile(tile, name, kernel, types | out, constants))
    return found

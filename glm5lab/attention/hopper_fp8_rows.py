"""Shared memory's side of sparse MLA on Hopper over fp8_ds_mla rows: values and queries as fp16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from glm5lab.attention.sparse_mla_hopper import BLOCK_K, CHUNK, D_V, STAGES, load_slots, row_offsets

WARPS = gl.constexpr(4)  # of a warpgroup
GROUP = gl.constexpr(128)  # values that share a scale
ROW_UNITS = gl.constexpr(41)  # 656 bytes in units of 16
TINY = gl.constexpr(1e-30)  # no scale counts as less, since it is divided by


@gluon.jit
def _values(b_word):
    """[BLOCK_K, 32] words of four e4m3 each -> [BLOCK_K, 128] fp16, exactly."""
    b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
        """{
        .reg .b16 lo, hi; .reg .b32 pair;
        mov.b32 {lo, hi}, $4;
        cvt.rn.f16x2.e4m3x2 pair, lo; mov.b32 {$0, $1}, pair;
        cvt.rn.f16x2.e4m3x2 pair, hi; mov.b32 {$2, $3}, pair;
        }""",
        "=h,=h,=h,=h,r",
        [b_word],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(gl.join(b_0, b_2), gl.join(b_1, b_3)), [BLOCK_K, GROUP])


@gluon.jit
def _power_of_two_below(b_x):
    """The exponent of a float32 alone."""
    return (b_x.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def gather_fp8(
    word_ptr,
    scale_ptr,
    rope_ptr,
    p_i,
    start,
    end,
    slots,
    page_size,
    stride_page,
    s_v,
    s_r,
    s_scale,
    full,
    empty,
    PAGED: gl.constexpr,
    STAGE: gl.constexpr,
):
    """Convert every STAGES-th block from number STAGE on into that stage, and its scales.

    Each stage has a warpgroup of its own that fills it.
    """
    words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    halves: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, words)
    row_r: gl.constexpr = gl.SliceLayout(1, halves)
    o_k = gl.arange(0, BLOCK_K, layout=row)
    o_w = gl.arange(0, 32, layout=gl.SliceLayout(0, words))
    o_r = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, halves))
    phase = 1
    start += STAGE * BLOCK_K
    b_slot = load_slots(p_i, start + o_k, end, slots)
    for block in range(start, end, BLOCK_K * STAGES):
        m_k = b_slot >= 0
        m_w = m_k[:, None] & (o_w >= 0)[None, :]
        b_row = row_offsets(b_slot, page_size, stride_page, ROW_UNITS, PAGED)
        p_w = word_ptr + (b_row * 4)[:, None] + o_w[None, :]
        p_s = scale_ptr + b_row * 4 + 128
        b_s0 = gl.load(p_s, mask=m_k, other=0.0)
        b_s1 = gl.load(p_s + 1, mask=m_k, other=0.0)
        b_s2 = gl.load(p_s + 2, mask=m_k, other=0.0)
        b_s3 = gl.load(p_s + 3, mask=m_k, other=0.0)
        b_w0 = gl.load(p_w, mask=m_w, other=0)
        b_w1 = gl.load(p_w + 32, mask=m_w, other=0)
        b_w2 = gl.load(p_w + 64, mask=m_w, other=0)
        b_w3 = gl.load(p_w + 96, mask=m_w, other=0)
        # The same rows in the same threads: nothing moves.
        p_r = rope_ptr + (gl.convert_layout(b_row, row_r) * 8)[:, None] + 264 + o_r[None, :]
        m_r = (gl.convert_layout(b_slot, row_r) >= 0)[:, None] & (o_r >= 0)[None, :]
        b_slot = load_slots(p_i, block + BLOCK_K * STAGES + o_k, end, slots)

        mbarrier.wait(empty.index(STAGE), phase)
        async_copy.async_copy_global_to_shared(s_r.index(STAGE), p_r, mask=m_r)
        async_copy.commit_group()
        s_factors = s_scale.index(STAGE)
        s_factors.slice(0, BLOCK_K, dim=0).store(b_s0)
        s_factors.slice(BLOCK_K, BLOCK_K, dim=0).store(b_s1)
        s_factors.slice(2 * BLOCK_K, BLOCK_K, dim=0).store(b_s2)
        s_factors.slice(3 * BLOCK_K, BLOCK_K, dim=0).store(b_s3)
        s_rows = s_v.index(STAGE)
        s_rows.slice(0, GROUP, dim=1).store(_values(b_w0))
        s_rows.slice(GROUP, GROUP, dim=1).store(_values(b_w1))
        s_rows.slice(2 * GROUP, GROUP, dim=1).store(_values(b_w2))
        s_rows.slice(3 * GROUP, GROUP, dim=1).store(_values(b_w3))
        async_copy.wait_group(0)
        # Stored rows are read by wgmma's own path to memory.
        fence_async_shared()
        mbarrier.arrive(full.index(STAGE))
        phase ^= 1


@gluon.jit
def store_queries(p_q, stride_qh, heads, s_q, s_qr, HEADS: gl.constexpr):
    """Store queries as fp16 below 1 and their rope columns as they are; a power of two a head.

    Divided by a power of two above its maximum, a bf16 query is exact in fp16, down to 2**-14 of
    that maximum.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    o_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D_V, layout=gl.SliceLayout(0, layout))
    m_q = (o_h < heads)[:, None] & (o_d >= 0)[None, :]
    b_q = gl.load(p_q + o_h.to(gl.int64)[:, None] * stride_qh + o_d[None, :], mask=m_q, other=0.0)
    b_q = b_q.to(gl.float32)
    b_top = gl.maximum(gl.max(gl.maximum(b_q, -b_q), 1), TINY)
    b_top = _power_of_two_below(b_top) * 2.0
    s_q.store((b_q * (1.0 / b_top)[:, None]).to(gl.float16))
    layout_r: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    o_h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout_r))
    o_d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout_r))
    m_q = (o_h < heads)[:, None] & (o_d >= 0)[None, :]
    p_q += D_V
    s_qr.store(
        gl.load(p_q + o_h.to(gl.int64)[:, None] * stride_qh + o_d[None, :], mask=m_q, other=0.0)
    )
    fence_async_shared()
    return b_top

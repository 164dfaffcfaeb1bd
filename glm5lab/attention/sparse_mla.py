"""Sparse MLA as a Triton kernel: one program a query token and block of heads.

Same signature as `reference.sparse_mla`. The kernel walks a token's list of slots in blocks,
gathers the latent rows, and keeps a running softmax (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). It runs on GPUs, and on CPUs under TRITON_INTERPRET=1.
"""

import torch
import triton
import triton.language as tl

from glm5lab.attention import triton_interpreted
from glm5lab.attention.reference import check_sparse_mla_arguments

# The smallest tile that tl.dot accepts; eight heads a GPU are padded to it.
MIN_BLOCK = 16
ROWS_A_BLOCK = 32


@triton.jit
def _sparse_mla_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    scale,
    heads,
    top_k,
    page_size,
    stride_qt,
    stride_qh,
    stride_page,
    stride_row,
    stride_it,
    stride_ot,
    stride_oh,
    stride_lt,
    D_V: tl.constexpr,
    D_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_v = tl.arange(0, BLOCK_V)
    o_r = tl.arange(0, BLOCK_R)
    m_h = o_h < heads
    m_v = o_v < D_V
    m_r = o_r < D_ROPE

    # [BLOCK_H, BLOCK_V] and [BLOCK_H, BLOCK_R]
    p_q = q_ptr + i_t * stride_qt + o_h[:, None] * stride_qh
    b_q = tl.load(p_q + o_v[None, :], mask=m_h[:, None] & m_v[None, :], other=0.0)
    if D_ROPE > 0:
        b_q_rope = tl.load(p_q + D_V + o_r[None, :], mask=m_h[:, None] & m_r[None, :], other=0.0)
        if DOT_FP32:
            b_q_rope = b_q_rope.to(tl.float32)
    if DOT_FP32:
        b_q = b_q.to(tl.float32)

    length = top_k
    if HAS_LENGTHS:
        length = tl.minimum(top_k, tl.load(lengths_ptr + i_t))

    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for start in range(0, length, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        # A cache may exceed 2**31 bytes: slots become int64 before they are multiplied.
        b_slot = tl.load(indices_ptr + i_t * stride_it + o_k, mask=o_k < length, other=-1).to(
            tl.int64
        )
        m_k = b_slot >= 0
        b_slot = tl.where(m_k, b_slot, 0)
        p_kv = kv_ptr + (b_slot // page_size) * stride_page + (b_slot % page_size) * stride_row
        # [BLOCK_K, BLOCK_V] and [BLOCK_K, BLOCK_R]
        b_v = tl.load(p_kv[:, None] + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0.0)
        if DOT_FP32:
            b_v = b_v.to(tl.float32)
        b_s = tl.dot(b_q, tl.trans(b_v), input_precision="ieee")
        if D_ROPE > 0:
            b_rope = tl.load(
                p_kv[:, None] + D_V + o_r[None, :], mask=m_k[:, None] & m_r[None, :], other=0.0
            )
            if DOT_FP32:
                b_rope = b_rope.to(tl.float32)
            b_s += tl.dot(b_q_rope, tl.trans(b_rope), input_precision="ieee")
        b_s = tl.where(m_k[None, :], b_s * scale, float("-inf"))

        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # While every place so far is empty the maximum is -inf, and -inf - -inf is NaN.
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp(b_s - b_ref[:, None])
        b_old = tl.exp(b_max - b_ref)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_acc = b_acc * b_old[:, None]
        b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        b_max = b_new

    m_any = b_sum > 0
    b_out = b_acc / tl.where(m_any, b_sum, 1.0)[:, None]
    b_lse = tl.where(m_any, b_max + tl.log(tl.where(m_any, b_sum, 1.0)), float("-inf"))
    p_out = out_ptr + i_t * stride_ot + o_h[:, None] * stride_oh + o_v[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_h[:, None] & m_v[None, :])
    tl.store(lse_ptr + i_t * stride_lt + o_h, b_lse, mask=m_h)


def sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None = None,
    d_v: int = 512,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query token over its own list of cached latent rows.

    Arguments, result and errors are those of `reference.sparse_mla`, with two differences: q, kv
    and out are float32, bfloat16 or float16, all three of one dtype; and the LSE is float32.
    """
    check_sparse_mla_arguments(q, kv, indices, lengths, d_v, out)
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q: expected float32, bfloat16 or float16, got {q.dtype}")
    if kv.dtype != q.dtype:
        raise ValueError(f"kv: expected {q.dtype} (the dtype of q), got {kv.dtype}")
    tokens, heads, width = q.shape
    result = q.new_empty(tokens, heads, d_v) if out is None else out
    if result.stride(-1) != 1:
        raise ValueError("out: the last dimension must be contiguous")
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return result, lse
    q = q if q.stride(-1) == 1 else q.contiguous()
    indices = indices if indices.stride(-1) == 1 else indices.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    pages = kv if kv.dim() == 3 else kv[None]
    rope = width - d_v
    _sparse_mla_kernel[(tokens, triton.cdiv(heads, MIN_BLOCK))](
        q,
        pages,
        indices,
        indices if lengths is None else lengths,
        result,
        lse,
        scale,
        heads,
        indices.shape[1],
        pages.shape[1],
        q.stride(0),
        q.stride(1),
        pages.stride(0),
        pages.stride(1),
        indices.stride(0),
        result.stride(0),
        result.stride(1),
        lse.stride(0),
        D_V=d_v,
        D_ROPE=rope,
        BLOCK_H=MIN_BLOCK,
        BLOCK_V=max(MIN_BLOCK, triton.next_power_of_2(d_v)),
        BLOCK_R=max(MIN_BLOCK, triton.next_power_of_2(max(rope, 1))),
        BLOCK_K=ROWS_A_BLOCK,
        HAS_LENGTHS=lengths is not None,
        # Triton's interpreter multiplies bfloat16 wrongly, and its dot accumulates in fp32 anyway.
        DOT_FP32=triton_interpreted() or q.dtype == torch.float32,
    )
    return result, lse

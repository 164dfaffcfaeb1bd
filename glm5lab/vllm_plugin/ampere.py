"""GLM-5's norms, rotations and cache writes without e4m3 instructions: GPUs before Ada.

vLLM's CUDA model joins these steps into two Triton kernels that convert to e4m3, which Triton does
from SM89 on. Here they are PyTorch operations, and the stores of `attention.kv_cache`, which make
e4m3 bytes by integer operations. The functions take and return what vLLM's do.
"""

from typing import Any

import torch

from glm5lab.attention import index_store_implementation, store_implementation
from glm5lab.attention.row_formats import quantize_index


def rotated(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """The rotary embedding of the first columns, in float32.

    Args:
        x: [T, ..., D]; its first R columns are rotated, the others stay.
        positions: [T] integers.
        cos_sin: [positions, R]: cosines, then sines.
        interleaved: pairs are neighbours; else column i goes with column R / 2 + i.
    """
    x = x.float()
    turn = cos_sin.shape[-1]
    cos, sin = cos_sin[positions].float().chunk(2, -1)
    for _ in range(x.dim() - 2):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    head, tail = x[..., :turn], x[..., turn:]
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        head = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = head.chunk(2, -1)
        head = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([head, tail], -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def norm_rope(
    positions: torch.Tensor,
    q_c: torch.Tensor,
    q_rms_norm_w: torch.Tensor,
    q_rms_eps: float,
    kv_c: torch.Tensor,
    kv_rms_norm_w: torch.Tensor,
    kv_rms_eps: float,
    k_pe: torch.Tensor,
    k_rope_cos_sin_cache: torch.Tensor,
    index_k: torch.Tensor | None,
    index_k_layer_norm_w: torch.Tensor | None,
    index_k_layer_norm_bias: torch.Tensor | None,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: torch.Tensor | None,
    topk_indices_buffer: torch.Tensor,
    slot_mapping: torch.Tensor | None = None,
    indexer_slot_mapping: torch.Tensor | None = None,
    indexer_k_cache: torch.Tensor | None = None,
    mla_kv_cache: torch.Tensor | None = None,
    mla_kv_cache_dtype: str = "auto",
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    kv_c_out: torch.Tensor | None = None,
    k_pe_out: torch.Tensor | None = None,
    index_k_out: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """Stands for vLLM's fused_norm_rope: normed q_c, cached rows and index keys, cleared top-k.

    Args:
        positions: [T] integers.
        q_c: [T, q_lora]; its norm is returned.
        q_rms_norm_w: its norm's weight.
        q_rms_eps: its norm's epsilon.
        kv_c: [T, latent].
        kv_rms_norm_w: its norm's weight.
        kv_rms_eps: its norm's epsilon.
        k_pe: [T, rope], rotated by neighbours.
        k_rope_cos_sin_cache: [positions, rope].
        index_k: [T, width], or None.
        index_k_layer_norm_w: its norm's weight.
        index_k_layer_norm_bias: its norm's bias.
        index_k_layer_norm_eps: its norm's epsilon.
        index_k_rope_cos_sin_cache: [positions, rope].
        topk_indices_buffer: rows of the T tokens become -1 where there is an indexer.
        slot_mapping: [T or fewer] slots of the rows, negative ones are left out; None: no cache.
        indexer_slot_mapping: the same for index keys; None: as slot_mapping.
        indexer_k_cache: [pages, page_size, width + 4] uint8, or None.
        mla_kv_cache: [pages, page_size, row], or None.
        mla_kv_cache_dtype: as vLLM names it; uint8 rows are fp8_ds_mla.
        has_indexer: False where the layer reuses a selection.
        index_rope_interleave: how index keys are rotated.
        kv_c_out: written, where given.
        k_pe_out: written, where given.
        index_k_out: written, where given.
        unused: what only vLLM's kernel needs.

    Raises:
        ValueError: rows in plain fp8, which TRITON_MLA_SPARSE has no use for.
    """
    if mla_kv_cache_dtype.startswith("fp8") and mla_kv_cache_dtype != "fp8_ds_mla":
        raise ValueError(
            f"mla_kv_cache_dtype: expected fp8_ds_mla or 16 bits, got {mla_kv_cache_dtype}"
        )
    # Rows are quantized before they are rounded to 16 bits, as in vLLM's kernel.
    latent = rms_norm(kv_c, kv_rms_norm_w, kv_rms_eps)
    rope = rotated(k_pe, positions, k_rope_cos_sin_cache, interleaved=True)
    for out, values in ((kv_c_out, latent), (k_pe_out, rope)):
        if out is not None:
            out.copy_(values)
    device = positions.device.type
    if mla_kv_cache is not None and slot_mapping is not None:
        store_implementation(device)(mla_kv_cache, slot_mapping, latent, rope)
    if has_indexer:
        topk_indices_buffer[: len(positions)] = -1
        assert index_k is not None
        assert index_k_rope_cos_sin_cache is not None
        normed = torch.nn.functional.layer_norm(
            index_k.float(),
            index_k.shape[-1:],
            None if index_k_layer_norm_w is None else index_k_layer_norm_w.float(),
            None if index_k_layer_norm_bias is None else index_k_layer_norm_bias.float(),
            index_k_layer_norm_eps,
        )
        keys = rotated(normed, positions, index_k_rope_cos_sin_cache, index_rope_interleave)
        if index_k_out is not None:
            index_k_out.copy_(keys)
        slots = slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping
        if indexer_k_cache is not None and slots is not None:
            index_store_implementation(device)(indexer_k_cache, slots, keys)
    return rms_norm(q_c, q_rms_norm_w, q_rms_eps).to(q_c.dtype)


def query(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    q_pe_cos_sin_cache: torch.Tensor,
    index_q: torch.Tensor | None,
    index_q_cos_sin_cache: torch.Tensor | None,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    index_weights: torch.Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Stands for vLLM's fused_q.

    Args:
        positions: [T] integers.
        q_pe: [T, heads, rope], rotated by neighbours.
        q_pe_cos_sin_cache: [positions, rope].
        index_q: [T, index heads, width], or None.
        index_q_cos_sin_cache: [positions, rope], or None.
        ql_nope: not used.
        q_scale: not used.
        index_weights: [T, index heads], or None.
        index_weights_softmax_scale: factor on the weights.
        index_weights_head_scale: factor on the weights.
        has_indexer: False where the layer reuses a selection.
        index_rope_interleave: how index queries are rotated.
        quantize_mqa: must be False.

    Returns:
        Index queries [T, index heads, width] float8_e4m3fn and their weights float32, both None
        without an indexer; the rotated q_pe.

    Raises:
        ValueError: quantize_mqa is True, which TRITON_MLA_SPARSE never asks for.
    """
    if quantize_mqa:
        raise ValueError("quantize_mqa: expected False, as TRITON_MLA_SPARSE takes 16-bit queries")
    q = rotated(q_pe, positions, q_pe_cos_sin_cache, interleaved=True).to(q_pe.dtype)
    if not has_indexer:
        return None, None, q
    assert index_q is not None
    assert index_q_cos_sin_cache is not None
    assert index_weights is not None
    turned = rotated(index_q, positions, index_q_cos_sin_cache, index_rope_interleave)
    values, scale = quantize_index(turned)
    factor = index_weights_softmax_scale * index_weights_head_scale
    return values, index_weights.float() * scale * factor, q

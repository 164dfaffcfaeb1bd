"""TRITON_MLA_SPARSE on CUDA devices, over vLLM's own base classes for sparse MLA.

vLLM turns the indexer's positions into slots and stores the rows; a prompt no longer than the
top-k attends densely. What remains is one call a layer: attend to the rows in each token's slots.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

from glm5lab.attention.reference import Query
from glm5lab.attention.sparse_mla import sparse_mla
from glm5lab.vllm_plugin.backend import refuse_unsupported

# Queries up to this long take the sparse kernel even where dense attention could serve them; the
# bound that vLLM's own sparse backends use for few heads.
DECODE_QUERY_LENGTH = 128
# Up to so many, the plain kernel serves any number of tokens; Hopper has another one for more.
MOST_HEADS_LOOKED_UP = 16
FP8_ROPE = 64  # width of the rotary part of every fp8_ds_mla row


def reads_rows_back(kv_cache_dtype: str, rope: int, dtype: torch.dtype) -> bool:
    """Whether vLLM's dense attention for short prompts can read cached rows as the model's.

    It unpacks fp8_ds_mla rows to bfloat16, at the width that they have with a rotary part.
    """
    return kv_cache_dtype != "fp8_ds_mla" or (rope == FP8_ROPE and dtype == torch.bfloat16)


@dataclass(kw_only=True)
class TritonMLASparseMetadata(SparseMLACommonMetadata):
    """One batch, as vLLM's base class describes it."""


class TritonMLASparseMetadataBuilder(SparseMLACommonMetadataBuilder[TritonMLASparseMetadata]):
    """Builds TritonMLASparseMetadata; the kernels are launched token by token and plan nothing."""

    metadata_cls = TritonMLASparseMetadata
    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            DECODE_QUERY_LENGTH,
            supports_spec_as_decode=True,
            # A token sees what its own list names, so requests may differ in length.
            supports_dcp_with_varlen=True,
        )
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    def update_draft_decode_metadata(self, metadata: TritonMLASparseMetadata) -> None:
        """Renew which request a token belongs to; the rest is views of the runner's buffers."""
        from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

        tokens = metadata.num_decode_tokens
        if tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens
            )


class TritonMLASparseImpl(SparseMLACommonImpl[TritonMLASparseMetadata]):
    """The attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False
    supports_mtp_with_cp_non_trivial_interleave_size = True
    # One layer's slots are computed on its own stream; only layers that share a top-k
    # (IndexShare) pay for the detour over a side stream.
    group_conversion_decode_only = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_arguments: Any,
    ) -> None:
        refuse_unsupported(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_arguments,
        )
        self.supports_quant_query_input = False
        # There the kernel turns places into slots by itself; elsewhere vLLM's kernel does before.
        self.looks_up_pages = (
            kv_cache_dtype != "fp8_ds_mla"
            and num_heads <= MOST_HEADS_LOOKED_UP
            and self.dcp_world_size == 1
            and get_current_vllm_config().attention_config.hisparse_config is None
        )
        # A model without a rotary part keeps fp8_ds_mla's rotary columns at zero, so zeros extend
        # its queries.
        self.pads_query = kv_cache_dtype == "fp8_ds_mla" and self.qk_rope_head_dim == 0
        if not reads_rows_back(kv_cache_dtype, self.qk_rope_head_dim, torch.get_default_dtype()):
            self.supports_dense_mha_prefill = False

    def forward_mqa(
        self,
        q: Query,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TritonMLASparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the indexer's choice: q [T, H, latent + rope] or its two parts.

        Returns:
            [T, H, latent], and the LSE [T, H] or None.
        """
        if not self.looks_up_pages:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        assert self.topk_indices_buffer is not None
        tokens = len(q[0] if isinstance(q, tuple) else q)
        return self.attend(
            q,
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer[:tokens],
            table=(attn_metadata.block_table, attn_metadata.req_id_per_token[:tokens]),
        )

    def _forward_mqa_kernel(
        self,
        q: Query,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend: q [T, H, latent + rope] or its two parts -> [T, H, latent], LSE [T, H] or None.

        Args:
            q: as above.
            kv_cache: [pages, page_size, row].
            topk_indices: [T, top_k] int32 slots; the first valid_counts[t] of a row are filled.
            valid_counts: [T] int32.
            layer: not used.
            block_size: rows a page.
            is_decode: not used.
        """
        rows, stride = flat_kv_row_view(kv_cache, block_size)
        # Pages without gaps keep their strides small, whatever the cache's size.
        cache = kv_cache if stride == block_size else rows
        return self.attend(q, cache, topk_indices, lengths=valid_counts)

    def attend(
        self, q: Query, kv: torch.Tensor, indices: torch.Tensor, **lists: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the kernel: `lists` says what the indices [T, top_k] are, see `sparse_mla`."""
        # Not `sparse_mla_shared`, for prompts either: it takes longer where neighbours choose other
        # rows, which is not known before; its union walks the whole cache in spans of 262,144 rows;
        # and through NaN in a row a request would change a neighbour's result in the batch.
        q, width = self._padded(q), self.kv_lora_rank
        out, lse = sparse_mla(q, kv, indices, self.scale, d_v=width, **lists)
        return out, lse if self.need_to_return_lse_for_decode else None

    def _padded(self, q: Query) -> Query:
        """Queries as wide as the rows."""
        if not self.pads_query:
            return q
        latent = q[0] if isinstance(q, tuple) else q
        return torch.nn.functional.pad(latent, (0, FP8_ROPE))

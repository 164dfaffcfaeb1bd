"""TRITON_MLA_SPARSE on a CPU: what `backend` names there.

Every token, of prefill and decode alike, takes the same way: the indexer has written its top-k
positions, they become cache slots, and sparse MLA attends to the rows in those slots.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from glm5lab.attention import implementation, implementation_name, store_implementation
from glm5lab.attention.reference import slots_of
from glm5lab.vllm_plugin import BACKEND
from glm5lab.vllm_plugin.backend import refuse_unsupported

logger = init_logger("vllm.glm5lab")

Metadata = TypeVar("Metadata", bound=AttentionMetadata)


@dataclass
class TritonMLASparseCpuMetadata(AttentionMetadata):
    """One batch. T tokens of R requests; all of them count as decodes for vLLM's MLA layer."""

    num_actual_tokens: int
    num_decodes: int  # R
    num_decode_tokens: int  # T
    pages_of_token: torch.Tensor  # [T, pages] int32, gathered once for all layers
    num_prefills: int = 0


def request_of_token(batch: CommonAttentionMetadata) -> torch.Tensor:
    """The request number of every token of a batch: [T] int64; padding belongs to request 0."""
    counts = torch.diff(batch.query_start_loc_cpu[: batch.num_reqs + 1]).long()
    owner = torch.repeat_interleave(torch.arange(batch.num_reqs), counts)
    padding = batch.num_actual_tokens - owner.numel()
    if padding > 0:
        owner = torch.cat([owner, owner.new_zeros(padding)])
    return owner[: batch.num_actual_tokens].to(batch.block_table_tensor.device)


class BatchMetadataBuilder(AttentionMetadataBuilder[Metadata], Generic[Metadata]):
    """What the builders here share; vLLM leaves the constructor abstract."""

    _cudagraph_support: ClassVar = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


class TritonMLASparseCpuMetadataBuilder(BatchMetadataBuilder[TritonMLASparseCpuMetadata]):
    """Builds TritonMLASparseCpuMetadata from vLLM's batch description."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMLASparseCpuMetadata:
        batch = common_attn_metadata
        return TritonMLASparseCpuMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            num_decodes=batch.num_reqs,
            num_decode_tokens=batch.num_actual_tokens,
            pages_of_token=batch.block_table_tensor[request_of_token(batch)],
        )


class TritonMLASparseCpuImpl(MLAAttentionImpl[TritonMLASparseCpuMetadata], SharedTopkIndicesBuffer):
    """The attention of one layer."""

    is_sparse = True
    supports_dense_mha_prefill = False
    can_return_lse_for_decode = True

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
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: object | None = None,
        **mla_arguments: Any,
    ) -> None:
        refuse_unsupported(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_arguments["kv_lora_rank"]
        device = current_platform.device_type
        self.sparse_mla = implementation(device)
        self.store_rows = store_implementation(device)
        logger.info_once("%s runs its %s kernel.", BACKEND, implementation_name(device))
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Nothing to record: top-k and attention run on one stream."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store one row a token: kv_c_normed [T, latent] and k_pe [T, 1, rope]."""
        if kv_cache.numel():
            self.store_rows(kv_cache, slot_mapping.flatten(), kv_c_normed, k_pe.flatten(1))

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TritonMLASparseCpuMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend: q [T, H, latent + rope], or its two parts -> ([T, H, latent], LSE [T, H])."""
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        assert self.topk_indices_buffer is not None
        cache, tokens = kv_c_and_k_pe_cache, q.shape[0]
        pages = attn_metadata.pages_of_token[:tokens]
        slots = slots_of(self.topk_indices_buffer[:tokens], pages, cache.shape[1])
        return self.sparse_mla(q, cache, slots, self.scale, d_v=self.kv_lora_rank)

"""The lightning indexer where vLLM's own cannot run: plain index keys, logits and top-k.

vLLM's indexer quantizes queries and keys to fp8 with CUDA kernels. On the CPU this module puts
four subclasses in its place: the op, its key cache with backend and metadata, the indexer's
forward, and, through vLLM's registry of out-of-tree layers, the MLA wrapper that joins them. MLA
layers without such an indexer, and other models' indexers, stay as they are.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    CommonAttentionMetadata,
)

from glm5lab.attention.reference import mqa_logits, store_rows, top_k
from glm5lab.vllm_plugin.backend_cpu import BatchMetadataBuilder

# Query tokens whose scores against all keys and index heads are held at once.
TOKENS_AT_ONCE = 128

_registered = False


def register() -> None:
    """Put PlainMLAWrapper in place of vLLM's layer; vLLM refuses a second registration."""
    global _registered
    if _registered:
        return
    MultiHeadLatentAttentionWrapper.register_oot(PlainMLAWrapper)
    _registered = True


@dataclass
class PlainIndexerMetadata(AttentionMetadata):
    """One batch: token range, length and pages of each request."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor  # [T] int64
    block_table: torch.Tensor  # [R, pages] int32
    query_start: list[int]  # R + 1 token numbers
    seq_lens: list[int]  # R lengths, the new tokens included


class PlainIndexerMetadataBuilder(BatchMetadataBuilder[PlainIndexerMetadata]):
    """Builds PlainIndexerMetadata from vLLM's batch description."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PlainIndexerMetadata:
        batch = common_attn_metadata
        return PlainIndexerMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table_tensor,
            query_start=batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist(),
            seq_lens=batch.seq_lens[: batch.num_reqs].tolist(),
        )


class PlainIndexerBackend(AttentionBackend):
    """Names the metadata builder of the index-key cache; it has no attention of its own."""

    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "GLM5LAB_INDEXER"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("GLM5LAB_INDEXER is a cache; it has no attention")

    @staticmethod
    def get_builder_cls() -> type[PlainIndexerMetadataBuilder]:
        return PlainIndexerMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class PlainIndexerCache(DeepseekV32IndexerCache):
    """Index keys in the model's own dtype: [pages, page_size, head_dim]."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PlainIndexerBackend


class PlainSparseAttnIndexer(SparseAttnIndexer):
    """Stores the new keys, scores every query against its request's keys, keeps the top-k."""

    def forward_cpu(
        self,
        hidden_states: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Top-k positions [max_tokens, top_k] int32 from q [T, H, D], k [T, D], weights [T, H]."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # vLLM's profiling run has no cache
            return self.topk_indices_buffer
        batch: PlainIndexerMetadata = metadata[self.k_cache.prefix]
        store_rows(self.k_cache.kv_cache, batch.slot_mapping[: batch.num_actual_tokens], k)
        self.topk_indices_buffer[: batch.num_actual_tokens] = -1
        for request, length in enumerate(batch.seq_lens):
            first, last = batch.query_start[request : request + 2]
            if last > first and length > 0:
                keys = self._keys(batch.block_table[request], length)
                self._choose(q, weights, keys, first, last)
        return self.topk_indices_buffer

    forward_native = forward_cpu

    def _keys(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        """A request's keys in order: [length, D]."""
        cache = self.k_cache.kv_cache
        used = -(-length // cache.shape[1])
        return cache[pages[:used].long()].flatten(0, 1)[:length]

    def _choose(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, first: int, last: int
    ) -> None:
        """Write the top-k positions of tokens first..last, the newest of one request."""
        length = keys.shape[0]
        for start in range(first, last, TOKENS_AT_ONCE):
            stop = min(start + TOKENS_AT_ONCE, last)
            # The last token of the request sees all `length` keys, the one before one less.
            visible = torch.arange(start, stop) + (length - last + 1)
            logits = mqa_logits(q[start:stop], keys, weights[start:stop], end=visible)
            self.topk_indices_buffer[start:stop] = top_k(logits, self.topk_tokens)


class PlainIndexer(Indexer):
    """vLLM's indexer without the fp8 quantization of its queries."""

    def forward(
        self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: Any, rotary_emb: Any
    ) -> torch.Tensor:
        """hidden_states [T, hidden], qr [T, q_lora] -> top-k positions [max_tokens, top_k]."""
        rope = self.rope_dim
        q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        keys_and_weights = self.wk_weights_proj(hidden_states)[0]
        k = self.k_norm(keys_and_weights[:, : self.head_dim])
        weights = keys_and_weights[:, self.head_dim :].float()
        q_rope, k_rope = rotary_emb(
            positions, q[..., :rope].contiguous(), k[:, None, :rope].contiguous()
        )
        q = torch.cat([q_rope.view(-1, self.n_head, rope), q[..., rope:]], -1)
        k = torch.cat([k_rope.view(-1, rope), k[:, rope:]], -1)
        weights = weights * (self.softmax_scale * self.n_head_scale)
        return self.indexer_op(hidden_states, q, k, weights)


class PlainMLAWrapper(MultiHeadLatentAttentionWrapper):
    """The MLA layer with a rotary embedding that is right on CPUs, and the plain indexer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.indexer) is not Indexer:
            return
        for rotary in (self.rotary_emb, self.indexer_rope_emb):
            if rotary is not None:
                # vLLM's C++ rotary kernel takes a tensor's second-last stride for the token
                # stride; MLA passes [T, heads, rope], for which that is the head stride.
                rotary._forward_method = rotary.forward_native
        make_plain(self.indexer)


def make_plain(indexer: Indexer) -> None:
    """Turn an indexer, its op and its cache into the plain ones, before vLLM asks for sizes."""
    operation, cache = indexer.indexer_op, indexer.k_cache
    indexer.__class__ = PlainIndexer
    operation.__class__ = PlainSparseAttnIndexer
    operation._forward_method = operation.forward_cpu
    cache.__class__ = PlainIndexerCache
    cache.dtype = torch.get_default_dtype()
    cache.head_dim = indexer.head_dim

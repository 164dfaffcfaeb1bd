"""Run every kernel of ours once in each form that serving uses, so that nothing compiles later.

Forms differ by the number of tokens (tiles, parts of a token's list), not by lengths, which the
kernels take as arguments. The cache of each layer is read, never written.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.logger import init_logger

from glm5lab.attention.tiles import Device, device_of

logger = init_logger("vllm.glm5lab")

# Tiles and parts of a token's list are the same for all larger batches (attention/tiles.py).
MOST_TOKENS = 1024
INDEXER_TOKENS = (1, 2, 4, 8, 64, 512)  # of prompts: decide how the indexer's kernels are cut


def warm_up(vllm_config: Any) -> None:
    """Warm up the kernels of all layers that vLLM has built; layers alike are done once."""
    from glm5lab.vllm_plugin.backend_cuda import TritonMLASparseImpl

    started = time.perf_counter()
    layers = vllm_config.compilation_config.static_forward_context.values()
    seen = set()
    for layer in layers:
        if isinstance(getattr(layer, "impl", None), TritonMLASparseImpl) and layer.kv_cache.numel():
            key = (layer.impl.num_heads, layer.head_size, layer.kv_cache.dtype)
            if key not in seen:
                most = vllm_config.scheduler_config.max_num_batched_tokens
                attend(layer, min(most, MOST_TOKENS))
            seen.add(key)
    if seen:
        warm_up_indexer(vllm_config)
        torch.cuda.synchronize()
        logger.info("Kernels of glm5lab warmed up in %.1f s.", time.perf_counter() - started)


def token_counts(most: int) -> Iterator[int]:
    """Both ends of each span from a power of two to the next, up to `most`.

    Tiles change at powers of two. Within a span a list goes at most once to the next smaller
    capacity of the merge, or from split to whole.
    """
    first = 1
    while first <= most:
        last = min(2 * first - 1, most)
        yield from sorted({first, last})
        first *= 2


def attend(layer: Any, most: int) -> None:
    """Sparse MLA of one layer, for up to `most` tokens; all of them name the cache's first row."""
    impl = layer.impl
    heads = impl.num_heads * impl.dcp_world_size
    device = layer.kv_cache.device
    top_k = impl.topk_indices_buffer.shape[1]
    slots = torch.zeros(most, top_k, dtype=torch.int32, device=device)
    lengths = torch.full((most,), top_k, dtype=torch.int32, device=device)
    nope = layer.W_UV.new_zeros(most, heads, impl.kv_lora_rank)
    rope = layer.W_UV.new_zeros(most, heads, impl.qk_rope_head_dim)
    pages = torch.zeros(1, 1, dtype=torch.int32, device=device)
    request = torch.zeros(most, dtype=torch.int32, device=device)
    for tokens in token_counts(most):
        q = (nope[:tokens], rope[:tokens])
        if impl.looks_up_pages:
            impl.attend(q, layer.kv_cache, slots[:tokens], table=(pages, request[:tokens]))
            continue
        impl._forward_mqa_kernel(
            q,
            layer.kv_cache,
            slots[:tokens],
            lengths[:tokens],
            layer=layer,
            block_size=layer.kv_cache.shape[1],
            is_decode=True,
        )


def warm_up_indexer(vllm_config: Any) -> None:
    """Logits and top-k of the indexer, where ours take DeepGEMM's place."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    from glm5lab.vllm_plugin import indexer_cuda

    reason = indexer_cuda.why_triton()
    if reason is None:
        return
    logger.info("The indexer runs on Triton: %s.", reason)
    config = vllm_config.model_config.hf_text_config
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, DeepseekV32IndexerCache) and layer.kv_cache.numel():
            score(layer.kv_cache, config, vllm_config.model_config.max_model_len)
            return


def top_k_shapes(top_k: int, longest: int, device: Device) -> list[tuple[int, int]]:
    """Rows and columns of logits, up to `longest`, that launch each form of top-k once."""
    from glm5lab.attention.topk import choose_cut

    forms: dict[object, tuple[int, int]] = {}
    for width in (*(1 << n for n in range(7, longest.bit_length())), longest):
        for rows in (1, device.multiprocessors // 2 + 1):
            cut = choose_cut(top_k, width, rows, device)
            forms.setdefault(cut if width > cut.held else cut.held, (rows, width))
    return list(forms.values())


def score(cache: torch.Tensor, config: Any, longest: int) -> None:
    """The indexer's kernels over one layer's key cache [pages, page_size, 132] uint8."""
    from glm5lab.vllm_plugin import indexer_cuda

    device, top_k = cache.device, config.index_topk
    heads, dim = config.index_n_heads, config.index_head_dim
    most = max(INDEXER_TOKENS)
    q = torch.zeros(most, heads, dim, device=device).to(torch.float8_e4m3fn)
    weights = torch.zeros(most, heads, device=device)
    keys, scales = torch.zeros(256, dim, device=device).to(q.dtype), torch.zeros(256, device=device)
    starts = torch.zeros(most, dtype=torch.int32, device=device)
    ends, chosen = starts + 200, torch.empty(most, top_k, dtype=torch.int32, device=device)
    for tokens in INDEXER_TOKENS:
        bounds = (starts[:tokens], ends[:tokens])
        indexer_cuda.prompt_logits(
            (q[:tokens], None), (keys, scales), weights[:tokens], *bounds, 256
        )
    for rows, width in top_k_shapes(top_k, longest, device_of(device.index)):
        logits = torch.zeros(rows, width, device=device)
        bounds = (starts[:rows], ends[:rows])
        indexer_cuda.prompt_top_k(logits, *bounds, chosen[:rows], rows, width, 1, top_k)
        indexer_cuda.decode_top_k("")(logits, ends[:rows, None], 1, chosen[:rows], top_k, width)
    table = torch.zeros(most, -(-longest // cache.shape[1]), dtype=torch.int32, device=device)
    for queries in (1, 2, 4):
        for requests in (1, 64):
            some = q[: requests * queries].view(requests, queries, heads, dim)
            seen = ends[: requests * queries].view(requests, queries)
            indexer_cuda.decode_logits(
                (some, None),
                cache[:, :, None],
                weights[: requests * queries],
                seen,
                table[:requests],
                None,
                longest,
            )

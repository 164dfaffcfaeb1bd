"""Inputs of GLM-5's sizes, drawn on the GPU."""

import torch

from glm5lab.attention import reference
from glm5lab.attention.reference import FP8_LATENT, FP8_ROW_BYTES

WIDTH, TOP_K, SCALE = 576, 2048, 1 / 16
INDEX_HEADS, INDEX_WIDTH, PAGE = 32, 128, 64


def fp8_rows(count: int) -> torch.Tensor:
    """Random fp8_ds_mla rows without NaN: uint8 [count, 656]."""
    raw = torch.randint(0, 256, (count, FP8_ROW_BYTES), device="cuda", dtype=torch.uint8)
    latent = raw[:, :FP8_LATENT]
    latent[(latent & 0x7F) == 0x7F] = 0x10
    raw[:, 512:528] = (torch.rand(count, 4, device="cuda") * 0.04 + 0.001).view(torch.uint8)
    raw[:, 528:] = (torch.randn(count, 64, device="cuda") * 0.5).bfloat16().view(torch.uint8)
    return raw


def queries(tokens: int, heads: int) -> torch.Tensor:
    """Random bfloat16 [tokens, heads, 576]."""
    return (torch.randn(tokens, heads, WIDTH, device="cuda") * 0.5).bfloat16()


def distinct(inputs: int, tokens: int, rows: int) -> list[torch.Tensor]:
    """For each input slots int32 [tokens, 2048] below `rows`, no two alike.

    Inputs share no slot either, as long as there are enough rows for that. There must be at least
    tokens * 2048.
    """
    lists: list[torch.Tensor] = []
    while len(lists) < inputs:
        slots = torch.randperm(rows, device="cuda").int()
        whole = max(rows // (tokens * TOP_K), 1)
        lists += slots[: whole * tokens * TOP_K].view(whole, tokens, TOP_K).unbind()
    return lists[:inputs]


def enough_inputs(tokens: int, row_bytes: int) -> int:
    """How many inputs have rows of four times what the L2 holds: replays find none of them there.

    And at least so many that launching a graph takes little beside its calls.
    """
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(-(-4 * cache // (tokens * TOP_K * row_bytes)), 12 if tokens <= 64 else 2)


class Sparse:
    """One size of sparse MLA, with several inputs over one cache.

    Args:
        tokens, heads: of the queries.
        kv: [rows, 576] bfloat16, or [rows, 656] uint8.
        inputs: how many queries and lists of slots.
        indices: lists to use in place of `distinct` ones.
        valid: places of each list that count; None for all.
    """

    def __init__(
        self,
        tokens: int,
        heads: int,
        kv: torch.Tensor,
        inputs: int,
        indices: list[torch.Tensor] | None = None,
        valid: int | None = None,
    ) -> None:
        self.tokens, self.heads, self.kv = tokens, heads, kv
        self.q = [queries(tokens, heads) for _ in range(inputs)]
        self.indices = indices or distinct(inputs, tokens, len(kv))
        self.lengths = None
        if valid is not None:
            self.lengths = torch.full((tokens,), valid, device="cuda", dtype=torch.int32)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of the first input, in float64."""
        q = self.q[0].double()
        return reference.sparse_mla(q, self.kv, self.indices[0], SCALE, self.lengths)


def neighbours(tokens: int, rows: int, overlap: float = 0.8) -> torch.Tensor:
    """Slots [tokens, 2048] of which each token keeps a part of its predecessor's."""
    slots = torch.randperm(rows, device="cuda")[:TOP_K]
    lists = []
    for _ in range(tokens):
        lists.append(slots)
        kept = slots[torch.randperm(TOP_K, device="cuda")[: int(TOP_K * overlap)]]
        free = torch.ones(rows, dtype=torch.bool, device="cuda")
        free[kept] = False
        others = free.nonzero()[:, 0]
        others = others[torch.randperm(len(others), device="cuda")[: TOP_K - len(kept)]]
        slots = torch.cat([kept, others])
    return torch.stack(lists).int()


class Logits:
    """fp8 index queries and contiguous keys."""

    def __init__(self, tokens: int, keys: int) -> None:
        shape = (tokens, INDEX_HEADS, INDEX_WIDTH)
        self.q = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
        self.k = torch.randn(keys, INDEX_WIDTH, device="cuda").to(torch.float8_e4m3fn)
        self.k_scale = torch.rand(keys, device="cuda") + 0.5
        self.weights = torch.randn(tokens, INDEX_HEADS, device="cuda")
        self.start = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        self.end = torch.full((tokens,), keys, dtype=torch.int32, device="cuda")

    def expected(self) -> torch.Tensor:
        """Two tokens and 4096 keys in float64."""
        logits = reference.mqa_logits(
            self.q[:2].double(), self.k[:4096].double(), self.weights[:2].double()
        )
        return logits * self.k_scale[:4096].double()


class Paged:
    """fp8 index queries, one a request, and a paged cache of keys and scales."""

    def __init__(self, requests: int, width: int) -> None:
        self.width, pages = width, requests * width // PAGE
        shape = (pages, PAGE, INDEX_WIDTH + 4)
        self.cache = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
        self.flat = self.cache.view(pages, -1)
        scales = torch.rand(pages, PAGE, device="cuda") + 0.5
        self.flat[:, PAGE * INDEX_WIDTH :] = scales.view(torch.uint8)
        self.q = torch.randn(requests, 1, INDEX_HEADS, INDEX_WIDTH, device="cuda").to(
            torch.float8_e4m3fn
        )
        self.weights = torch.randn(requests, INDEX_HEADS, device="cuda")
        self.lens = torch.full((requests,), width, dtype=torch.int32, device="cuda")
        self.table = torch.randperm(pages, device="cuda").int().view(requests, -1)

    def expected(self) -> torch.Tensor:
        """The first request's first 512 keys in float64."""
        pages = self.flat[self.table[0, : 512 // PAGE].long()]
        keys = pages[:, : PAGE * INDEX_WIDTH].reshape(-1, INDEX_WIDTH).view(torch.float8_e4m3fn)
        scales = pages[:, PAGE * INDEX_WIDTH :].contiguous().view(torch.float32).flatten()
        logits = reference.mqa_logits(self.q[0].double(), keys.double(), self.weights[:1].double())
        return (logits * scales.double())[0]

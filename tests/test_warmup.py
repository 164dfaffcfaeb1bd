"""Layer 4: the warm-up reaches every tile that serving can choose."""

import pytest

from glm5lab.attention.compile import device_for
from glm5lab.attention.tiles import (
    Device,
    cut_list,
    merge_tile,
    sparse_mla_parts,
    sparse_mla_tile,
)
from glm5lab.attention.topk import choose_cut
from glm5lab.vllm_plugin.warmup import MOST_TOKENS, token_counts, top_k_shapes


def forms(device, tokens, heads, fp8):
    """The compiled kernels of a batch: attention by its tile, split or not, and the merge."""
    tile = sparse_mla_tile(device, tokens, heads, 2, fp8, True)
    parts, _ = cut_list(2048, tile.rows, sparse_mla_parts(device, tile, tokens, heads, 2048))
    return {(tile, parts > 1)} | ({("merge", merge_tile(parts))} if parts > 1 else set())


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
@pytest.mark.parametrize("heads", [4, 8, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8_ds_mla"])
def test_every_form_of_a_batch_is_warmed_up(capability, heads, fp8):
    counts = [*range(1, 1200), 4096, 32768]
    for multiprocessors in (24, 46, 48, 50, 72, 84, 108, 114, 132, 148, 170, 188):
        device = Device(capability, multiprocessors, device_for(capability).shared_memory)
        served = set[object]().union(*(forms(device, n, heads, fp8) for n in counts))
        warm = token_counts(MOST_TOKENS)
        reached = set[object]().union(*(forms(device, n, heads, fp8) for n in warm))
        assert served == reached, multiprocessors


def test_counts_end_at_the_largest_batch():
    assert list(token_counts(1)) == [1]
    assert list(token_counts(6)) == [1, 2, 3, 4, 6]
    assert list(token_counts(8)) == [1, 2, 3, 4, 7, 8]


@pytest.mark.parametrize("longest", [100, 4096, 40_000, 131_072, 1 << 20])
@pytest.mark.parametrize("top_k", [64, 512, 2048])
def test_every_form_of_top_k_is_warmed_up(top_k, longest):
    device = Device(90, 132, 232_448)

    def form(rows, width):
        cut = choose_cut(top_k, width, rows, device)
        return cut if width > cut.held else cut.held

    shapes = top_k_shapes(top_k, longest, device)
    warm = {form(*shape) for shape in shapes}
    step = max(longest // 997, 1)
    served = {
        form(rows, width) for rows in (1, 64, 500, 8192) for width in range(1, longest + 1, step)
    }
    assert served <= warm
    assert max(width for _, width in shapes) <= longest
    assert max(rows * width for rows, width in shapes) <= 1 << 26  # 256 MiB

"""Layer 4: the warm-up reaches every tile that serving can choose."""

import pytest

from glm5lab.attention.tiles import Device, sparse_mla_parts, sparse_mla_tile
from glm5lab.vllm_plugin.warmup import MOST_TOKENS, token_counts


def forms(device, tokens, heads, fp8):
    """The compiled kernels of a batch: attention by its tile, split or not, and the merge."""
    tile = sparse_mla_tile(device, tokens, heads, 2, fp8, True)
    parts = sparse_mla_parts(device, tile, tokens, heads, 2048)
    return {(tile, parts > 1)} | ({("merge", parts > 8)} if parts > 1 else set())


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
@pytest.mark.parametrize("heads", [4, 8, 16, 64, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8_ds_mla"])
def test_every_form_of_a_batch_is_warmed_up(capability, heads, fp8):
    shared = {80: 166_912, 90: 232_448}.get(capability, 101_376)
    device = Device(capability, 132, shared)
    counts = [*range(1, 1200), 4096, 32768]
    served = set[object]().union(*(forms(device, n, heads, fp8) for n in counts))
    warm = token_counts(MOST_TOKENS)
    assert served == set[object]().union(*(forms(device, n, heads, fp8) for n in warm))


def test_counts_end_at_the_largest_batch():
    assert list(token_counts(1)) == [1]
    assert list(token_counts(6)) == [1, 2, 4, 6]

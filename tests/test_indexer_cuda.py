"""Layer 4: our logits and top-k in the place of vLLM's, called as vLLM's indexer op calls them.

In Triton's interpreter, or on a GPU; see test_indexer_kernels.
"""

import pytest
import torch
from interpreted import run_interpreted
from test_indexer_kernels import FP8, make_case, make_paged_case

from glm5lab.attention import reference

TOP_K = 16


def choose_for_prompts(device):
    """Two requests in one chunk: each token's keys begin where its request's do."""
    from glm5lab.vllm_plugin.indexer_cuda import prompt_logits, prompt_top_k

    q, k, weights, _, _, scale = (x.to(device) for x in make_case(FP8, 9, 32, 128, 150))
    starts = torch.tensor([0] * 4 + [70] * 5, dtype=torch.int32, device=device)
    ends = torch.tensor([67, 68, 69, 70, 146, 147, 148, 149, 150], dtype=torch.int32, device=device)
    # Bounds of a part of a batch may begin at any address.
    shifted = torch.cat([ends[:1], ends])[1:]
    logits = prompt_logits((q, None), (k, scale[:, 0]), weights, starts, shifted, 90)
    assert logits.shape == (9, 90)
    chosen = torch.full((9, TOP_K), -7, dtype=torch.int32, device=device)
    lengths = ends - starts
    prompt_top_k(logits, torch.zeros_like(lengths), lengths, chosen, 9, 90, 1, TOP_K)
    exact = reference.mqa_logits(q.double(), k.double(), weights, starts, ends, scale)
    expected = reference.top_k(exact, TOP_K)
    assert torch.equal(chosen.sort(1).values + starts[:, None], expected.sort(1).values.int())


def choose_for_decodes(device):
    """Two queries a request, and as many lengths; then the last one's length alone."""
    from glm5lab.vllm_plugin.indexer_cuda import decode_logits, decode_top_k

    case = make_paged_case(FP8, 3, 2, 32, 128, 64, 130)
    q, cache, weights, lengths, table = (x.to(device) for x in case)
    lengths[0] = 5  # fewer keys than top-k
    seen = torch.stack([lengths - 1, lengths], 1).int()
    logits = decode_logits((q, None), cache[:, :, None], weights, seen, table, None, 200)
    exact = reference.paged_mqa_logits(q.double(), cache, weights, seen, table, 200)
    expected = reference.top_k(exact, TOP_K).sort(1).values
    for lens in (seen, lengths[:, None].int()):
        chosen = torch.full((6, TOP_K), -7, dtype=torch.int32, device=device)
        decode_top_k("persistent")(logits, lens, 2, chosen, TOP_K, 130)
        assert torch.equal(chosen.sort(1).values, expected.int())


def test_choices_equal_the_reference_in_the_interpreter():
    run_interpreted(
        "import test_indexer_cuda as t; t.choose_for_prompts('cpu'); t.choose_for_decodes('cpu')"
    )


@pytest.mark.gpu
def test_choices_equal_the_reference_on_the_gpu():
    choose_for_prompts("cuda")
    choose_for_decodes("cuda")

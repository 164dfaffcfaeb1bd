"""Layer 4 on a GPU: vllm-gguf-plugin's kernels against the gguf package's numbers in float64.

Kernels that multiply blocks round activations to 8 bits in groups of 32 first (half a per cent). So
do the references here; some kernels do not where they add up what a block's minimum multiplies.
Experts are called as the layer does.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
from packed import KINDS, numbers, random_blocks, relative_error, type_id

from glm5lab.gguf.kernels import MMQ, TRITON
from glm5lab.gguf.part_reader import PartReader
from glm5lab.gguf.parts import block_of, whole
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.gguf.tensors import type_sizes
from glm5lab.loading.destinations import Copy
from glm5lab.loading.streaming import Streamer
from glm5lab.vllm_plugin import gguf_kernels
from glm5lab.vllm_plugin.gguf_kernels import Routing, embedding, expert_matmul, matmul

pytestmark = pytest.mark.gpu

BF16 = 3e-3  # relative error
# Types whose blocks have a minimum: number = minimum + scale * quants, and where the quants begin.
QUANTS = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4, "Q4_K": 16, "Q5_K": 16}


@cache
def weights(kind: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Blocks and, in float64, what they stand for, and the minima in it; all on the GPU."""
    blocks = random_blocks(kind, shape)
    lowest = blocks.clone().view(-1, type_sizes()[type_id(kind)][2])
    lowest[:, QUANTS.get(kind, 0) :] = 0
    minima = numbers(lowest.view(blocks.shape), kind)
    return blocks.cuda(), numbers(blocks, kind).cuda(), minima.cuda()


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations in Q8_1 (quantize_q8_1 of gguf_kernel.cu), and their sums over each group."""
    groups = x.float().unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    quants = torch.where(scale > 0, groups / scale, 0.0).round()
    sums = groups.sum(-1, keepdim=True).half().double() / 32
    return (scale.half().double() * quants).flatten(-2), sums.expand(groups.shape).flatten(-2)


def assert_product(
    found: torch.Tensor,
    kind: str,
    exact: bool,
    x: torch.Tensor,
    product: Any,
    values: torch.Tensor,
    minima: torch.Tensor,
) -> None:
    """A kernel's result is that of rounded activations; minima may meet their exact sums."""
    eight, sums = rounded(x)
    expected = [product(x.double() if exact else eight, values)]
    if kind in QUANTS:
        expected.append(product(eight, values - minima) + product(sums, minima))
    assert torch.isfinite(found).all()
    assert min(relative_error(found, e) for e in expected) < BF16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 17, 130])
def test_products(kind, tokens):
    weight, *numbers_of = weights(kind, (384, 2048))
    x = torch.randn(tokens, 2048).bfloat16().cuda()
    found = matmul(x, weight, type_id(kind))
    most = gguf_kernels.MORE_TOKENS if kind in MMQ else gguf_kernels.FEW_TOKENS[False][0]
    exact = kind in TRITON or tokens > most
    assert_product(found, kind, exact, x, lambda x, values: x @ values.T, *numbers_of)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_table(kind):
    weight, ids = random_blocks(kind, (64, 6144)), torch.tensor([0, 63, 5, 5, 17])
    found = embedding(ids.cuda(), weight.cuda(), type_id(kind), torch.bfloat16)
    assert relative_error(found, numbers(weight, kind)[ids]) < BF16


@pytest.mark.parametrize("spread", [False, True], ids=["all experts", "half of them"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 65, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_experts(kind, tokens, spread):
    experts, k, rows, columns = 16, 4, 256, 512
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    places, held = None, list(range(experts))
    if spread:
        held = held[1::2]
        places = torch.full((experts,), -1, dtype=torch.int32)
        places[held] = torch.arange(len(held), dtype=torch.int32)
        places = places.cuda()
    weight, *numbers_of = weights(kind, (experts, rows, columns))
    routing = Routing(ids.cuda(), experts, places)
    here, pairs = routing.here.flatten(), torch.arange(tokens * k).cuda()

    def product(wide: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """All experts' products, of which a pair has one: less memory than a matrix a pair."""
        return torch.einsum("pc,erc->per", wide, values)[pairs, ids.flatten().cuda()][here]

    for shared in (True, False):
        x = torch.randn(tokens if shared else tokens * k, columns).bfloat16().cuda()
        found = expert_matmul(x, weight[held], type_id(kind), routing, shared)
        assert torch.isfinite(found).all()
        wide = x.repeat_interleave(k, 0) if shared else x
        assert_product(found[here], kind, kind in TRITON, wide, product, *numbers_of)


@pytest.mark.parametrize("tokens", [3, 200])
def test_stacks_beyond_32_bits_of_bytes(tokens):
    """256 experts of 4096 x 6144 in Q4_K are 3.6 GB: the last ones lie behind 2 GiB."""
    experts, rows, columns, kind = 256, 4096, 6144, "Q4_K"
    one = random_blocks(kind, (rows, columns))
    weight = torch.zeros(experts, *one.shape, dtype=torch.uint8, device="cuda")
    assert weight.numel() > gguf_kernels.INT32
    used = [0, 151, 152, 255]
    for expert in used:
        weight[expert] = one.roll(expert, 0).cuda()
    ids = torch.tensor(used).repeat(tokens, 1)
    x = torch.randn(tokens, columns).bfloat16()
    found = expert_matmul(
        x.cuda(), weight, type_id(kind), Routing(ids.cuda(), experts, None), shared=True
    ).view(tokens, len(used), rows)
    plain = rounded(x)[0] @ numbers(one, kind).T
    for place, expert in enumerate(used):
        assert relative_error(found[:, place], plain.roll(expert, 1)) < BF16


def test_products_of_a_captured_graph_follow_their_inputs():
    """Shapes are fixed while a graph is captured; nothing waits for the host."""
    kind, experts, k = "Q4_K", 16, 4
    weight = random_blocks(kind, (experts, 256, 512))
    x = torch.zeros(8, 512, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(8, k, dtype=torch.int64, device="cuda")
    packed = weight.cuda()

    def product() -> torch.Tensor:
        return expert_matmul(x, packed, type_id(kind), Routing(ids, experts, None), shared=True)

    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product()
    fresh, chosen = torch.randn(8, 512).bfloat16(), torch.randint(0, experts, (8, k))
    x.copy_(fresh)
    ids.copy_(chosen)
    graph.replay()
    wide = rounded(fresh)[0].repeat_interleave(k, 0)
    expected = torch.einsum("prc,pc->pr", numbers(weight, kind)[chosen.flatten()], wide)
    assert relative_error(out, expected) < BF16


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_loaded_through_pinned_memory_is_the_file(tmp_path, packed, monkeypatch):
    """More pieces than buffers, so that each buffer is used again while copies are under way."""
    monkeypatch.setattr("glm5lab.loading.streaming.PIECE_BYTES", 1 << 13)
    model = open_gguf(write_sample(tmp_path, types="mix"))
    name = "blk.1.ffn_down_exps.weight"
    tensor = model.tensors[name]
    elements, nbytes = block_of(tensor)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // elements * nbytes if packed else 256)
    parameter = torch.full(shape, 7, dtype=torch.uint8 if packed else torch.float32, device="cuda")
    with PartReader() as reader:
        for _ in Streamer(reader, {"p": parameter}).run([Copy("p", whole(tensor), packed=packed)]):
            pass
    if packed:
        expected = torch.from_numpy(model.raw(name).copy()).view(shape)
    else:
        expected = torch.from_numpy(model.dequantize(name))
    assert math.prod(shape) == parameter.numel()
    assert torch.equal(parameter.cpu(), expected)

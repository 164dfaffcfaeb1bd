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
from packed import KINDS, numbers, random_blocks, random_quantizer, relative_error, type_id

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

# Relative errors: of products of bf16, and of those in Triton, which round what they multiply.
BF16, IN_BF16 = 3e-3, 1e-2
# Types whose blocks have a minimum: number = minimum + scale * quants, and where the quants begin.
QUANTS = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4, "Q4_K": 16, "Q5_K": 16, "IQ1_S": 2}


@cache
def weights(kind: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Blocks and, in float64, what they stand for, and the minima in it; all on the GPU."""
    blocks = random_blocks(kind, shape)
    lowest = blocks.clone().view(-1, type_sizes()[type_id(kind)][2])
    if kind == "IQ1_S":  # the first entry of its grid is the lowest; scales and signs stay
        lowest[:, 2:35] = 0
        lowest[:, 35::2] &= 0xF0
        lowest[:, 36::2] = 0
    else:
        lowest[:, QUANTS.get(kind, 0) :] = 0
    minima = numbers(lowest.view(blocks.shape), kind)
    return blocks.cuda(), numbers(blocks, kind).cuda(), minima.cuda()


def activations(*shape: int) -> torch.Tensor:
    """bf16 on the GPU, none of which lies halfway between two numbers of 8 bits."""
    groups = torch.randn(*shape).bfloat16().float().unflatten(-1, (-1, 32))
    steps = groups / (groups.abs().amax(-1, keepdim=True) / 127)
    halfway = (steps - steps.floor() - 0.5).abs() < 1e-3
    return torch.where(halfway, 0.0, groups).flatten(-2).bfloat16().cuda()


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
    error = min(relative_error(found, e) for e in expected)
    assert error < (IN_BF16 if kind in TRITON else BF16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 17, 130])
def test_products(kind, tokens):
    weight, *numbers_of = weights(kind, (384, 2048))
    x = activations(tokens, 2048)
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
        x = activations(tokens if shared else tokens * k, columns)
        found = expert_matmul(x, weight[held], type_id(kind), routing, shared)
        assert torch.isfinite(found).all()
        wide = x.repeat_interleave(k, 0) if shared else x
        assert_product(found[here], kind, kind in TRITON, wide, product, *numbers_of)


@pytest.mark.parametrize("tokens", [3, 200])
def test_stacks_beyond_32_bits_of_bytes(tokens):
    """256 experts of 4096 x 6144 in Q4_K are 3.6 GB: the last ones lie behind 2 GiB."""
    experts, rows, columns, kind = 256, 4096, 6144, "Q4_K"
    one, *numbers_of = weights(kind, (rows, columns))
    weight = torch.zeros(experts, *one.shape, dtype=torch.uint8, device="cuda")
    assert weight.numel() > gguf_kernels.INT32
    used = [0, 151, 152, 255]
    for expert in used:
        weight[expert] = one.roll(expert, 0)
    ids = torch.tensor(used).repeat(tokens, 1)
    x = activations(tokens, columns)
    found = expert_matmul(
        x, weight, type_id(kind), Routing(ids.cuda(), experts, None), shared=True
    ).view(tokens, len(used), rows)
    for place, expert in enumerate(used):
        own = found[:, place].roll(-expert, 1)
        assert_product(own, kind, False, x, lambda x, values: x @ values.T, *numbers_of)


@pytest.mark.parametrize("tokens", [8, 40], ids=["few tokens", "sorted by expert"])
def test_products_of_a_captured_graph_follow_their_inputs(tokens):
    """Shapes are fixed while a graph is captured; nothing waits for the host."""
    kind, experts, k = "Q4_K", 16, 4
    packed, *numbers_of = weights(kind, (experts, 256, 512))
    x = torch.zeros(tokens, 512, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(tokens, k, dtype=torch.int64, device="cuda")

    def product() -> torch.Tensor:
        return expert_matmul(x, packed, type_id(kind), Routing(ids, experts, None), shared=True)

    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product()
    fresh, chosen = activations(tokens, 512), torch.randint(0, experts, (tokens, k)).cuda()
    x.copy_(fresh)
    ids.copy_(chosen)
    graph.replay()

    def expected(wide: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.einsum("prc,pc->pr", values[chosen.flatten()], wide)

    assert_product(out, kind, False, fresh.repeat_interleave(k, 0), expected, *numbers_of)


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_loaded_through_pinned_memory_is_the_file(tmp_path, packed, monkeypatch):
    """More pieces than buffers, so that each buffer is used again while copies are under way."""
    monkeypatch.setattr("glm5lab.loading.streaming.PIECE_BYTES", 1 << 13)
    monkeypatch.setattr("glm5lab.gguf.quantize._quantize_chunk", random_quantizer)
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

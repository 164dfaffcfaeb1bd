"""Layer 4: products with weights that stay GGUF blocks, on the CPU and with a stand-in for kernels.

`test_gguf_kernels_gpu.py` has the real kernels.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed import KINDS, numbers, random_blocks, relative_error, type_id

from glm5lab.vllm_plugin import gguf_kernels
from glm5lab.vllm_plugin.gguf_kernels import Routing, embedding, expert_matmul, matmul
from glm5lab.vllm_plugin.gguf_parameters import Held

EXACT = 1e-5  # fp32 against the float64 reference


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_and_rows_on_the_cpu(kind):
    weight = random_blocks(kind, (48, 512))
    x = torch.randn(5, 512)
    expected = x.double() @ numbers(weight, kind).T
    assert relative_error(matmul(x, weight, type_id(kind)), expected) < EXACT
    assert matmul(x[:0], weight, type_id(kind)).shape == (0, 48)
    ids = torch.tensor([[3, 0], [47, 3]])
    rows = embedding(ids, weight, type_id(kind), torch.float32)
    assert relative_error(rows, numbers(weight, kind)[ids]) < EXACT
    assert embedding(ids[:0], weight, type_id(kind), torch.float32).shape == (0, 2, 512)


def reference(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, shared: bool
) -> torch.Tensor:
    """Token by token, expert by expert; weight [experts, rows, columns] in float64."""
    k = ids.shape[1]
    wide = x.double().repeat_interleave(k, 0) if shared else x.double()
    return torch.stack([weight[e] @ row for e, row in zip(ids.flatten(), wide, strict=True)])


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_XS", "Q8_0", None])
@pytest.mark.parametrize("shared", [True, False])
def test_experts_on_the_cpu_with_all_and_with_some_of_them(kind, shared):
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(7)])
    x = torch.randn(7 if shared else 21, 256, generator=generator)
    weight = random_blocks(kind, (8, 32, 256)) if kind else torch.randn(8, 32, 256)
    values = numbers(weight, kind) if kind else weight.double()
    expected = reference(x, values, ids, shared)
    number = type_id(kind) if kind else None
    found = expert_matmul(x, weight, number, Routing(ids, 8, None), shared)
    assert relative_error(found, expected) < EXACT

    places = torch.tensor([-1, 2, -1, 0, -1, -1, 1, 3], dtype=torch.int32)  # 3, 6, 1, 7 are here
    routing = Routing(ids, 8, places)
    some = expert_matmul(x, weight[[3, 6, 1, 7]], number, routing, shared)
    here = routing.here.flatten()
    assert torch.equal(here, places[ids.flatten()] >= 0)
    assert relative_error(some[here], expected[here]) < EXACT
    assert torch.isfinite(some).all()


class StandIn:
    """The plugin's operations as its CUDA code defines them, in PyTorch; notes each call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.triton = False

    def of(self, triton=False):
        """`gguf_kernels.plugin`; what Triton has is called by its own name."""
        self.triton = triton
        return self

    def ggml_dequantize(self, weight, kind, rows, columns, dtype):
        self.calls.append("dequantize")
        assert weight.is_contiguous()
        return numbers(weight, self.name(kind)).to(dtype).view(rows, columns)

    def ggml_mul_mat_vec_a8(self, weight, x, kind, rows):
        return self._product("vector", weight, x, kind, rows)

    def ggml_mul_mat_a8(self, weight, x, kind, rows):
        return self._product("matrix", weight, x, kind, rows)

    def _product(self, call, weight, x, kind, rows):
        self.calls.append(f"triton, {call}" if self.triton else call)
        assert weight.is_contiguous()
        assert x.is_contiguous()
        assert weight.shape[0] == rows
        return (x.double() @ numbers(weight, self.name(kind)).T).to(x.dtype)

    def ggml_moe_get_block_size(self, kind):
        return 4

    def ggml_moe_a8_vec(self, x, weight, ids, k, kind, rows, tokens):
        """moe_vec.cuh: one row of the grid for each pair, any expert's number is believed."""
        assert not self.triton
        self.calls.append("experts, vector")
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        assert x.is_contiguous()
        assert tokens == x.shape[0]
        assert ids.numel() == tokens * k <= gguf_kernels.GRID
        assert int(ids.min()) >= 0
        assert int(ids.max()) < weight.shape[0]
        values = numbers(weight, self.name(kind))
        wide = x.double().repeat_interleave(k, 0)
        return torch.einsum("prc,pc->pr", values[ids.flatten().long()], wide).to(x.dtype)

    def ggml_moe_a8(self, x, weight, ids, experts, count, kind, rows, k, tokens):
        """moe.cuh: blocks of sorted pairs; a negative expert leaves zeros."""
        self.calls.append("triton, experts" if self.triton else "experts, matrix")
        assert (weight.shape[0] - 1) * weight.stride(0) <= gguf_kernels.INT32
        assert weight[0].is_contiguous()
        assert x.is_contiguous()
        out = x.new_zeros(tokens * k, rows)
        values = numbers(weight, self.name(kind))
        for number, expert in enumerate(experts.tolist()):
            if expert < 0 or number * 4 >= int(count):
                continue
            for pair in ids[number * 4 : number * 4 + 4].tolist():
                if pair < tokens * k:
                    out[pair] = (values[expert] @ x[pair // k].double()).to(x.dtype)
        return out

    @staticmethod
    def name(kind: int) -> str:
        import gguf

        return gguf.GGMLQuantizationType(kind).name


def align(ids, block, experts, expert_map):
    """vLLM's moe_align_block_size: pairs by expert, each expert's filled up to whole blocks."""
    pairs = ids.flatten()
    padding, order, numbers_, count = pairs.numel(), [], [], 0
    for expert in range(experts):
        mine = torch.nonzero(pairs == expert).flatten().tolist()
        mine += [padding] * (-len(mine) % block)
        order += mine
        here = expert if expert_map is None else int(expert_map[expert])
        numbers_ += [here] * (len(mine) // block)
        count += len(mine)
    tail = [padding] * (experts * (block - 1))
    return torch.tensor(order + tail), torch.tensor(numbers_), torch.tensor([count])


@pytest.fixture
def stand_in(monkeypatch):
    """The way that a GPU takes, with the stand-in at its end."""
    ops = StandIn()
    monkeypatch.setattr(gguf_kernels, "plugin", ops.of)
    monkeypatch.setattr(gguf_kernels, "on_gpu", lambda x: True)
    monkeypatch.setattr(
        "vllm.model_executor.layers.fused_moe.moe_align_block_size.moe_align_block_size", align
    )
    return ops


@pytest.mark.parametrize(
    ("kind", "tokens", "rows", "call"),
    [
        ("Q4_K", 1, 64, "vector"),
        ("Q4_K", 6, 64, "vector"),
        ("Q4_K", 7, 64, "matrix"),
        ("Q4_K", 24, 64, "matrix"),
        ("Q4_K", 25, 64, "dequantize"),
        ("Q8_0", 3, 5152, "matrix"),
        ("IQ4_XS", 16, 64, "vector"),
        ("IQ4_XS", 17, 64, "dequantize"),
        ("IQ4_XS", 9, 5152, "dequantize"),
        ("IQ3_S", 8, 5152, "triton, vector"),
        ("IQ3_S", 17, 64, "dequantize"),
    ],
)
def test_which_kernel_a_product_calls(stand_in, kind, tokens, rows, call):
    weight, x = random_blocks(kind, (rows, 256)), torch.randn(256, tokens).T
    found = matmul(x, weight, type_id(kind))
    assert stand_in.calls == [call]
    assert relative_error(found, x.double() @ numbers(weight, kind).T) < EXACT


def test_numbers_for_many_tokens_are_made_a_few_rows_at_a_time(stand_in, monkeypatch):
    monkeypatch.setattr(gguf_kernels, "NUMBERS", 30 * 256)
    weight, x = random_blocks("Q6_K", (64, 256)), torch.randn(40, 256)
    found = matmul(x, weight, type_id("Q6_K"))
    assert stand_in.calls == ["dequantize"] * 3
    assert relative_error(found, x.double() @ numbers(weight, "Q6_K").T) < EXACT


@pytest.mark.parametrize("spread", [False, True], ids=["all experts", "half of them"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("kind", "tokens", "call", "groups"),
    [
        ("Q4_K", 16, "experts, vector", 1),
        ("Q4_K", 17, "experts, matrix", 1),
        ("Q4_K", 17, "experts, matrix", 3),
        ("IQ4_XS", 65, "experts, vector", 1),
        ("IQ3_S", 1, "triton, experts", 1),
        ("IQ3_S", 65, "triton, experts", 3),
    ],
)
def test_which_kernel_experts_call(
    stand_in, monkeypatch, kind, tokens, call, groups, shared, spread
):
    """Groups: a stack of more bytes than 32 bits count is taken in several calls."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(tokens)])
    places = torch.tensor([-1, 0, -1, 1, 2, -1], dtype=torch.int32) if spread else None
    held = [1, 3, 4] if spread else list(range(6))
    weight = random_blocks(kind, (6, 16, 256))
    x = torch.randn(tokens if shared else 2 * tokens, 256, generator=generator)
    if groups > 1:
        monkeypatch.setattr(gguf_kernels, "INT32", weight.stride(0) * -(-len(held) // groups))
    routing = Routing(ids, 6, places)
    found = expert_matmul(x, weight[held], type_id(kind), routing, shared)
    assert stand_in.calls == [call] * groups
    here = routing.here.flatten()
    expected = reference(x, numbers(weight, kind), ids, shared)
    assert relative_error(found[here], expected[here]) < EXACT
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("IQ4_XS", "Q5_K", "BF16")])
@pytest.mark.parametrize("tokens", [5, 100])
def test_a_layer_of_experts_takes_tokens_in_chunks(stand_in, monkeypatch, types, tokens):
    """Gate and up of one type and of two, down quantized or not; the grid holds few pairs here."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from glm5lab.vllm_plugin import quantization

    monkeypatch.setattr(gguf_kernels, "GRID", 2 * 30)
    monkeypatch.setattr(
        quantization, "silu_and_mul", lambda x: torch.nn.functional.silu(x[:, :256]) * x[:, 256:]
    )
    experts, hidden, width = 6, 256, 256
    stacks: dict[str, Any] = {}
    values: dict[str, torch.Tensor] = {}
    for part, kind in zip(("w1", "w3", "w2"), types, strict=True):
        shape = (experts, hidden if part == "w2" else width, width if part == "w2" else hidden)
        plain = kind == "BF16"
        stacks[part] = torch.randn(shape) * 0.05 if plain else random_blocks(kind, shape)
        values[part] = stacks[part].double() if plain else numbers(stacks[part], kind)
    layer: Any = torch.nn.Module()
    method = quantization.PackedExpertsMethod.__new__(quantization.PackedExpertsMethod)
    fused = types[0] == types[1]
    names = {"w13_weight": types[0]} if fused else {"w1_weight": types[0], "w3_weight": types[1]}
    names["w2_weight"] = types[2]
    method.held = {n: Held(None if k == "BF16" else type_id(k)) for n, k in names.items()}
    stacks["w13"] = torch.cat([stacks["w1"], stacks["w3"]], dim=1) if fused else None
    for name in names:
        setattr(layer, name, stacks[name.removesuffix("_weight")])
    layer.activation = MoEActivation.SILU
    layer.apply_router_weight_on_input = False
    layer.global_num_experts, layer.expert_map = experts, None
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
    weights, x = torch.rand(tokens, 2), torch.randn(tokens, hidden)
    found = method.apply(layer, x, weights, ids)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, (row, some) in enumerate(zip(x.double(), ids.tolist(), strict=True)):
        for expert, weight in zip(some, weights[token].double(), strict=True):
            gate, up = values["w1"][expert] @ row, values["w3"][expert] @ row
            inner = torch.nn.functional.silu(gate) * up
            expected[token] += weight * (values["w2"][expert] @ inner)
    assert relative_error(found, expected) < EXACT


def test_what_glm5_does_not_need_is_refused(stand_in):
    from glm5lab.vllm_plugin import quantization

    method = quantization.PackedExpertsMethod.__new__(quantization.PackedExpertsMethod)
    layer = SimpleNamespace(activation="gelu", apply_router_weight_on_input=False)
    with pytest.raises(NotImplementedError, match="activation gelu"):
        method.apply(layer, torch.ones(1, 4), torch.ones(1, 1), torch.ones(1, 1))


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch):
    import sys

    from glm5lab.errors import Glm5labError

    gguf_kernels.plugin.cache_clear()
    monkeypatch.setitem(sys.modules, "vllm_gguf_plugin", None)
    with pytest.raises(Glm5labError, match=r"pip install vllm-gguf-plugin==0\.0\.5"):
        gguf_kernels.plugin()


def test_what_is_measured_is_what_is_compared(stand_in, monkeypatch):
    """The benchmark's cases at small sizes, on the way that a GPU takes; nothing is timed."""
    from glm5lab.kernel_bench import gguf_weights

    sizes = {"HIDDEN": 256, "WIDTH": 256, "EXPERTS": 12, "TOP_K": 3, "HEADS": 512, "CHECKED": 32}
    for name, value in sizes.items():
        monkeypatch.setattr(gguf_weights, name, value)
    monkeypatch.setattr(gguf_weights, "TOKENS", (1, 7, 70))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    for name in ("randn", "rand", "randint", "tensor"):
        original = getattr(torch, name)

        def on_the_cpu(*args, original=original, **kwargs):
            return original(*args, **{k: v for k, v in kwargs.items() if k != "device"})

        monkeypatch.setattr(torch, name, on_the_cpu)

    def measure(case, implementations, inputs, error, floor_us, bound):
        for name, compute in implementations.items():
            for number in range(1, inputs):
                compute(number)
            yield case, name, error(compute(0)), floor_us, bound

    monkeypatch.setattr(gguf_weights, "measure", measure)
    rows: list[Any] = []
    for kind in gguf_weights.KINDS:
        rows += [*gguf_weights.linear(kind, 1.0), *gguf_weights.experts(kind, 1.0)]
    # Twice linear and two stacks for three counts of tokens, and of three types a second form.
    assert len(rows) == 4 * 3 * 4 + 3 * 2
    for case, name, error, floor_us, bound in rows:
        assert error < bound, (case, name)
        assert floor_us > 0

"""GLM-5's norms, rotations and cache writes as PyTorch operations, for GPUs before Ada."""

import pytest
import torch

from glm5lab.attention.reference import gather, page_parts, unpack_fp8_rows
from glm5lab.vllm_plugin import ampere

T, Q, LATENT, ROPE, WIDTH, HEADS = 6, 32, 512, 64, 128, 4


def inputs(dtype=torch.bfloat16, device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape, kind=dtype):
        return torch.randn(shape, generator=gen).to(kind).to(device)

    angles = torch.rand(50, ROPE // 2, generator=gen) * 6
    return {
        "positions": torch.tensor([0, 1, 5, 9, 48, 49], device=device),
        "q_c": normal(T, Q),
        "q_rms_norm_w": normal(Q),
        "kv_c": normal(T, LATENT),
        "kv_rms_norm_w": normal(LATENT),
        "k_pe": normal(T, ROPE),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], 1).to(device),
        "index_k": normal(T, WIDTH),
        "k_w": normal(WIDTH, kind=torch.float32),
        "k_b": normal(WIDTH, kind=torch.float32),
        "index_q": normal(T, HEADS, WIDTH),
        "weights": normal(T, HEADS),
        "q_pe": normal(T, 8, ROPE),
        "slots": torch.tensor([70, -1, 3, 4, 127, 0], device=device),
    }


def call_norm_rope(norm_rope, x, cache, index_cache, top_k, interleaved, **more):
    """The call of vLLM's DeepseekV32Attention.forward."""
    out = [torch.empty_like(x["kv_c"]), torch.empty_like(x["k_pe"])]
    q = norm_rope(
        x["positions"],
        x["q_c"],
        x["q_rms_norm_w"],
        1e-6,
        x["kv_c"],
        x["kv_rms_norm_w"],
        1e-6,
        x["k_pe"],
        x["cos_sin"],
        x["index_k"],
        x["k_w"],
        x["k_b"],
        1e-6,
        x["cos_sin"],
        top_k,
        slot_mapping=x["slots"],
        indexer_slot_mapping=x["slots"],
        indexer_k_cache=index_cache,
        indexer_cache_shuffled=False,
        mla_kv_cache=cache,
        mla_k_scale=torch.ones(1, device=cache.device),
        skip_scale=True,
        index_rope_interleave=interleaved,
        kv_c_out=out[0],
        k_pe_out=out[1],
        index_k_out=None,
        **more,
    )
    return q, *out


def turned(x, positions, cos_sin, interleaved):
    """Rotation as a product of complex numbers, in float64."""
    turn = cos_sin.shape[1]
    angle = torch.complex(*cos_sin.double()[positions].chunk(2, -1))
    head = x[..., :turn].double()
    angle = angle.view(len(positions), *[1] * (x.dim() - 2), turn // 2)
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).mT
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    result = result.flatten(-2) if interleaved else result.mT.flatten(-2)
    return torch.cat([result, x[..., turn:].double()], -1)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8_ds_mla"])
def test_rows_keys_and_queries(fp8, interleaved):
    x = inputs()
    shape = (2, 64, 656) if fp8 else (2, 64, 576)
    cache = torch.zeros(shape, dtype=torch.uint8 if fp8 else torch.bfloat16)
    keys = torch.zeros(2, 64, WIDTH + 4, dtype=torch.uint8)
    top_k = torch.zeros(T + 2, 16, dtype=torch.int32)
    dtype = "fp8_ds_mla" if fp8 else "auto"
    q, latent, rope = call_norm_rope(
        ampere.norm_rope, x, cache, keys, top_k, interleaved, mla_kv_cache_dtype=dtype
    )
    norm = torch.nn.functional.rms_norm
    expected = norm(x["q_c"].double(), (Q,), x["q_rms_norm_w"].double(), 1e-6)
    torch.testing.assert_close(q.double(), expected, rtol=8e-3, atol=1e-3)
    expected = norm(x["kv_c"].double(), (LATENT,), x["kv_rms_norm_w"].double(), 1e-6)
    torch.testing.assert_close(latent.double(), expected, rtol=8e-3, atol=1e-3)
    expected = turned(x["k_pe"], x["positions"], x["cos_sin"], True)
    torch.testing.assert_close(rope.double(), expected, rtol=8e-3, atol=8e-3)

    kept = x["slots"] >= 0
    rows = gather(cache, x["slots"][kept])
    whole = torch.cat([latent, rope], 1)[kept]
    assert (rows.float() - whole.float()).norm() < (0.04 if fp8 else 1e-6) * whole.float().norm()
    used = torch.zeros(2, 64, dtype=torch.bool)
    used.view(-1)[x["slots"][kept]] = True
    assert torch.equal(cache.flatten(2).any(-1), used)

    key = torch.nn.functional.layer_norm(
        x["index_k"].double(), (WIDTH,), x["k_w"].double(), x["k_b"].double(), 1e-6
    )
    key = turned(key, x["positions"], x["cos_sin"], interleaved)[kept]
    values, scales = page_parts(keys, WIDTH)
    assert scales is not None
    place = (x["slots"][kept] // 64, x["slots"][kept] % 64)
    stored = values[place].double() * scales[place].double()[:, None]
    assert (stored - key).norm() < 0.04 * key.norm()
    assert torch.all(top_k[:T] == -1)
    assert torch.all(top_k[T:] == 0)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
def test_index_queries_and_weights(interleaved):
    x = inputs()
    values, weights, q = ampere.query(
        x["positions"],
        x["q_pe"],
        x["cos_sin"],
        x["index_q"],
        x["cos_sin"],
        x["q_pe"],
        torch.ones(1),
        x["weights"],
        0.5,
        0.25,
        index_rope_interleave=interleaved,
        quantize_mqa=False,
    )
    expected = turned(x["q_pe"], x["positions"], x["cos_sin"], True)
    torch.testing.assert_close(q.double(), expected, rtol=8e-3, atol=1.6e-2)
    exact = turned(x["index_q"], x["positions"], x["cos_sin"], interleaved)
    assert values is not None
    assert weights is not None
    # The scale went into the weights: their product with the values is what counts.
    found = values.double() * weights.double()[..., None]
    expected = exact * (x["weights"].double() * 0.125)[..., None]
    assert (found - expected).norm() < 0.04 * expected.norm()
    assert values.dtype == torch.float8_e4m3fn


def ask_without_index_query(x, **options):
    q, one = x["q_pe"], torch.ones(1)
    given = (x["positions"], q, x["cos_sin"], None, None, q, one, None, 0.0, 0.0)
    return ampere.query(*given, **options)


def test_a_layer_that_reuses_a_selection_leaves_it_and_its_keys_alone():
    x = inputs()
    cache = torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    top_k = torch.arange(T * 4, dtype=torch.int32).view(T, 4)
    before = top_k.clone()
    call_norm_rope(ampere.norm_rope, x, cache, None, top_k, True, has_indexer=False)
    assert torch.equal(top_k, before)
    assert ask_without_index_query(x, has_indexer=False, quantize_mqa=False)[:2] == (None, None)


def test_plain_fp8_is_refused():
    x = inputs()
    cache = torch.zeros(2, 64, 576, dtype=torch.uint8)
    with pytest.raises(ValueError, match="mla_kv_cache_dtype: expected fp8_ds_mla or 16 bits"):
        call_norm_rope(ampere.norm_rope, x, cache, None, None, True, mla_kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="quantize_mqa: expected False"):
        ask_without_index_query(x)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8_ds_mla"])
def test_results_are_those_of_vllms_kernels(fp8):
    """Beside vLLM's own kernels, which run from Ada on."""
    kernels = pytest.importorskip("vllm.models.deepseek_v32.common.kernels")
    x = inputs(device="cuda")
    found = []
    for norm_rope in (ampere.norm_rope, kernels.fused_norm_rope):
        shape = (2, 64, 656) if fp8 else (2, 64, 576)
        dtype = torch.uint8 if fp8 else torch.bfloat16
        cache = torch.zeros(shape, dtype=dtype, device="cuda")
        keys = torch.zeros(2, 64, WIDTH + 4, dtype=torch.uint8, device="cuda")
        top_k = torch.zeros(T, 2048, dtype=torch.int32, device="cuda")
        name = "fp8_ds_mla" if fp8 else "auto"
        call_norm_rope(norm_rope, x, cache, keys, top_k, True, mla_kv_cache_dtype=name)
        values, scales = page_parts(keys, WIDTH)
        assert scales is not None
        rows = unpack_fp8_rows(cache) if fp8 else cache
        found.append((rows.float(), values.float() * scales[..., None], top_k))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()

"""Layer 3: rows in a cache. The formats by hand, the Triton kernels against the plain statements.

On a GPU the kernels are compiled and compared with vLLM's own stores too; everywhere they also run
in Triton's CPU interpreter, in a process of its own, since TRITON_INTERPRET is read when triton is
imported.
"""

import math
from itertools import product
from types import ModuleType

import pytest
import torch
from interpreted import run_interpreted
from memory import poisoned

from glm5lab.attention import row_formats, store_implementation

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# tokens, page size (0: rows without pages)
SHAPES = [(1, 1), (21, 16), (15, 7), (5, 0)]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def latents(count, gen):
    """[count, 512]: groups of very different size; zeros, infinity, NaN, ties and subnormals."""
    sizes = torch.exp2(torch.randint(-60, 60, (count, 4), generator=gen).float())
    x = torch.randn(count, 4, 128, generator=gen) * sizes[..., None]
    special = [
        torch.zeros(128),
        torch.full((128,), float("nan")),
        torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 1.0, -0.0, 3.0]),
        torch.tensor([336.0, 448.0 * 0.75, -336.0]),  # scale 0.75 is stored as 1
        torch.tensor([1.75 * 2.0**-14]),  # below the least scale
        torch.cat([torch.tensor([448.0]), between_codes()]),  # scale 1: the values themselves
        torch.cat([torch.tensor([448.0]), -between_codes()]),
        torch.tensor([2.0**-133, -(2.0**-130)]),
        torch.tensor([3.3e38, 1e38, -2e38]),
    ]
    for i, values in enumerate(special[: 4 * count]):
        group = x[i // 4, i % 4]
        group[:] = 0.0
        group[: len(values)] = values
    return x.flatten(1)


def between_codes():
    """Halfway between neighbouring e4m3 values: [126], among them the subnormals."""
    codes = E4M3[:127]
    return ((codes[1:] + codes[:-1]) / 2).float()


def make_cache(tokens, page_size, width, dtype, device="cpu"):
    """A poisoned cache whose pages lie apart, with a few slots more than tokens."""
    slots = tokens + 5
    fill = 0xFF if dtype == torch.uint8 else float("nan")
    if not page_size:
        return torch.full((slots, width), fill, dtype=dtype, device=device)
    room = torch.full(
        (-(-slots // page_size), page_size + 1, width), fill, dtype=dtype, device=device
    )
    return room[:, :page_size]


def make_rows(tokens, dtype, seed=0, device="cpu"):
    """slots (one of them padding), latent and rope, both with padding rows and odd strides."""
    gen = torch.Generator().manual_seed(seed)
    slots = torch.randperm(tokens + 5, generator=gen)[:tokens]
    if tokens > 2:
        slots[1] = -1
    both = torch.cat([latents(tokens + 2, gen), torch.randn(tokens + 2, 80, generator=gen)], 1)
    # Rotary parts are exact in bfloat16: Triton's interpreter cuts digits off where it rounds.
    both = torch.cat([both[:, :512].to(dtype), both[:, 512:].bfloat16().to(dtype)], 1).to(device)
    return slots.to(device), both[:, :512], both[:, 512:576]


def bits(x):
    """For equality to the bit, NaN included."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_rows_follow_the_rule(dtype):
    latent = latents(8, torch.Generator().manual_seed(1)).to(dtype)
    rope = torch.randn(8, 64)
    rows = row_formats.pack_fp8_rows(latent, rope)
    assert rows.shape == (8, 656)
    scales = rows[:, 512:528].clone().view(torch.float32)
    finite = E4M3[:127]
    for row, group in product(range(8), range(4)):
        x = latent[row, group * 128 :][:128].double()
        amax = x[~x.isnan()].abs().max().item() if not x.isnan().all() else 0.0
        if math.isinf(amax):
            assert scales[row, group] == float("inf")
            expected = torch.where(x.isfinite(), 0.0, math.nan)
        else:
            # float32, as the rule says: a quotient next to a power of two may round to it
            quotient = torch.tensor(amax, dtype=torch.float32) / torch.tensor(448.0)
            power = 2.0 ** math.ceil(math.log2(max(quotient.item(), 1e-4)))
            assert scales[row, group] == power
            scaled = x / power
            distance = (scaled.abs()[:, None] - finite).abs()
            # Of two values as near, the even code.
            near = (distance == distance.amin(1, keepdim=True)) * (2 - torch.arange(127) % 2)
            expected = torch.where(x.isnan(), x, finite[near.argmax(1)].copysign(scaled))
        codes = rows[row, group * 128 :][:128]
        got = codes.view(torch.float8_e4m3fn).double()
        torch.testing.assert_close(got, expected.double(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(codes == 0x7F, expected.isnan()), "NaN has no sign"
    assert torch.equal(rows[:, 528:].clone().view(torch.bfloat16), rope.bfloat16())


def test_the_scales_that_vllm_states():
    latent = torch.zeros(2, 512)
    latent[0, 128:256] = 336.0
    scales = row_formats.pack_fp8_rows(latent, torch.zeros(2, 64))[:, 512:528]
    assert scales.clone().view(torch.float32)[:, :2].tolist() == [[2**-13, 1], [2**-13, 2**-13]]


@pytest.mark.parametrize("page_size", [0, 16])
def test_what_was_stored_is_gathered(page_size):
    slots, latent, rope = make_rows(37, torch.float16)
    latent = latent.nan_to_num(1.0, 1.0, 1.0)
    for dtype in (torch.uint8, torch.float16):
        cache = make_cache(37, page_size, 656 if dtype == torch.uint8 else 576, dtype)
        before = cache.clone()
        row_formats.store_rows(cache, slots, latent, rope)
        rows = row_formats.gather(cache, slots, torch.float32)
        expected = torch.cat([latent, rope], 1)[:37].float()
        expected[1] = 0.0  # padding
        groups = expected[:, :512].unflatten(1, (4, 128)).abs().amax(2).repeat_interleave(128, 1)
        # Half a step of e4m3: a sixteenth, or half of 2 ** -9 times the least scale.
        half = torch.cat([(groups / 16).clamp_min(2.0**-23), torch.zeros(37, 64)], 1)
        bound = half if dtype == torch.uint8 else torch.zeros(())
        assert torch.all((rows - expected).abs() <= bound)
        untouched = torch.ones(42, dtype=torch.bool)
        untouched[slots[slots >= 0]] = False
        left = untouched.nonzero()[:, 0]
        assert torch.equal(
            bits(row_formats.gather_rows(cache, left)), bits(row_formats.gather_rows(before, left))
        )


def test_index_keys_lie_before_their_scales():
    cache = torch.full((2, 3, 132), 0xFF, dtype=torch.uint8)
    keys = torch.zeros(2, 128)
    keys[0, 5], keys[1, 0] = -3.5, 1e-9
    row_formats.store_index_keys(cache, torch.tensor([4, 0]), keys)
    page = cache[1].flatten()
    # amax 3.5: 3.5 / 448 is 2 ** -7, and -3.5 becomes -448
    assert page[128 + 5] == 0xFE
    assert page[3 * 128 + 4 :][:4].view(torch.float32) == 2.0**-7
    assert cache[0].flatten()[3 * 128 :][:4].view(torch.float32) == 2.0**-22
    assert torch.all(page[256:384] == 0xFF)


def compare_store(kernels: ModuleType, device: str, shape, dtype, fp8, with_rope):
    """Raises where a stored cache or gathered rows differ from the plain statement's by a bit."""
    tokens, page_size = shape
    slots, latent, rope = make_rows(tokens, dtype, device=device)
    rope = rope if with_rope else None
    width = 656 if fp8 else 576 if with_rope else 512
    cache = make_cache(tokens, page_size, width, torch.uint8 if fp8 else dtype, device)
    expected = cache.clone()
    slots = slots.int() if page_size % 2 else slots
    kernels.store_rows(cache, slots, latent, rope)
    row_formats.store_rows(expected, slots, latent, rope)
    assert torch.equal(bits(cache), bits(expected)), (shape, dtype, fp8)
    for out in (None, torch.float32):
        with poisoned():
            got = kernels.gather(cache, slots, out)
        wanted = row_formats.gather(expected, slots, out)
        if device == "cpu" and got.dtype == torch.bfloat16 and fp8:
            continue  # the interpreter does not round to bfloat16
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def compare_index_keys(kernels: ModuleType, device: str, dtype):
    for tokens, page_size, width in ((37, 16, 128), (5, 3, 40)):
        gen = torch.Generator().manual_seed(2)
        keys = latents(tokens + 2, gen)[:, :width].to(dtype).to(device)
        slots = torch.randperm(tokens + 5, generator=gen)[:tokens]
        slots[1] = -1
        cache = make_cache(tokens, page_size, width + 4, torch.uint8, device)
        expected = cache.clone()
        kernels.store_index_keys(cache, slots.to(device), keys)
        row_formats.store_index_keys(expected, slots.to(device), keys)
        assert torch.equal(bits(cache), bits(expected)), (width, dtype)


def compare_all(device):
    from glm5lab.attention import kv_cache

    assert store_implementation(device) is kv_cache.store_rows
    for shape, dtype in product(SHAPES, DTYPES):
        for fp8, with_rope in ((False, True), (False, False), (True, True)):
            compare_store(kv_cache, device, shape, dtype, fp8, with_rope)
    for dtype in DTYPES:
        compare_index_keys(kv_cache, device, dtype)
    every_code(kv_cache, device)


def every_code(kernels: ModuleType, device: str):
    """All 256 e4m3 bytes through the gather, and random float32 values through the store."""
    gen = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 2**32, (64, 4, 128), generator=gen, dtype=torch.int64)
    values = raw.to(torch.int32).view(torch.float32)
    values = torch.where(values.abs() <= 448, values, values.nan_to_num(0.0).remainder(448.0))
    values[:, :, 0] = 448.0  # scale 1
    cache, expected = (torch.zeros(64, 656, dtype=torch.uint8, device=device) for _ in range(2))
    slots, rope = torch.arange(64, device=device), torch.zeros(64, 64, device=device)
    kernels.store_rows(cache, slots, values.flatten(1).to(device), rope)
    row_formats.store_rows(expected, slots, values.flatten(1).to(device), rope)
    assert torch.equal(cache, expected)
    cache[:2, :512] = torch.arange(256, dtype=torch.uint8).repeat(4).view(2, 512)
    torch.testing.assert_close(
        kernels.gather(cache, slots, torch.float32),
        row_formats.gather(cache, slots, torch.float32),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_triton_kernels_equal_the_plain_statements_in_the_interpreter():
    run_interpreted("import test_kv_cache as t; t.compare_all('cpu')")


@pytest.mark.gpu
def test_triton_kernels_equal_the_plain_statements_on_the_gpu():
    compare_all("cuda")


def vllm_ops():
    """vLLM's cache operations, or a skip that says why there are none."""
    ops = pytest.importorskip("vllm._custom_ops", reason="vllm is not installed")
    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        pytest.skip("this vllm has no CUDA cache operations")
    return ops


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fp8_ds_mla", "auto"])
def test_stored_rows_equal_vllms_to_the_bit(form):
    ops = vllm_ops()
    from glm5lab.attention import kv_cache

    fp8 = form == "fp8_ds_mla"
    slots, latent, rope = make_rows(3000, torch.bfloat16, device="cuda")
    ours, theirs = (
        make_cache(
            3000, 64, 656 if fp8 else 576, torch.uint8 if fp8 else torch.bfloat16, device="cuda"
        )
        for _ in range(2)
    )
    kv_cache.store_rows(ours, slots, latent, rope)
    # vLLM loads 16 bytes at once: its rows must be aligned.
    latent, rope = latent.contiguous(), rope.contiguous()
    ops.concat_and_cache_mla(latent, rope, theirs, slots, form, torch.ones(1, device="cuda"))
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.gpu
def test_stored_index_keys_equal_vllms_to_the_bit():
    ops = vllm_ops()
    from glm5lab.attention import kv_cache

    gen = torch.Generator().manual_seed(4)
    keys = latents(1000, gen)[:, :128].bfloat16().contiguous().cuda()
    slots = torch.randperm(1005, generator=gen)[:1000].cuda()
    ours, theirs = (make_cache(1000, 64, 132, torch.uint8, device="cuda") for _ in range(2))
    kv_cache.store_index_keys(ours, slots, keys)
    ops.indexer_k_quant_and_cache(keys, theirs, slots, 128, "ue8m0")
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_cache_beyond_4_gb(fp8):
    from glm5lab.attention import kv_cache

    rows, width = (8_000_000, 656) if fp8 else (4_000_000, 576)
    dtype = torch.uint8 if fp8 else torch.bfloat16
    cache = torch.zeros(rows // 64, 64, width, dtype=dtype, device="cuda")
    slots, latent, rope = make_rows(32, torch.bfloat16, device="cuda")
    far = torch.where(slots < 0, slots, slots + rows - 64)
    kv_cache.store_rows(cache, far, latent, rope)
    near = torch.zeros(1, 64, width, dtype=dtype, device="cuda")
    row_formats.store_rows(near, slots, latent, rope)
    assert torch.equal(bits(cache[-1]), bits(near[0]))
    assert torch.equal(bits(kv_cache.gather(cache, far)), bits(row_formats.gather(near, slots)))
    assert not cache[:-1].any()


@pytest.mark.gpu
def test_other_numbers_of_tokens_and_pages_compile_nothing_new():
    from glm5lab.attention import kv_cache

    kernels = [kv_cache._store_kernel, kv_cache._store_fp8_kernel]
    kernels += [kv_cache._gather_kernel, kv_cache._gather_fp8_kernel]

    def run(tokens, page_size):
        slots, latent, rope = make_rows(tokens, torch.bfloat16, device="cuda")
        for width, dtype in ((656, torch.uint8), (576, torch.bfloat16)):
            cache = make_cache(tokens, page_size, width, dtype, device="cuda")
            kv_cache.store_rows(cache, slots, latent, rope)
            kv_cache.gather(cache, slots)

    def compiled():
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    run(16, 15)  # 16 rows of 41 units of 16 bytes from page to page
    before = compiled()
    assert before > 0
    for tokens, page_size in ((1, 15), (100, 16), (1000, 64)):
        run(tokens, page_size)
    assert compiled() == before


ROWS = {
    "cache": torch.zeros(2, 4, 576),
    "slots": torch.zeros(3, dtype=torch.int64),
    "latent": torch.zeros(3, 512),
    "rope": torch.zeros(3, 64),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(3)}, r"slots: expected integers \[N\], got torch.float32"),
        ({"latent": torch.zeros(2, 512)}, r"latent: expected floating point \[3 or more, width\]"),
        ({"rope": torch.zeros(3, 1, 64)}, "rope: expected"),
        ({"rope": torch.zeros(3, 32)}, r"cache: expected \[rows, 544\]"),
        ({"rope": None}, r"cache: expected \[rows, 512\]"),
        ({"cache": torch.zeros(2, 4, 576).long()}, "cache: expected float64, float32, bfl"),
        ({"cache": torch.zeros(2, 4, 1152)[..., ::2]}, "cache: .*contiguous rows"),
        ({"cache": torch.zeros(8, 640, dtype=torch.uint8)}, r"cache: expected \[rows, 656\]"),
        (
            {"cache": torch.zeros(8, 656, dtype=torch.uint8), "rope": None},
            r"latent, rope: fp8_ds_mla rows need widths 512 and 64, got \(512,\)",
        ),
        ({"cache": torch.zeros(2, 4, 576, device="meta")}, "slots: expected a tensor on meta"),
    ],
)
def test_wrong_arguments_of_a_store_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        row_formats.store_rows(**{**ROWS, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(3, 64)}, r"cache: expected uint8 \[pages, page_size, 68\]"),
        ({"keys": torch.zeros(2, 128)}, "keys: expected"),
        ({"cache": torch.zeros(2, 4, 132)}, "cache: expected uint8"),
        ({"cache": torch.zeros(4, 2, 132, dtype=torch.uint8).transpose(0, 1)}, "cache: .*strides"),
    ],
)
def test_wrong_arguments_of_an_index_store_are_named(change, message):
    arguments = {
        "cache": torch.zeros(2, 4, 132, dtype=torch.uint8),
        "slots": torch.zeros(3, dtype=torch.int64),
        "keys": torch.zeros(3, 128),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        row_formats.store_index_keys(**arguments)


def test_a_gather_names_what_does_not_fit():
    with pytest.raises(ValueError, match="dtype: expected float64, float32, bfloat16 or"):
        row_formats.gather(torch.zeros(4, 8), torch.zeros(1, dtype=torch.int64), torch.int32)
    with pytest.raises(ValueError, match=r"cache: expected \[rows, 656\]"):
        row_formats.gather(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))

"""Layer 3: the reference against an independent statement, the kernels against the reference.

On a GPU the Triton kernels are compiled; everywhere they also run in Triton's CPU interpreter, in a
process of its own, since TRITON_INTERPRET is read when triton is imported.
"""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from interpreted import run_interpreted
from memory import poisoned

from glm5lab.attention import implementation, implementation_name, reference

# One tolerance a dtype: ||out - reference|| / ||reference||, the reference in float64. LSE: 1e-3.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-3}
LSE_TOLERANCE = 1e-3
# Triton's interpreter rounds to bfloat16 by cutting digits off.
INTERPRETED = (torch.float32, torch.float16)

CASES = [
    # tokens, heads, rope, top_k, page_size (0: rows without pages)
    (1, 1, 64, 1, 0),
    (3, 4, 64, 16, 16),
    (5, 8, 64, 37, 7),
    (2, 17, 64, 33, 64),
    (4, 8, 0, 40, 16),
    (1, 64, 64, 35, 16),
    (1, 128, 64, 5, 0),
]


def make_case(dtype, tokens, heads, rope, top_k, page_size, seed=0, d_v=512, rows=96, fp8=False):
    """Random q and kv; slots with empty places, one token with none, and a poisoned row 0."""
    gen = torch.Generator().manual_seed(seed)
    width = d_v + rope
    q = torch.randn(tokens, heads, width, generator=gen).to(dtype)
    indices = torch.randint(1, rows, (tokens, top_k), generator=gen, dtype=torch.int32)
    indices[torch.rand(tokens, top_k, generator=gen) < 0.2] = -1
    indices[torch.rand(tokens, top_k, generator=gen) < 0.05] = rows + 1000  # outside the cache
    indices[-1] = -1 if tokens > 1 else indices[-1]
    lengths = torch.randint(1, top_k + 1, (tokens,), generator=gen, dtype=torch.int32)
    if fp8:
        kv = fp8_rows(rows, gen)
        kv[0] = 0xFF  # NaN in all three formats: empty places must not read it into the result
    else:
        kv = torch.randn(rows, width, generator=gen).to(dtype)
        kv[0] = float("nan")
    if page_size:
        kv = apart(kv, page_size)
    return q, kv, indices, lengths


def fp8_rows(rows, gen):
    """Random fp8_ds_mla rows; the groups' scales differ by orders of magnitude."""
    raw = torch.randint(0, 256, (rows, 656), generator=gen, dtype=torch.uint8)
    latent = raw[:, :512]
    latent[(latent & 0x7F) == 0x7F] = 0x10  # e4m3's NaN
    scales = torch.rand(rows, 4, generator=gen) * 10.0 ** torch.tensor([-2.0, -3.0, -6.0, -2.5])
    raw[:, 512:528] = scales.view(torch.uint8)
    raw[:, 528:] = torch.randn(rows, 64, generator=gen).bfloat16().view(torch.uint8)
    return raw


def apart(kv, page_size):
    """The same rows in pages that lie apart, as in vLLM's cache."""
    rows, width = kv.shape
    pages = torch.full((-(-rows // page_size), page_size + 1, width), 255).to(kv.dtype)
    if kv.is_floating_point():
        pages[:] = float("nan")
    view = pages[:, :page_size]
    for slot in range(rows):
        view[slot // page_size, slot % page_size] = kv[slot]
    return view


def attend_one(q, rows, scale, d_v):
    """One token by torch's own attention: q [H, D], rows [K, D] -> [H, d_v]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, None].double(),
        rows[None].double().expand(len(q), -1, -1),
        rows[None, :, :d_v].double().expand(len(q), -1, -1),
        scale=scale,
    )
    return out[:, 0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_reference_equals_torch_attention(case, with_lengths):
    q, kv, indices, lengths = make_case(torch.float32, *case)
    scale = 256**-0.5
    out, lse = reference.sparse_mla(q, kv, indices, scale, lengths if with_lengths else None)
    for t in range(len(q)):
        slots = indices[t, : lengths[t]] if with_lengths else indices[t]
        slots = slots[(slots >= 0) & (slots < 96)]
        if not len(slots):
            assert torch.equal(out[t], torch.zeros_like(out[t]))
            assert torch.all(lse[t] == float("-inf"))
            continue
        rows = reference.gather_rows(kv, slots)
        torch.testing.assert_close(
            out[t].double(), attend_one(q[t], rows, scale, 512), rtol=1e-5, atol=1e-5
        )
        scores = q[t].double() @ rows.double().T * scale
        torch.testing.assert_close(lse[t].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_fp8_rows_unpack_to_value_times_scale():
    raw = fp8_rows(3, torch.Generator().manual_seed(0))
    values = reference.unpack_fp8_rows(raw)
    assert values.shape == (3, 576)
    for row, column in ((0, 0), (1, 130), (2, 511)):
        scale = raw[row, 512:528].clone().view(torch.float32)[column // 128]
        expected = raw[row, column : column + 1].view(torch.float8_e4m3fn).float() * scale
        assert values[row, column] == expected[0]
    assert torch.equal(values[:, 512:], raw[:, 528:].clone().view(torch.bfloat16).float())


def compare_with_reference(kernel, device, dtype, case, fp8, with_lengths):
    """Raises where a kernel and the reference differ."""
    tokens, heads, rope, top_k, page_size = case
    made = make_case(dtype, tokens, heads, rope, top_k, page_size, fp8=fp8)
    q, kv, indices, lengths = (x.to(device) for x in made)
    strided = torch.stack([lengths, lengths * 0], 1)[:, 0]
    given = strided if with_lengths else None
    poison = torch.full((*q.shape[:2], 512), float("nan"), dtype=dtype, device=device)
    with poisoned():  # the LSE, and what the parts write
        out, lse = kernel(q, kv, indices, 256**-0.5, given, out=poison)
    assert out is poison
    exact = kv if fp8 else kv.double()
    expected, expected_lse = reference.sparse_mla(q.double(), exact, indices, 256**-0.5, given)
    error = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    # fp8 rows are multiplied in fp16 whatever q's dtype is.
    assert error < TOLERANCE[torch.float16 if fp8 else dtype], (case, dtype, fp8, float(error))
    assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
    assert torch.all(out[lse == float("-inf")] == 0)
    full = expected_lse > float("-inf")
    assert torch.all((lse - expected_lse)[full].abs() < LSE_TOLERANCE)
    with poisoned():
        again, again_lse = kernel(in_parts(q), kv, indices, 256**-0.5, given)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)


def in_parts(q, d_v=512):
    """The two parts of queries, laid out as vLLM's: the latent one head by head."""
    latent = q[..., :d_v].transpose(0, 1).contiguous().transpose(0, 1)
    return latent, q[..., d_v:].contiguous()


def compare_triton_with_reference(device, dtypes):
    """All cases, each whole and split among programs."""
    assert implementation_name(device) == "triton"
    kernel = implementation(device)
    assert kernel.__module__ == "glm5lab.attention.sparse_mla"
    for parts in (1, 3):
        with patch("glm5lab.attention.sparse_mla.sparse_mla_parts", return_value=parts):
            for case, dtype, with_lengths in product(CASES, dtypes, (False, True)):
                compare_with_reference(kernel, device, dtype, case, False, with_lengths)
                if case[2] == 64 and dtype != torch.float32:
                    compare_with_reference(kernel, device, dtype, case, True, with_lengths)


def compare_merges(device):
    """Every capacity of the merge, full and nearly empty, against the same sum in float64.

    What lies in a part without a row is NaN here, and counts for nothing.
    """
    from glm5lab.attention.problem import Parts, Problem
    from glm5lab.attention.sparse_mla_merge import merge
    from glm5lab.attention.tiles import MERGE_TILES

    gen = torch.Generator().manual_seed(0)
    sizes = {count for most, _, _ in MERGE_TILES for count in (most // 2 + 1, most)}
    for parts, d_v in product(sorted(sizes), (512, 40)):
        lse = torch.randn(3, parts, 2, generator=gen) * 3
        lse[1, : parts - 1] = lse[2] = float("-inf")
        part_out = torch.randn(3, parts, 2, d_v, generator=gen)
        part_out[lse == float("-inf")] = float("nan")
        top = lse.double().logsumexp(1)
        weight = (lse - top[:, None]).exp().nan_to_num(0)[..., None]
        expected = (part_out.nan_to_num(0) * weight).sum(1)
        out, out_lse = (torch.full(s, float("nan"), device=device) for s in ((3, 2, d_v), (3, 2)))
        split = Parts(part_out.to(device), lse.to(device), (0, 0, 0), parts, 0, False)
        q = torch.empty(3, 2, d_v)
        merge(Problem(q, q, q, None, 1.0, d_v), split, out, out_lse)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out_lse.double().cpu(), top, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_parts_are_merged_on_the_gpu():
    compare_merges("cuda")


def test_parts_are_merged_in_the_interpreter():
    run_interpreted("import test_sparse_mla as t; t.compare_merges('cpu')")


def compare_nan(attend, device, dtype, fp8=False):
    """NaN in a query or a row that counts stays NaN, in one part and in three, as does its LSE."""
    q, kv, indices, _ = make_case(dtype, 3, 4, 64, 48, 0, fp8=fp8)
    q, kv, indices = (x.to(device) for x in (q, kv, indices.clamp_min(1)))
    indices[0] = torch.arange(1, 49)
    wrong = q.clone()
    wrong[0] = float("nan")
    spoilt = kv.clone()
    spoilt[6] = 0xFF if fp8 else float("nan")
    indices[1:] = indices[1:].where(indices[1:] != 6, 7)
    for parts, (queries, rows) in product((1, 3), ((wrong, kv), (q, spoilt))):
        with patch("glm5lab.attention.sparse_mla.sparse_mla_parts", return_value=parts):
            out, lse = attend(queries, rows, indices, 0.06)
        exact = rows if fp8 else rows.double()
        expected = reference.sparse_mla(queries.double(), exact, indices, 0.06)
        for got, wanted in zip((out, lse), expected, strict=True):
            assert torch.equal(got.isnan(), wanted.isnan()), (parts, fp8)
            assert torch.all(got[0].isnan())
            assert torch.all(got[1:].isfinite())


def compare_nan_with_reference(device, dtypes):
    """Both row formats, and shared rows with a group of one token."""
    from glm5lab.attention.shared_rows import sparse_mla_shared
    from glm5lab.attention.sparse_mla import sparse_mla

    for dtype in dtypes:
        compare_nan(sparse_mla, device, dtype)
        if dtype != torch.float32:
            compare_nan(sparse_mla, device, dtype, fp8=True)
        with patch("glm5lab.attention.shared_rows.MAX_GROUP", 1):
            compare_nan(sparse_mla_shared, device, dtype)


def make_table(kv, indices, gen):
    """Places of three requests for the tokens, and the table that has their pages.

    Lists end early, have holes, and name places behind the pages; one page is not in the cache.
    """
    pages, page_size, _ = kv.shape
    table = torch.stack([torch.randperm(pages, generator=gen)[:5] for _ in range(3)]).int()
    table[1, 2] = pages + 3
    requests = torch.randint(0, 3, (len(indices),), generator=gen).int()
    places = torch.randint(0, 5 * page_size + 9, indices.shape, generator=gen).int()
    places[indices < 0] = -1
    filled = torch.randint(0, indices.shape[1] + 1, (len(indices), 1), generator=gen)
    return places.where(torch.arange(indices.shape[1]) < filled, -1), (table, requests)


def compare_tables(kernel, device, dtypes):
    """Lists of places and a table: what the reference says, and exactly what slots give."""
    gen = torch.Generator().manual_seed(3)
    cases = [(5, 8, 64, 37, 7), (4, 9, 0, 70, 16), (2, 8, 64, 33, 8)]
    for case, dtype, parts in product(cases, dtypes, (1, 3)):
        fp8 = case == cases[2] and dtype != torch.float32
        q, kv, indices, lengths = make_case(dtype, *case, fp8=fp8)
        kv[0, 0] = kv[0, 1]  # every row may be named
        kv[-1, 96 - (len(kv) - 1) * case[4] :] = kv[0, 1]
        for pages in (kv, kv.contiguous()):
            places, table = make_table(pages, indices, gen)
            slots = reference.request_slots(places, table, case[4])
            on = [x.to(device) for x in (q, pages, places, slots, lengths, *table)]
            q_, kv_, places_, slots_, lengths_ = on[:5]
            with patch("glm5lab.attention.sparse_mla.sparse_mla_parts", return_value=parts):
                for given in (None, lengths_):
                    found = kernel(q_, kv_, places_, 0.06, given, table=tuple(on[5:]))
                    same = kernel(q_, kv_, slots_, 0.06, given)
                    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True)), case
            rows = "glm5lab.attention.sparse_mla_rows"
            with patch(f"{rows}.MOST_PLACES", 16), patch(f"{rows}._look_up", None):  # longer lists
                found = kernel(q_, kv_, places_, 0.06, lengths_, table=tuple(on[5:]))
            exact = kv_ if fp8 else kv_.double()
            expected, lse = reference.sparse_mla(
                q_.double(), exact, places_, 0.06, lengths_, table=tuple(on[5:])
            )
            assert (found[0].double() - expected).norm() <= TOLERANCE[
                torch.float16 if fp8 else dtype
            ] * expected.norm()
            assert torch.equal(found[1].isinf(), lse.isinf())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pages_are_looked_up_on_the_gpu(dtype):
    compare_tables(implementation("cuda"), "cuda", [dtype])


def test_pages_are_looked_up_in_the_interpreter():
    run_interpreted(
        "import test_sparse_mla as t;"
        "t.compare_tables(t.implementation('cpu'), 'cpu', t.INTERPRETED)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nan_stays_nan_on_the_gpu(dtype):
    compare_nan_with_reference("cuda", [dtype])


def test_nan_stays_nan_in_the_interpreter():
    run_interpreted(
        "import test_sparse_mla as t;t.compare_nan_with_reference('cpu', t.INTERPRETED)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_triton_kernels_equal_the_reference_on_the_gpu(dtype):
    compare_triton_with_reference("cuda", [dtype])


def test_triton_kernels_equal_the_reference_in_the_interpreter():
    run_interpreted(
        "import test_sparse_mla as t;t.compare_triton_with_reference('cpu', t.INTERPRETED)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [1, 8, 16, 64, 128])
def test_every_tile_at_the_real_size_equals_the_reference(heads, fp8):
    # The tiles change with the number of tokens and heads.
    for tokens in (1, 4, 8, 12, 33, 64, 130):
        made = make_case(torch.bfloat16, tokens, heads, 64, 2048, 64, rows=5000, fp8=fp8)
        q, kv, indices, lengths = (x.cuda() for x in made)
        out, lse = implementation("cuda")(q, kv, indices, 256**-0.5, lengths)
        exact = kv if fp8 else kv.double()
        expected = reference.sparse_mla(q.double(), exact, indices, 256**-0.5, lengths)
        error = (out.double() - expected[0]).norm() / expected[0].norm()
        assert error < TOLERANCE[torch.bfloat16], (tokens, float(error))
        torch.testing.assert_close(lse.double(), expected[1], rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_tiles_of_other_gpus_equal_the_reference(capability, fp8):
    """Compiled for the GPU that is here, whole and split."""
    from glm5lab.attention import sparse_mla
    from glm5lab.attention.compile import device_for
    from glm5lab.attention.tiles import device_of, sparse_mla_tiles

    made = make_case(torch.bfloat16, 3, 64, 64, 2048, 64, rows=5000, fp8=fp8)
    q, kv, indices, lengths = (x.cuda() for x in made)
    exact = kv if fp8 else kv.double()
    expected = reference.sparse_mla(q.double(), exact, indices, 256**-0.5, lengths)
    tiles = sparse_mla_tiles(device_for(capability), 2, fp8)
    assert len(tiles) >= (2 if fp8 else 4)
    for tile, parts in product(tiles, (1, 16)):
        given = (q, kv, indices, 256**-0.5, lengths, 512, None, False)
        with poisoned():
            problem, out, lse = sparse_mla.checked_problem(*given)
            sparse_mla.launch(problem, out, lse, device_of(0), tile, parts)
        error = (out.double() - expected[0]).norm() / expected[0].norm()
        assert error < TOLERANCE[torch.bfloat16], (tile.name, parts, float(error))
        torch.testing.assert_close(lse.double(), expected[1], rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_cache_beyond_4_gb(fp8):
    rows = 8_000_000 if fp8 else 4_000_000
    gen = torch.Generator().manual_seed(0)
    few = fp8_rows(64, gen) if fp8 else torch.randn(64, 576, generator=gen).bfloat16()
    kv = torch.zeros(rows, few.shape[1], dtype=few.dtype, device="cuda")
    kv[-64:] = few.cuda()
    q = torch.randn(2, 8, 576, generator=gen).bfloat16().cuda()
    indices = torch.arange(64, dtype=torch.int32).expand(2, -1)
    out, lse = implementation("cuda")(q, kv, (indices + rows - 64).cuda(), 0.06)
    expected, expected_lse = reference.sparse_mla(
        q.double().cpu(), few if fp8 else few.double(), indices, 0.06
    )
    assert (out.double().cpu() - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_other_tokens_lengths_and_capacities_compile_nothing_new(fp8):
    from glm5lab.attention import sparse_mla_fp8, sparse_mla_merge, sparse_mla_rows

    kernels = [sparse_mla_rows._attend_kernel, sparse_mla_merge._merge_kernel]
    kernels.append(sparse_mla_fp8._attend_fp8_kernel)

    def compiled():
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    def run(tokens, top_k, rows):
        case = make_case(torch.bfloat16, tokens, 8, 64, top_k, 0, rows=rows, fp8=fp8)
        q, kv, indices, lengths = (x.cuda() for x in case)
        implementation("cuda")(q, kv, indices, 0.06, lengths)

    for tokens in (1, 4, 8, 12, 40, 64, 300):  # every tile and capacity, whole lists too
        run(tokens, 2048, 96)
    before = compiled()
    assert before > 0
    others = [(2, 2048, 300), (3, 512, 96), (17, 2047, 97), (50, 1024, 96), (99, 2048, 300)]
    for tokens, top_k, rows in others:
        run(tokens, top_k, rows)
    assert compiled() == before


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": torch.zeros(2, 576)}, "q:"),
        ({"kv": torch.zeros(9, 512)}, "kv:"),
        ({"indices": torch.zeros(3, 4, dtype=torch.int32)}, "indices:"),
        ({"indices": torch.zeros(2, 4)}, "indices:"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths:"),
        ({"d_v": 1000}, "d_v:"),
        ({"out": torch.zeros(2, 4, 100)}, "out:"),
        ({"kv": torch.zeros(9, 640, dtype=torch.uint8)}, "kv: expected fp8_ds_mla rows of 656"),
        ({"indices": torch.full((2, 4), 9, dtype=torch.int32)}, r"indices\[0, 0\] is 9"),
        ({"check": "no"}, "check: expected True or False, got str 'no'"),
        ({"kv": torch.zeros(576, 9).T}, r"kv: expected a contiguous .* got strides \(1, 9\)"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    arguments = {
        "q": torch.zeros(2, 4, 576),
        "kv": torch.zeros(9, 576),
        "indices": torch.zeros(2, 4, dtype=torch.int32),
        "scale": 1.0,
        "check": True,
        **change,
    }
    with pytest.raises(ValueError, match=name):
        reference.sparse_mla(**arguments)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (torch.zeros(2, 3, 64), r"q: expected parts \[2, 4, 512\] and \[2, 4, rope\]"),
        (torch.zeros(2, 64), "q: expected parts"),
        (torch.zeros(2, 4, 64).half(), "q: expected parts of one dtype"),
        (torch.zeros(2, 4, 65), "kv: expected .rows, 577."),
    ],
)
def test_parts_of_a_query_that_do_not_fit_are_named(rope, message):
    kv, indices = torch.zeros(9, 576), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        reference.sparse_mla((torch.zeros(2, 4, 512), rope), kv, indices, 1.0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((torch.zeros(3).int(), torch.zeros(2).int()), r"table: expected \[requests, pages\] and"),
        ((torch.zeros(1, 3).int(), torch.zeros(3).int()), r"table: .* and \[2\] beside kv in"),
        ((torch.zeros(1, 3), torch.zeros(2).int()), "table: expected int32 on cpu"),
    ],
)
def test_a_table_that_does_not_fit_is_named(table, message):
    given = (torch.zeros(2, 4, 576), torch.zeros(3, 3, 576), torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        reference.sparse_mla(*given, 1.0, table=table)


def test_places_follow_the_pages_of_their_request():
    table = (torch.tensor([[7, 2], [4, 0]]).int(), torch.tensor([1, 0]).int())
    places = torch.tensor([[0, 5, -1], [3, 7, 8]])
    assert reference.request_slots(places, table, 4).tolist() == [[16, 1, -1], [31, 11, -1]]


def test_the_reference_takes_queries_in_parts():
    q, kv, indices, lengths = make_case(torch.float32, 5, 8, 64, 37, 7)
    whole = reference.sparse_mla(q, kv, indices, 0.06, lengths)
    parts = reference.sparse_mla(in_parts(q), kv, indices, 0.06, lengths)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_slots_follow_the_block_table():
    positions = torch.tensor([[0, 5, -1], [3, 4, 7]], dtype=torch.int32)
    table = torch.tensor([[7, 2], [4, 0]], dtype=torch.int32)
    assert reference.slots_of(positions, table, 4).tolist() == [[28, 9, -1], [19, 0, 3]]

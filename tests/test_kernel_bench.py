"""What `glm5lab bench kernels` prints and writes; its figures need a GPU."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from glm5lab.bench_commands import app
from glm5lab.errors import CheckError, InputError
from glm5lab.kernel_bench import report
from glm5lab.kernel_bench.kernels import sparse_error
from glm5lab.kernel_bench.timing import Row, prepared

ROWS = [
    Row("bf16, 1 tokens", "glm5lab", 6.5, 0.002, 5.0),
    Row("bf16, 1 tokens", "FlashMLA", math.nan, math.nan, 5.0, "No module named 'vllm'"),
]


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(report, "bench_kernels", lambda _: (4.05e6, iter(ROWS)))
    monkeypatch.setattr(report, "machine", lambda _=None: {"gpu": "none"})
    monkeypatch.setattr(report, "require_cuda", lambda _: None)


def test_rows_are_printed_and_written(measured, tmp_path):
    lines: list[str] = []
    assert report.run(tmp_path / "out.json", lines.append)  # a peer may be missing
    assert lines[0] == "copy kernel: 4.05 TB/s"
    assert "6.5 us, error 0.0020, 1.30 x the floor" in lines[1]
    assert lines[2].endswith("did not run: No module named 'vllm'")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"][0]["us"] == 6.5
    assert "us" not in written["rows"][1]  # NaN is no JSON


@pytest.mark.parametrize(
    "row",
    [
        Row("top-k", "glm5lab", 6.5, 1.0, bound=0),
        Row("bf16", "glm5lab, shared rows", 6.5, 0.004),
        Row("bf16", "glm5lab", 6.5, math.nan),
        Row("bf16", "glm5lab", math.nan, math.nan, note="out of resources"),
    ],
    ids=str,
)
def test_a_wrong_kernel_of_ours_is_reported(row, measured, monkeypatch):
    monkeypatch.setattr(report, "bench_kernels", lambda _: (4.05e6, iter([*ROWS, row])))
    lines: list[str] = []
    assert not report.run(None, lines.append)
    assert row.note or "above our bound" in lines[-1]
    result = CliRunner().invoke(app, ["kernels"])
    assert isinstance(result.exception, CheckError)


LOADING = dict.fromkeys(("load_bytes_s", "read_bytes_s", "read_together_bytes_s"), 1e9)
PRODUCTS = [
    Row("down, Q4_K, 8 tokens", "GGUF blocks", 6.5, 0.008, 5.0, bound=1e-2),
    Row("down, Q4_K, 8 tokens", "bf16", 9.5, 0.002, 5.0, bound=1e-2),
]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            Row("down, Q6_K, 1 tokens", "sorted by expert", 6.5, 0.0123, 5.0, bound=1e-2),
            "down, Q6_K, 1 tokens, sorted by expert: error 0.0123, above our bound of 0.01",
        ),
        (
            Row("down, Q6_K, 1 tokens", "GGUF blocks", 6.5, math.nan, 5.0, bound=1e-2),
            "down, Q6_K, 1 tokens, GGUF blocks: error nan, above our bound of 0.01",
        ),
        (
            Row("down, Q6_K, 1 tokens", "GGUF blocks", math.nan, math.nan, 5.0, "no memory"),
            "down, Q6_K, 1 tokens, GGUF blocks: did not run: no memory",
        ),
    ],
    ids=("error", "nan", "did not run"),
)
def test_a_wrong_product_is_reported_once_all_is_written(
    row, said, measured, monkeypatch, tmp_path
):
    rows = list(PRODUCTS)
    monkeypatch.setattr(report, "bench_weights", lambda: (4.05e6, iter(rows)))
    monkeypatch.setattr(report, "bench_loading", lambda: LOADING)
    report.run_weights(tmp_path / "right.json", lambda _: None)
    rows.append(row)
    result = CliRunner().invoke(app, ["weights", "--json", str(tmp_path / "out.json")])
    assert isinstance(result.exception, CheckError)
    assert str(result.exception) == said
    written = json.loads((tmp_path / "out.json").read_text())
    assert [entry["name"] for entry in written["rows"]] == ["GGUF blocks", "bf16", row.name]


def test_what_is_prepared_is_prepared_once():
    made = []

    def prepare():
        made.append(1)
        return lambda i: i + 1

    call = prepared(prepare)
    assert not made
    assert [call(0), call(4)] == [1, 5]
    assert len(made) == 1


def test_output_and_lse_are_compared():
    expected = torch.ones(2, 3, 4), torch.zeros(2, 3)
    assert sparse_error(torch.ones(2, 3, 4), expected) == 0
    assert sparse_error((torch.ones(2, 3, 4) * 1.5, torch.zeros(2, 3)), expected) == pytest.approx(
        0.5
    )
    for lse in (torch.full((2, 3), 0.01), torch.full((2, 3), math.nan)):
        with pytest.raises(ValueError, match=r"LSE is .* off"):
            sparse_error((torch.ones(2, 3, 4), lse), expected)


def test_a_file_that_cannot_be_written_is_named(measured, tmp_path):
    with pytest.raises(InputError, match=r"out.json: cannot be written"):
        report.run(tmp_path / "no" / "out.json", lambda _: None)

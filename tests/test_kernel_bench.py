"""What `glm5lab bench kernels` prints and writes; its figures need a GPU."""

import json
import math

import pytest
import torch

from glm5lab.errors import Glm5labError, InputError
from glm5lab.kernel_bench import report
from glm5lab.kernel_bench.kernels import bench_kernels
from glm5lab.kernel_bench.timing import Row

ROWS = [
    Row("bf16, 1 tokens", "glm5lab", 6.5, 0.002, 5.0),
    Row("bf16, 1 tokens", "FlashMLA", math.nan, math.nan, 5.0, "No module named 'vllm'"),
]


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(report, "bench_kernels", lambda _: (4.05e6, iter(ROWS)))
    monkeypatch.setattr(report, "machine", lambda _: {"gpu": "none"})


def test_rows_are_printed_and_written(measured, tmp_path):
    lines: list[str] = []
    report.run(tmp_path / "out.json", lines.append)
    assert lines[0] == "copy kernel: 4.05 TB/s"
    assert "6.5 us, error 0.0020, 1.30 x the floor" in lines[1]
    assert lines[2].endswith("did not run: No module named 'vllm'")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"][0]["us"] == 6.5
    assert "us" not in written["rows"][1]  # NaN is no JSON


def test_a_file_that_cannot_be_written_is_named(measured, tmp_path):
    with pytest.raises(InputError, match=r"out.json: cannot be written"):
        report.run(tmp_path / "no" / "out.json", lambda _: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(Glm5labError, match="no CUDA device"):
        bench_kernels()

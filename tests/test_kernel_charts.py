"""Figures over the kernel measurements in data/."""

import json
from pathlib import Path

import pytest

from glm5lab.views.kernel_charts import speed_figure, speed_table, speed_text

MEASUREMENTS = Path(__file__).parents[1] / "data" / "measurements" / "kernels.json"
# The second fits the shared memory of SM120.
OURS = ["glm5lab", "glm5lab in 99 KiB"]


@pytest.fixture(scope="module")
def measurements():
    return json.loads(MEASUREMENTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("rows", "heads", "names"),
    [
        ("bf16", 8, [*OURS, "FlashAttention-3", "FlashMLA", "FlashInfer", "DRAM floor"]),
        ("fp8_ds_mla", 64, [*OURS, "FlashMLA", "DRAM floor"]),
    ],
)
def test_every_measurement_of_a_case_is_in_table_and_figure(measurements, rows, heads, names):
    table = speed_table(measurements, rows, heads)
    assert list(table) == names
    assert list(table.index) == [1, 4, 16, 64, 256, 1024]
    (row,) = [
        r
        for r in measurements["rows"]
        if (r["case"], r["name"]) == (f"{rows}, {heads} heads, 64 tokens", "glm5lab")
    ]
    assert table.loc[64, "glm5lab"] == row["us"]
    figure = speed_figure(measurements, rows, heads)
    assert [line.name for line in figure.data] == names
    assert list(figure.data[0].y) == list(table["glm5lab"])
    assert figure.layout.xaxis.title.text
    assert "microseconds" in figure.layout.yaxis.title.text


def test_remarks_name_whose_figures_they_are_about():
    row = {"name": "glm5lab", "us": 2.0, "floor_us": 1.0}
    rows = [
        {**row, "case": "bf16, 8 heads, 1 tokens"},
        {**row, "case": "bf16, 8 heads, 4 tokens", "remark": "an earlier kernel"},
        {**row, "case": "bf16, 8 heads, 16 tokens", "remark": "an earlier kernel"},
        {**row, "case": "bf16, 64 heads, 64 tokens", "remark": "of another table"},
    ]
    lines = speed_text({"rows": rows}, "bf16", 8).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["1", "4", "16"]
    assert lines[5:] == ["glm5lab at 4, 16 tokens: an earlier kernel"]

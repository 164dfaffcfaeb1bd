"""Figures over the kernel measurements in data/."""

import json
from pathlib import Path

import pytest

from glm5lab.views.kernel_charts import speed_figure, speed_table

MEASUREMENTS = Path(__file__).parents[1] / "data" / "measurements" / "kernels.json"


@pytest.fixture(scope="module")
def measurements():
    return json.loads(MEASUREMENTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("rows", "heads", "names"),
    [
        ("bf16", 8, ["glm5lab", "FlashAttention-3", "FlashMLA", "DRAM floor"]),
        ("fp8_ds_mla", 64, ["glm5lab", "FlashMLA", "DRAM floor"]),
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

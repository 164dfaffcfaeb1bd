"""Figures: every byte once, axes with units, the card as a line."""

import pytest

from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.memory import GIB
from glm5lab.gguf.plan import make_plan
from glm5lab.gguf.reader import open_gguf
from glm5lab.views.charts import MEMORY, bytes_figure, memory_figure, types_figure


@pytest.fixture(scope="module")
def glm5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    return open_gguf(write_layout(read_layouts()["glm-5.2-ud-iq2_xxs"], folder))


def test_types_add_up_to_the_file(glm5):
    figure = types_figure(glm5)
    sizes = {bar.name: sum(bar.x) * GIB for bar in figure.data}
    table = glm5.table().groupby("type")["nbytes"].sum()
    assert sizes == pytest.approx(table.to_dict())
    # Eleven types: more than colours, so colour and hatch together tell them apart.
    looks = {(bar.marker.color, bar.marker.pattern.shape) for bar in figure.data}
    assert len(looks) == len(figure.data) > 8
    assert figure.data[0].y[0] == "ffn_down_exps"
    assert figure.data[0].y[-1].endswith(" others")
    assert len(figure.data[0].y) == 17
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == (
        "size in the file, GiB",
        "role",
    )


def test_layers_of_a_large_file_are_in_gib(glm5):
    figure = bytes_figure(glm5)
    assert sum(sum(bar.y) for bar in figure.data) * GIB == pytest.approx(glm5.nbytes)
    assert "GiB" in figure.layout.yaxis.title.text
    assert len(figure.data[0].x) == 80


@pytest.mark.parametrize(("gib", "fits"), [(96.0, True), (24.0, False)])
def test_memory_stands_against_the_card(glm5, gib, fits):
    plan = make_plan(glm5, 8, gib)
    assert plan.fits == fits
    figure = memory_figure(plan)
    bars = {bar.name: bar.y for bar in figure.data}
    assert list(bars) == list(MEMORY)
    best = plan.best
    assert figure.data[0].x[0] == f"tp {best.tp}, pp {best.pp}"
    ranks = zip(best.stages, best.workspaces, strict=True)
    stage, space = max(ranks, key=lambda rank: rank[0].weights + rank[1].total)
    assert bars["weights, quantized"][0] * GIB == pytest.approx(stage.packed)
    assert bars["workspace (estimate)"][0] * GIB == pytest.approx(space.total)
    total = sum(values[0] for values in bars.values())
    assert total == pytest.approx(plan.card.budget / GIB) if fits else total > gib * 0.92
    heights = [shape.y0 for shape in figure.layout.shapes]
    assert heights == pytest.approx([gib, gib * 0.92])
    assert figure.layout.yaxis.title.text == "GiB on one GPU"
    assert figure.layout.yaxis.range[1] > max(total, gib)

"""Plotly figures for notebooks."""

from collections import Counter
from typing import TYPE_CHECKING

from glm5lab.gguf.reader import GgufModel, Tensor

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = {
    "attention": "#0072B2",
    "indexer": "#D55E00",
    "routed experts": "#56B4E9",
    "dense and shared experts, router": "#009E73",
    "embedding, output, MTP": "#CC79A7",
}


def part(tensor: Tensor) -> str:
    """Which part of the model a tensor belongs to; a key of COLOURS."""
    role = tensor.role
    if tensor.layer is None or role.startswith("nextn."):
        return "embedding, output, MTP"
    if role.startswith("indexer."):
        return "indexer"
    if role.startswith("attn_"):
        return "attention"
    return "routed experts" if "_exps." in role else "dense and shared experts, router"


def bytes_figure(model: GgufModel) -> "go.Figure":
    """Stacked bars: MiB in the file, one bar a layer, one colour a part of the model."""
    import plotly.graph_objects as go

    sizes: Counter[tuple[str, int | None]] = Counter()
    for tensor in model.tensors.values():
        sizes[part(tensor), tensor.layer] += tensor.nbytes
    layers = sorted({layer for _, layer in sizes if layer is not None})
    places: list[int | None] = [*layers, None]
    names = [*map(str, layers), "outside"]
    bars = [
        go.Bar(
            name=name,
            x=names,
            y=[sizes[name, place] / 2**20 for place in places],
            marker_color=colour,
            hovertemplate="layer %{x}: %{y:.2f} MiB",
        )
        for name, colour in COLOURS.items()
    ]
    figure = go.Figure(bars)
    figure.update_layout(
        title=f"Bytes by layer: {model.metadata.get('general.name', model.path.name)}",
        xaxis={"title": "layer", "type": "category"},
        yaxis={"title": "size in the file, MiB"},
        barmode="stack",
        template="plotly_white",
        height=420,
    )
    return figure

"""What each rank holds of a file's tensors, and where a rebuilt matrix differs."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from glm5lab.errors import counted
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.table import name_table
from glm5lab.views.charts import COLOURS, mtp_blocks, part, unit_of
from glm5lab.views.live import tensor_explorer
from glm5lab.views.roofline import MARGIN

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects as go

RANKS = (1, 2, 4, 8)
COLUMNS = ("name", "type", "vllm", "part", "change", "kernel", "rank_bytes")
CELLS = 16  # rows, and columns, of a matrix that make one cell of the map


def names_explorer(model: GgufModel) -> None:
    """A search over the name table; without a person before it, bytes a rank for 1 to 8 GPUs."""
    table = name_table(model, hf_config(model), gpu=True)
    tensor_explorer(table, ranks_figure(model), COLUMNS)


def ranks_figure(model: GgufModel) -> "go.Figure":
    """Stacked bars: what one GPU holds of each part when 1 to 8 share every layer, quantized."""
    import plotly.graph_objects as go

    config, mtp = hf_config(model), mtp_blocks(model)
    parts = [part(tensor, mtp) for tensor in model.tensors.values()]
    columns: list[Counter[str]] = []
    numbers = [n for n in RANKS if config["num_attention_heads"] % n == 0]
    for ranks in numbers:
        held: Counter[str] = Counter()
        table = name_table(model, config, tp=ranks, gpu=True).set_index("name")["rank_bytes"]
        for name, place in zip(model.tensors, parts, strict=True):
            held[place] += int(table[name])
        columns.append(held)
    unit, scale = unit_of(max(sum(held.values()) for held in columns))
    figure = go.Figure(
        [
            go.Bar(
                name=name,
                x=[counted(n, "GPU") for n in numbers],
                y=[held[name] / scale for held in columns],
                marker_color=colour,
                hovertemplate=f"%{{x}}: %{{y:.2f}} {unit}",
            )
            for name, colour in COLOURS.items()
        ]
    )
    figure.update_layout(
        title="Weights on each GPU, tensor-parallel: what every rank needs whole does not shrink",
        barmode="stack",
        template="plotly_white",
        height=420,
        xaxis={"title": "GPUs that share each layer"},
        yaxis={"title": f"{unit} on one GPU"},
        margin=MARGIN,
    )
    return figure


def difference_figure(expected: "np.ndarray", matrices: Mapping[str, "np.ndarray"]) -> "go.Figure":
    """Maps of the largest absolute difference in each cell of 16 x 16 values, one a matrix.

    Args:
        expected: the right matrix, [rows, columns].
        matrices: what to compare with it, by name; shapes as expected's.

    Raises:
        ValueError: a shape that is not that of `expected`, or no multiple of the cells.
    """
    import numpy as np
    from plotly.subplots import make_subplots

    height, width = expected.shape
    if height % CELLS or width % CELLS:
        raise ValueError(f"expected: shape {expected.shape} is no multiple of {CELLS} both ways")
    maps = {}
    for name, matrix in matrices.items():
        if matrix.shape != expected.shape:
            raise ValueError(f"{name}: expected shape {expected.shape}, got {matrix.shape}")
        cells = np.abs(matrix - expected).reshape(height // CELLS, CELLS, width // CELLS, CELLS)
        maps[name] = cells.max((1, 3))
    most = max(float(cells.max()) for cells in maps.values())
    figure = make_subplots(1, len(maps), subplot_titles=list(maps), horizontal_spacing=0.12)
    for column, cells in enumerate(maps.values(), 1):
        figure.add_heatmap(
            z=cells.round(4),
            zmin=0,
            zmax=most or 1,
            x0=CELLS / 2,
            dx=CELLS,
            y0=CELLS / 2,
            dy=CELLS,
            colorscale="Cividis",
            showscale=column == len(maps),
            colorbar={"title": "difference"},
            hovertemplate="row %{y}, column %{x}: %{z}<extra></extra>",
            row=1,
            col=column,
        )
    figure.update_xaxes(title="column")
    figure.update_yaxes(title="row", autorange="reversed")
    figure.update_layout(
        template="plotly_white",
        height=430,
        title="Difference to the twin's kv_b",
        margin={**MARGIN, "t": 90},
    )
    return figure

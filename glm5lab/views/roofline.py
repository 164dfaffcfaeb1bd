"""Sparse MLA against what the memory allows, how far off results are, and what SM120 needs."""

from collections.abc import Mapping
from math import log10
from typing import TYPE_CHECKING, Any

from glm5lab.views.kernel_charts import CASE, COLOURS

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    import torch

WIDTH, VALUES, TOP_K = 576, 512, 2048
SYMBOLS = {"bf16": "circle", "fp8_ds_mla": "diamond-open"}
TICKS = (10, 15, 20, 30, 50, 100, 200, 300)
MARGIN = {"t": 60, "b": 60, "l": 80, "r": 20}


def roofline_points(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every measured call of sparse MLA in `kernels.json`, with operations a byte and TFLOP/s."""
    points = []
    for row in measured["rows"]:
        match = CASE.fullmatch(row["case"])
        if not match or "us" not in row or row["name"] not in COLOURS:
            continue
        rows, heads, tokens = match["rows"], int(match["heads"]), int(match["tokens"])
        us = row["us"]
        flop = 2 * tokens * heads * TOP_K * (WIDTH + VALUES)
        moved = row["floor_us"] * 1e-6 * measured["copy_tb_s"] * 1e12
        points.append(
            {
                **{"name": row["name"], "rows": rows, "heads": heads, "tokens": tokens, "us": us},
                "intensity": flop / moved,
                "tflops": flop / us * 1e-6,
                "of_memory": row["floor_us"] / us,
            }
        )
    return points


def roofline_figure(measured: Mapping[str, Any]) -> "go.Figure":
    """TFLOP/s over operations a byte, with the line that the measured copy rate draws."""
    import plotly.graph_objects as go

    points = roofline_points(measured)
    figure = go.Figure()
    low, high = (pick(p["intensity"] for p in points) for pick in (min, max))
    ends = [low / 1.4, high * 1.4]
    figure.add_scatter(
        x=ends,
        y=[x * measured["copy_tb_s"] for x in ends],
        mode="lines",
        name=f"memory, {measured['copy_tb_s']:.2f} TB/s",
        line={"color": "#000000", "dash": "dash", "width": 1.5},
    )
    shift = {name: 1.05 ** (i - len(COLOURS) // 2) for i, name in enumerate(COLOURS)}
    for name, colour in COLOURS.items():
        for rows, symbol in SYMBOLS.items():
            mine = [p for p in points if (p["name"], p["rows"]) == (name, rows)]
            if mine:
                figure.add_scatter(
                    x=[p["intensity"] * shift[name] for p in mine],
                    y=[p["tflops"] for p in mine],
                    customdata=[
                        (p["heads"], p["tokens"], p["us"], 100 * p["of_memory"]) for p in mine
                    ],
                    mode="markers",
                    name=f"{name}, {rows}",
                    marker={"color": colour, "symbol": symbol, "size": 9, "opacity": 0.85},
                    hovertemplate="%{customdata[0]} heads, %{customdata[1]} tokens: "
                    "%{customdata[2]:.1f} us, %{customdata[3]:.0f}% of the memory's rate",
                )
    for rows, heads in sorted({(p["rows"], p["heads"]) for p in points}):
        mine = [p for p in points if (p["rows"], p["heads"]) == (rows, heads)]
        figure.add_annotation(
            x=log10(mine[0]["intensity"]),
            y=log10(min(p["tflops"] for p in mine)),
            text=f"{rows}<br>{heads} heads",
            showarrow=False,
            yshift=-26,
            font={"size": 11},
        )
    figure.update_layout(
        title=f"Sparse MLA on {measured['gpu']}, 1 to 1024 tokens: each dot a measured call",
        xaxis={"title": "operations a byte of gathered rows", "type": "log", "tickvals": TICKS},
        yaxis={"title": "TFLOP/s", "type": "log", "dtick": 1},
        template="plotly_white",
        margin=MARGIN,
        height=480,
    )
    return figure


def error_figure(found: "torch.Tensor", expected: "torch.Tensor") -> "go.Figure":
    """A map of errors, tokens by heads: the largest difference over the reference's largest value.

    Args:
        found: [T, H, D].
        expected: the same shape, of higher precision.
    """
    import plotly.graph_objects as go

    error = relative_errors(found, expected)
    logs = error.clamp_min(1e-12).log10()
    figure = go.Figure(
        go.Heatmap(
            z=logs.tolist(),
            customdata=error.tolist(),
            colorscale="Cividis",
            colorbar={"title": "log10 of<br>the error"},
            xgap=1,
            ygap=1,
            hovertemplate="token %{y}, head %{x}: %{customdata:.1e}<extra></extra>",
        )
    )
    figure.update_layout(
        title=f"Triton against the reference in float64: at most {error.max().item():.1e}",
        xaxis={"title": "head", "dtick": 1},
        yaxis={"title": "query token", "dtick": 1, "autorange": "reversed"},
        template="plotly_white",
        margin=MARGIN,
        height=380,
    )
    return figure


def relative_errors(found: "torch.Tensor", expected: "torch.Tensor") -> "torch.Tensor":
    """[T, H]: the largest difference over the reference's largest value; 0 where both are 0."""
    expected = expected.double()
    difference = (found.double() - expected).abs().amax(-1)
    return difference / expected.abs().amax(-1).clamp_min(1e-30)


def compile_table(compiled: Mapping[str, Any]) -> "pd.DataFrame":
    """What `glm5lab compile --json` found, one row a kernel: the most any configuration needs.

    Args:
        compiled: its document, for one architecture.

    Returns:
        Indexed by kernel: configurations, shared memory and its limit in bytes, registers a
        thread, bytes of stack a thread (spilled registers, and frames of functions called), fits.
    """
    import pandas as pd

    frame = pd.DataFrame(compiled["kernels"])
    frame["family"] = frame["kernel"].str.split().str[0]
    grouped = frame.groupby("family", sort=False).agg(
        configurations=("kernel", "size"),
        shared_memory=("shared_memory", "max"),
        limit=("limit", "first"),
        registers=("registers", "max"),
        stack=("spilled", "max"),
        fits=("fits", "all"),
    )
    return grouped.rename_axis("kernel")


def compile_figure(compiled: Mapping[str, Any]) -> "go.Figure":
    """Shared memory of every configuration against the device's."""
    import plotly.graph_objects as go

    kernels = compiled["kernels"]
    families = [row["kernel"].split()[0] for row in kernels]
    limit = kernels[0]["limit"]
    figure = go.Figure(
        go.Scatter(
            x=[row["shared_memory"] / 1024 for row in kernels],
            y=families,
            mode="markers",
            marker={"color": COLOURS["glm5lab"], "size": 10, "opacity": 0.45},
            customdata=[(row["kernel"], row["registers"], row["spilled"]) for row in kernels],
            hovertemplate="%{customdata[0]}: %{x:.1f} KiB, %{customdata[1]} registers, "
            "%{customdata[2]} bytes of stack<extra></extra>",
        )
    )
    figure.add_vline(
        limit / 1024,
        line={"dash": "dash", "color": "#D55E00", "width": 2},
        annotation={"text": f"{kernels[0]['architecture']}: {limit / 1024:g} KiB a block"},
        annotation_position="bottom left",
    )
    figure.update_layout(
        title=f"Shared memory of {len(kernels)} compiled configurations",
        xaxis={"title": "KiB a block", "rangemode": "tozero"},
        yaxis={"title": "kernel", "type": "category", "autorange": "reversed", "automargin": True},
        template="plotly_white",
        margin={**MARGIN, "l": 130},
        height=420,
    )
    return figure

"""Plotly figures over the measurements that `glm5lab bench kernels --json` writes."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

# Okabe and Ito's palette, one colour an implementation wherever it occurs.
COLOURS = {
    "glm5lab": "#0072B2",
    "glm5lab in 99 KiB": "#56B4E9",
    "FlashAttention-3": "#D55E00",
    "FlashMLA": "#009E73",
    "FlashInfer": "#CC79A7",
}
DASHES = {"DRAM floor": "dash", "glm5lab in 99 KiB": "dot"}
CASE = re.compile(r"(?P<rows>\S+), (?P<heads>\d+) heads, (?P<tokens>\d+) tokens")


def speed_table(measurements: Mapping[str, Any], rows: str, heads: int) -> "pd.DataFrame":
    """Microseconds a call: one row a number of tokens, one column an implementation.

    Args:
        measurements: the JSON document of `glm5lab bench kernels`.
        rows: "bf16" or "fp8_ds_mla".
        heads: query heads.

    Returns:
        Indexed by tokens; the last column is the DRAM floor.
    """
    import pandas as pd

    table: dict[int, dict[str, float]] = {}
    for row in measurements["rows"]:
        match = CASE.fullmatch(row["case"])
        if match and (match["rows"], int(match["heads"])) == (rows, heads) and "us" in row:
            line = table.setdefault(int(match["tokens"]), {})
            line[row["name"]] = row["us"]
            line["DRAM floor"] = row["floor_us"]
    frame = pd.DataFrame.from_dict(table, orient="index").rename_axis("tokens")
    return frame[[c for c in frame if c != "DRAM floor"] + ["DRAM floor"]]


def remarks(measurements: Mapping[str, Any], rows: str, heads: int) -> list[str]:
    """What the document says of figures in a table: of whom, at how many tokens, and the words.

    Args:
        measurements: as for `speed_table`.
        rows: "bf16" or "fp8_ds_mla".
        heads: query heads.
    """
    said: dict[tuple[str, str], list[str]] = {}
    for row in measurements["rows"]:
        match = CASE.fullmatch(row["case"])
        if match and (match["rows"], int(match["heads"])) == (rows, heads) and "remark" in row:
            said.setdefault((row["name"], row["remark"]), []).append(match["tokens"])
    return [
        f"{name} at {', '.join(tokens)} tokens: {words}" for (name, words), tokens in said.items()
    ]


def speed_text(measurements: Mapping[str, Any], rows: str, heads: int) -> str:
    """The table and its remarks, as lines."""
    table = speed_table(measurements, rows, heads).round(1).to_string()
    return "\n".join([table, *remarks(measurements, rows, heads)])


def speed_figure(measurements: Mapping[str, Any], rows: str, heads: int) -> "go.Figure":
    """Time over tokens for every implementation, both axes logarithmic; arguments as above."""
    import plotly.graph_objects as go

    table = speed_table(measurements, rows, heads)
    lines = [
        go.Scatter(
            name=str(name),
            x=list(table.index),
            y=list(table[name]),
            mode="lines" if name == "DRAM floor" else "lines+markers",
            line={
                "color": COLOURS.get(str(name), "#888888"),
                "dash": DASHES.get(str(name), "solid"),
            },
            hovertemplate="%{x} tokens: %{y:.1f} us",
        )
        for name in table
    ]
    figure = go.Figure(lines)
    figure.update_layout(
        title=f"Sparse MLA on {measurements['gpu']}: {rows} rows, {heads} heads, top-k 2048",
        xaxis={"title": "query tokens", "type": "log", "tickvals": list(table.index)},
        yaxis={"title": "time a call, microseconds", "type": "log"},
        template="plotly_white",
        height=420,
    )
    return figure

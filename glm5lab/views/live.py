"""Widgets, in JupyterLab only; elsewhere (nbval, a saved notebook, GitHub) stands a figure."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from glm5lab.errors import InputError, counted
from glm5lab.views.fit import fit_figure, fit_row, gpu_numbers
from glm5lab.views.tables import human_bytes

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from glm5lab.gguf.reader import GgufModel

CARDS = {
    "24 GiB (4090)": 24,
    "32 GiB (5090)": 32,
    "48 GiB (L40S)": 48,
    "80 GiB (A100, H100)": 80,
    "96 GiB (RTX PRO 6000)": 96,
    "141 GiB (H200)": 141,
}
LIVE_WIDTH = 860  # pixels; a figure within boxes does not find its width by itself
SHOWN_ROWS = 15
TENSOR_COLUMNS = ("name", "shard", "shape", "type", "nbytes")
CELL = "text-align:left;padding:2px 10px;white-space:pre-wrap;vertical-align:top;line-height:1.35"


def is_live() -> bool:
    """Whether a person looks on: a Jupyter server started this kernel for an open notebook."""
    return bool(os.environ.get("JPY_SESSION_NAME"))


def show(static: "go.Figure", widget: Callable[[], Any], below: bool = False) -> None:
    """The widget where it can be used, the figure where it would be a dead picture of itself.

    Args:
        static: the figure.
        widget: makes the widget.
        below: the figure shows something else than the widget, and so stands below it, too.
    """
    if is_live():
        from IPython.display import display

        display(widget())
    if below or not is_live():
        static.show(renderer="plotly_mimetype")


def html_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in JupyterLab's own colours, light or dark."""
    head = "".join(f"<th style='{CELL}'>{escape(str(h))}</th>" for h in headings)
    body = "".join(
        "<tr>" + "".join(f"<td style='{CELL}'>{escape(str(c))}</td>" for c in row) + "</tr>"
        for row in rows
    )
    colours = (
        "color:var(--jp-content-font-color1);font-size:12px;line-height:1.35;font-family:monospace"
    )
    return f"<table style='border-collapse:collapse;{colours}'><tr>{head}</tr>{body}</table>"


def memory_explorer(model: "GgufModel", gpu_memory: int = 96) -> None:
    """Memory of the fullest of 1 to 16 GPUs: a slider, a choice of cards, and what fits."""
    show(fit_figure(model, gpu_memory), lambda: _memory_widget(model, gpu_memory))


def _memory_widget(model: "GgufModel", gpu_memory: int) -> Any:
    import ipywidgets as w
    import plotly.graph_objects as go

    numbers = gpu_numbers()
    count = w.IntSlider(8, numbers[0], numbers[-1], description="GPUs", continuous_update=False)
    card = w.Dropdown(options=CARDS, value=gpu_memory, description="each")
    answer = w.HTML()
    figure = go.FigureWidget(fit_figure(model, gpu_memory, chosen=8)).update_layout(
        width=LIVE_WIDTH
    )

    @cache
    def drawn(memory: int) -> "go.Figure":
        return fit_figure(model, memory)

    def update(_: Any = None) -> None:
        new = drawn(card.value)
        with figure.batch_update():
            for trace, values in zip(figure.data, new.data, strict=True):
                trace.x, trace.y, trace.customdata = values.x, values.y, values.customdata
                trace.marker.opacity = [1 if n == count.value else 0.45 for n in numbers]
            figure.layout.shapes, figure.layout.annotations = (
                new.layout.shapes,
                new.layout.annotations,
            )
            figure.layout.yaxis.range, figure.layout.title = (
                new.layout.yaxis.range,
                new.layout.title,
            )
        row = fit_row(model, count.value, card.value)
        answer.value = f"<b>{escape(row.verdict)}</b><br><code>{escape(row.command)}</code>"

    count.observe(update, names="value")
    card.observe(update, names="value")
    update()
    return w.VBox([w.HBox([count, card]), answer, figure])


def find_tensors(table: "pd.DataFrame", words: str = "", type_: str = "") -> "pd.DataFrame":
    """Rows of a tensor table whose names hold every word, in any order.

    Args:
        table: from `GgufModel.table`, or a name table.
        words: such as "indexer 3": parts of the name; a number means that layer.
        type_: a quantization type; "" for all.

    Raises:
        InputError: a type that no tensor has.
    """
    if type_ and type_ not in set(table["type"]):
        known = ", ".join(sorted(set(table["type"])))
        raise InputError("type", f"no tensor is {type_!r}", f"name one of {known}")
    keep = table["type"].eq(type_) if type_ else table["type"].notna()
    for word in words.split():
        name = table["name"].str.contains(word, regex=False, case=False)
        keep &= table["layer"].eq(int(word)).fillna(False) if word.isdecimal() else name
    return table[keep.astype(bool)]


def tensor_explorer(
    table: "pd.DataFrame", figure: "go.Figure", columns: Sequence[str] = TENSOR_COLUMNS
) -> None:
    """A search over every row of a tensor table, and a figure; without a person only that.

    Args:
        table: as in `find_tensors`.
        figure: what stands below the search, and alone in a saved notebook.
        columns: which to show.
    """
    show(figure, lambda: _tensor_widget(table, columns), below=True)


def _tensor_widget(table: "pd.DataFrame", columns: Sequence[str]) -> Any:
    import ipywidgets as w

    words = w.Text(description="search", placeholder="indexer 3", continuous_update=True)
    types = ["", *sorted(set(table["type"]))]
    kind = w.Dropdown(
        options=[(name or "all types", name) for name in types], description="type", value=""
    )
    result = w.HTML()

    def update(_: Any = None) -> None:
        found = find_tensors(table, words.value, kind.value)
        size = human_bytes(float(found["nbytes"].sum()))
        more = f", the first {SHOWN_ROWS} shown" if len(found) > SHOWN_ROWS else ""
        rows = list(found[list(columns)].head(SHOWN_ROWS).itertuples(index=False, name=None))
        said = f"{counted(len(found), 'tensor')}, {size}{more}"
        result.value = said + html_table(columns, rows)

    words.observe(update, names="value")
    kind.observe(update, names="value")
    update()
    return w.VBox([w.HBox([words, kind]), result])

"""Pictures of plotly figures, for readers that run no scripts: GitHub, and nbval's reports."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tools.browser import browser

PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"
WIDTH, SCALE = 900, 1.5  # pixels of the picture: the one times the other


def add_images(notebook: Any) -> int:
    """Give every figure among the outputs its picture; how many there are.

    Raises:
        RuntimeError: there is no Chromium.
    """
    figures = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if PLOTLY in output.get("data", {})
    ]
    if figures:
        for data, picture in zip(figures, pictures([d[PLOTLY] for d in figures]), strict=True):
            data[PNG] = base64.b64encode(picture).decode()
    return len(figures)


def pictures(figures: list[dict[str, Any]]) -> list[bytes]:
    """PNG images of figures, drawn by the plotly.js that the plotly package carries."""
    import plotly

    script = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    drawn = []
    with browser() as chromium:
        page = chromium.new_page(device_scale_factor=SCALE)
        page.set_content("<body style='margin:0'><div id='figure'></div></body>")
        page.add_script_tag(path=script)
        for figure in figures:
            height = figure["layout"].get("height", 450)
            page.set_viewport_size({"width": WIDTH, "height": int(height)})
            page.evaluate(
                """async ([text, width]) => {
                    const figure = JSON.parse(text);
                    Plotly.purge('figure');
                    await Plotly.newPlot('figure', figure.data, {...figure.layout, width},
                                         {staticPlot: true});
                }""",
                [json.dumps(figure), WIDTH],
            )
            drawn.append(page.locator("#figure").screenshot())
    return drawn

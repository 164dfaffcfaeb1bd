"""Pictures of the notebooks for README: each opened, run and used in JupyterLab, in Chromium.

    python -m tools.notebook_pictures [NAME...]      05_serve, say; all six without

They go to notebooks/pictures/NAME.png, in few colours, so that each stays below 150 KB.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.browser import browser
from tools.lab import ROOT, Lab, jupyterlab

FOLDER = ROOT / "notebooks" / "pictures"
LARGEST = 150_000  # bytes of a picture
WIDTH, COLOURS = 1120, 128


def _nothing(_: Lab) -> None:
    """For a notebook whose picture needs no use of it."""


def _move_query(lab: Lab) -> None:
    lab.slide("query", "ArrowLeft", times=9)


def _chat(lab: Lab) -> None:
    lab.page.get_by_placeholder("ask something").fill("What is a lightning indexer?")
    lab.page.get_by_role("button", name="send").click()
    lab.page.wait_for_function(
        "document.querySelector('.jp-Notebook').innerText.includes('first piece after')"
    )


@dataclass(frozen=True)
class Scene:
    """What a picture shows.

    Attributes:
        cell: words of the cell at its top.
        use: what is done before.
        height: of the window, in pixels.
    """

    cell: str
    use: Callable[[Lab], None] = _nothing
    height: int = 720


SCENES = {
    "00_environment": Scene("facts = env.report()"),
    "01_inspect_gguf": Scene("The same for 1 to 16 GPUs", height=760),
    "02_loader_names": Scene("The difference to the twin, drawn"),
    "03_sparse_mla_kernels": Scene("attended_explorer(model, text)", _move_query, height=860),
    "04_register_backend": Scene("What stock vLLM says"),
    "05_serve": Scene("chat_explorer(client", _chat),
}


def picture(lab: Lab, scene: Scene) -> bytes:
    """A PNG of the notebook from a cell on, after it was run and used."""
    from PIL import Image

    lab.run_all()
    scene.use(lab)
    lab.page.set_viewport_size({"width": WIDTH, "height": scene.height})
    lab.page.wait_for_timeout(800)
    cell = lab.page.locator(".jp-Notebook .jp-Cell", has_text=scene.cell).first
    cell.evaluate("cell => cell.scrollIntoView({block: 'start'})")
    lab.page.wait_for_timeout(800)
    png = lab.page.locator(".jp-NotebookPanel-notebook").first.screenshot()
    out = io.BytesIO()
    # Text and flat colours: a palette takes a third of the bytes and shows no difference.
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS).save(out, "PNG", optimize=True)
    return out.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status, 1 where a picture is too large."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebook_pictures")
    parser.add_argument("names", nargs="*", choices=[[], *SCENES], help="all without")
    names: list[str] = parser.parse_args(arguments).names or list(SCENES)
    FOLDER.mkdir(exist_ok=True)
    too_large = 0
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder)) as address:
        for name in names:
            with browser() as chromium:
                lab = Lab(chromium, address, f"{name}.ipynb")
                try:
                    content = picture(lab, SCENES[name])
                finally:
                    lab.close()
            (FOLDER / f"{name}.png").write_bytes(content)
            too_large += len(content) >= LARGEST
            print(f"{name}.png: {len(content):,} bytes of at most {LARGEST:,}", flush=True)
    return int(too_large > 0)


if __name__ == "__main__":
    sys.exit(main())

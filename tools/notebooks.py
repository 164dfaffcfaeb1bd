"""Notebooks and their texts: kept in step, cleaned, run.

    python -m tools.notebooks sync [FILE...]   clean the notebooks, carry changes to the other half
    python -m tools.notebooks run [FILE...]    run from top to bottom, save, then the same
    python -m tools.notebooks check            what does not hold, a line each

Each notebooks/NAME.ipynb has its text in notebooks/text/NAME.py (jupytext, py:percent), which is
what a review reads. Where both halves differ, the newer file wins; a cell changed in the text loses
its output, and `run` makes a new one. Widget state never stays: it is megabytes, and new each time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
LARGEST = 1_000_000  # bytes of a saved notebook
WIDGET = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"
FORMAT = "py:percent"
FIGURE, GPU_ONLY = "figure", "gpu-only"
TAGS = {"nbval-check-output", FIGURE, GPU_ONLY}
METADATA = {
    "jupytext": {"cell_metadata_filter": "tags,-all", "formats": "ipynb,text//py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def text_path(notebook: Path) -> Path:
    """Where a notebook's text lies."""
    return notebook.parent / "text" / f"{notebook.stem}.py"


def notebook_path(half: Path) -> Path:
    """The notebook of either half."""
    return half if half.suffix == ".ipynb" else half.parent.parent / f"{half.stem}.ipynb"


def cleaned(notebook: Any) -> Any:
    """The notebook without widgets, timings and whatever else differs from save to save."""
    notebook.metadata = nbformat.from_dict(METADATA)
    # Ids by place: those of an editor are random.
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
            for output in cell.outputs:
                if "metadata" in output:
                    output.metadata = {}
    return notebook


def as_text(notebook: Any) -> str:
    """The notebook's text; outputs are not part of it."""
    return str(jupytext.writes(notebook, fmt=FORMAT))


def from_text(text: str, notebook: Any) -> Any:
    """The text as a notebook, with the outputs of the cells that did not change."""
    run_before = {cell.source for cell in notebook.cells}
    combined = combine_inputs_with_outputs(jupytext.reads(text, fmt=FORMAT), notebook, FORMAT)
    for cell in combined.cells:
        # jupytext pairs cells by place, too: a changed one would keep what it no longer prints.
        if cell.cell_type == "code" and cell.source not in run_before:
            cell.outputs, cell.execution_count = [], None
    return combined


def sync(notebook: Path, changed: Sequence[Path] = ()) -> bool:
    """Clean a notebook and bring its text into step; whether a file was written.

    Args:
        notebook: the .ipynb; made from its text where it is not there.
        changed: halves that are known to have changed. Where that is one of the two, it wins, the
            newer otherwise.
    """
    text = text_path(notebook)
    old = text.read_text() if text.exists() else None
    if not notebook.exists() and old is not None:
        return _write(
            notebook, nbformat.writes(cleaned(jupytext.reads(old, fmt=FORMAT))) + "\n", None
        )
    before = notebook.read_text()
    document = cleaned(nbformat.reads(before, as_version=4))
    if old is not None and old != as_text(document):
        named = {path.resolve() for path in changed} & {notebook.resolve(), text.resolve()}
        newer = text.stat().st_mtime > notebook.stat().st_mtime
        if named == {text.resolve()} or (len(named) != 1 and newer):
            document = cleaned(from_text(old, document))
    return bool(_write(notebook, nbformat.writes(document) + "\n", before)) | _write(
        text, as_text(document), old
    )


def _write(path: Path, content: str, before: str | None) -> bool:
    if content == before:
        return False
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    print(f"{path.name}: written")
    return True


def run(notebook: Path) -> None:
    """Run a notebook as `make lab` would, in this Python, and save it with pictures of its figures.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; nothing is saved.
    """
    import torch
    from nbclient import NotebookClient

    from tools.figure_images import add_images

    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this Python, as in `make lab`
    sync(notebook)
    document = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        document, timeout=300, resources={"metadata": {"path": str(notebook.parent)}}
    )
    if not torch.cuda.is_available():
        client.skip_cells_with_tag = GPU_ONLY
    client.execute()
    add_images(document)
    document = cleaned(document)
    notebook.write_text(nbformat.writes(document) + "\n")
    text_path(notebook).write_text(as_text(document))


def problems(notebook: Path) -> list[str]:
    """What does not hold of a saved notebook, a sentence each."""
    name = notebook.name
    if notebook.stat().st_size >= LARGEST:
        size = f"{notebook.stat().st_size:,} bytes, expected less than {LARGEST:,}"
        return [f"{name}: {size}; show fewer points or fewer figures"]
    document = nbformat.read(notebook, as_version=4)
    found = []
    if "widgets" in document.metadata:
        found.append("holds widget state; run `python -m tools.notebooks sync`")
    text = text_path(notebook)
    if not text.exists() or text.read_text() != as_text(document):
        found.append(f"text/{text.name} is not its text; run `python -m tools.notebooks sync`")
    count = 0
    for number, cell in enumerate(document.cells):
        if cell.cell_type == "code":
            count += not _skipped(cell)
            found += [f"cell {number}: {what}" for what in _cell_problems(cell, count)]
    return [f"{name}: {what}" for what in found]


def _cell_problems(cell: Any, count: int) -> list[str]:
    """What does not hold of a code cell, the `count`-th of its notebook."""
    tags = set(cell.metadata.get("tags", []))
    found = [f"the tag {tag} means nothing here" for tag in sorted(tags - TAGS)]
    if GPU_ONLY in tags and gpu_reason(cell.source) is None:
        found.append("is tagged gpu-only: its first line says why, `# GPU only: ...`")
    if cell.execution_count != count and not _skipped(cell):
        found.append(
            f"execution count {cell.execution_count}, expected {count}: not saved by one run; run "
            "`python -m tools.notebooks run`"
        )
    data = [output.get("data", {}) for output in cell.outputs]
    if any(output.output_type == "error" for output in cell.outputs):
        found.append("its saved output is an error")
    if any(WIDGET in entry for entry in data):
        found.append("holds a widget; run `python -m tools.notebooks sync`")
    if "nbval-check-output" in tags and not cell.outputs:
        found.append("is a contract without an output: nbval would compare nothing")
    if FIGURE in tags and not any({PLOTLY, "image/png"} <= set(entry) for entry in data):
        found.append("saved no figure with its picture; run `python -m tools.notebooks run`")
    return found


def _skipped(cell: Any) -> bool:
    """A gpu-only cell saved on a machine without a GPU."""
    return GPU_ONLY in cell.metadata.get("tags", []) and cell.execution_count is None


def gpu_reason(source: str) -> str | None:
    """Why a cell needs a GPU, from its first line."""
    first, _, _ = source.partition("\n")
    reason = first.removeprefix("# GPU only: ")
    return reason if reason != first and reason else None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status, 1 where a file was written or something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks")
    parser.add_argument("action", choices=("sync", "run", "check"))
    parser.add_argument("files", nargs="*", type=Path, help="either half; all without")
    given = parser.parse_args(arguments)
    every = sorted(FOLDER.glob("*.ipynb"))
    notebooks = sorted({notebook_path(path) for path in given.files}) if given.files else every
    if given.action == "sync":
        written = [sync(notebook, given.files) for notebook in notebooks]
        return int(any(written))
    if given.action == "run":
        for notebook in notebooks:
            run(notebook)
    found = [line for notebook in notebooks for line in problems(notebook)]
    print("\n".join(found) or f"{len(notebooks)} notebooks are in order")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

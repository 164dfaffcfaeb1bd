"""The saved notebooks, the tool that keeps their texts in step, and how nbval runs them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import notebooks as tool

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOT = {tool.PLOTLY: {"data": [], "layout": {}}, "image/png": "AA=="}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_saved_notebook_is_in_order(notebook):
    assert tool.problems(notebook) == []


def test_there_are_six():
    assert [path.name[:2] for path in NOTEBOOKS] == ["00", "01", "02", "03", "04", "05"]
    texts = sorted(path.stem for path in (ROOT / "notebooks" / "text").glob("*.py"))
    assert texts == [path.stem for path in NOTEBOOKS]


@pytest.fixture
def pair(tmp_path):
    """A clean notebook with two run cells, and its text."""
    notebook = tmp_path / "few.ipynb"
    one = new_code_cell("1 + 1", execution_count=1)
    one.outputs = [new_output("execute_result", {"text/plain": "2"}, execution_count=1)]
    two = new_code_cell("print('x')", execution_count=2, metadata={"tags": ["nbval-check-output"]})
    two.outputs = [new_output("stream", name="stdout", text="x\n")]
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Few"), one, two]), notebook)
    tool.sync(notebook)
    assert tool.problems(notebook) == []
    return notebook, tool.text_path(notebook)


def outputs(notebook):
    return [c.outputs for c in nbformat.read(notebook, 4).cells if c.cell_type == "code"]


def test_a_change_of_the_text_reaches_the_notebook(pair):
    notebook, text = pair
    text.write_text(text.read_text().replace("1 + 1", "1 + 2").replace("# # Few", "# # A few"))
    assert tool.main(["sync", str(text)]) == 1
    document = nbformat.read(notebook, 4)
    assert [c.source for c in document.cells] == ["# A few", "1 + 2", "print('x')"]
    assert [len(found) for found in outputs(notebook)] == [0, 1]
    assert tool.problems(notebook) == [
        "few.ipynb: cell 1: execution count None, expected 1: not saved by one run; run "
        "`python -m tools.notebooks run`"
    ]


def test_a_text_alone_becomes_a_notebook(pair):
    notebook, text = pair
    notebook.unlink()
    assert tool.main(["sync", str(text)]) == 1
    document = nbformat.read(notebook, 4)
    assert [c.source for c in document.cells] == ["# Few", "1 + 1", "print('x')"]
    assert document.cells[2].metadata["tags"] == ["nbval-check-output"]
    assert tool.main(["sync", str(text)]) == 0


def test_a_change_of_the_notebook_reaches_the_text(pair):
    notebook, text = pair
    notebook.write_text(notebook.read_text().replace("1 + 1", "1 + 3"))
    assert tool.problems(notebook)[0].startswith("few.ipynb: text/few.py is not its text")
    assert tool.main(["sync", str(notebook)]) == 1
    assert "1 + 3" in text.read_text()
    assert tool.main(["sync", str(notebook)]) == 0


@pytest.mark.parametrize("newer", ["text", "notebook"])
def test_of_two_changed_halves_the_newer_wins(pair, newer):
    notebook, text = pair
    text.write_text(text.read_text().replace("1 + 1", "1 + 4"))
    notebook.write_text(notebook.read_text().replace("1 + 1", "1 + 5"))
    for path in pair:
        os.utime(path, (1, 2 if (path is text) == (newer == "text") else 1))
    tool.sync(notebook, pair)
    wins = "1 + 4" if newer == "text" else "1 + 5"
    assert wins in text.read_text()
    assert wins in notebook.read_text()


def test_widgets_are_dropped_and_counts_kept(pair):
    notebook, _ = pair
    document = nbformat.read(notebook, 4)
    document.metadata["widgets"] = {"state": "x" * 2_000_000}
    view = {tool.WIDGET: {"model_id": "random"}, "text/plain": "FloatSlider(value=1.0)"}
    document.cells[1].outputs.append(new_output("display_data", view))
    document.cells[1].metadata["execution"] = {"iopub.execute_input": "2026"}
    nbformat.write(document, notebook)
    assert tool.problems(notebook)[0].startswith("few.ipynb: 2,0")
    tool.sync(notebook)
    assert tool.problems(notebook) == []
    saved = nbformat.read(notebook, 4)
    assert [c.execution_count for c in saved.cells if c.cell_type == "code"] == [1, 2]
    assert [len(found) for found in outputs(notebook)] == [1, 1]


@pytest.mark.parametrize(
    ("tag", "source", "data", "message"),
    [
        ("figure", "f", {"text/plain": "Figure()"}, "saved no figure with its picture"),
        ("nbval-check-output", "f", None, "a contract without an output"),
        ("gpu-only", "f", None, "its first line says why"),
        ("nbval-skip", "f", None, "the tag nbval-skip means nothing here"),
        ("figure", "f", PLOT, None),
        ("gpu-only", "# GPU only: it times\nf", None, None),
    ],
)
def test_tags_say_what_a_cell_must_hold(pair, tag, source, data, message):
    notebook, _ = pair
    document = nbformat.read(notebook, 4)
    cell = new_code_cell(source, execution_count=3, metadata={"tags": [tag]})
    cell.outputs = [new_output("display_data", data)] if data else []
    document.cells.append(cell)
    nbformat.write(document, notebook)
    tool.sync(notebook)
    found = tool.problems(notebook)
    assert (message is None and not found) or (len(found) == 1 and message in found[0])


def test_the_hook_takes_both_halves():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    hook = next(hook for hook in hooks if hook["id"] == "notebooks")
    assert hook["entry"].endswith("-m tools.notebooks sync")
    for path in (NOTEBOOKS[0], tool.text_path(NOTEBOOKS[0])):
        assert re.search(hook["files"], path.relative_to(ROOT).as_posix())
    assert not re.search(hook["files"], "notebooks/conftest.py")


def nbval(folder, *names, path=ROOT, options=()):
    """What nbval says about notebooks of a folder, run with our settings and a package."""
    for name in ("pytest.ini", "conftest.py", "sanitize.cfg"):
        shutil.copy(ROOT / "notebooks" / name, folder)
    line = [sys.executable, "-m", "pytest", "-c", f"{folder}/pytest.ini", "--color=no", "-vv"]
    line += [*options, *(str(folder / name) for name in names)]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False).stdout


def test_a_figure_changed_in_the_package_makes_a_notebook_fail(tmp_path):
    """On a copy: 99 KiB of shared memory become a byte more, and one contract notices."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "glm5lab", tmp_path / "package" / "glm5lab", ignore=ignore)
    changed = tmp_path / "package" / "glm5lab" / "env.py"
    text = changed.read_text()
    assert "101_376" in text
    changed.write_text(text.replace("101_376", "101_377"))
    document = nbformat.read(ROOT / "notebooks" / "00_environment.ipynb", 4)
    # One cell asks vLLM in a process of its own, which takes long and prints no such figure.
    document.cells = [cell for cell in document.cells if "stock_attention" not in cell.source]
    nbformat.write(document, tmp_path / "00_environment.ipynb")
    said = nbval(tmp_path, "00_environment.ipynb", path=tmp_path / "package")
    assert "101,377 bytes a block" in said
    assert re.search(r"1 failed, \d+ passed", said)


def write(path, *sources, tags=()):
    cells = [new_code_cell(s, execution_count=1, metadata={"tags": list(tags)}) for s in sources]
    nbformat.write(new_notebook(cells=cells), path)


def test_a_dead_kernel_and_a_long_cell_are_noticed_and_gpu_cells_are_skipped(tmp_path):
    import torch

    assert "--nbval-cell-timeout=240" in (ROOT / "notebooks" / "pytest.ini").read_text()
    write(tmp_path / "dies.ipynb", "import os; os._exit(3)", "1", "2")
    write(tmp_path / "waits.ipynb", "import time; time.sleep(600)")
    write(tmp_path / "gpu.ipynb", "# GPU only: it times a kernel\n1", tags=["gpu-only"])
    names = ("dies.ipynb", "waits.ipynb", "gpu.ipynb")
    said = nbval(tmp_path, *names, options=["--nbval-cell-timeout=5"])
    assert "the kernel died while this cell ran" in said
    assert "Timeout of 5 seconds exceeded" in said
    assert "SKIPPED [2] " in said
    assert "the kernel died in a cell above" in said
    if torch.cuda.is_available():
        assert "2 failed, 1 passed, 2 skipped" in said
    else:
        assert "needs a CUDA device: it times a kernel" in said
        assert "2 failed, 3 skipped" in said


def test_saved_pictures_are_of_the_saved_figures():
    """Each picture is a PNG and stands beside its figure, so GitHub shows what JupyterLab does."""
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if tool.PLOTLY in data and "figure" in cell["metadata"].get("tags", []):
                    assert "".join(data["image/png"]).startswith("iVBORw0KGgo")

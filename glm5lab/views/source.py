"""The file that a notebook works on: a sample, GLM5LAB_FILE, or one chosen in a picker."""

import os
import tempfile
from pathlib import Path
from typing import Any

from glm5lab.gguf.sample import write_sample
from glm5lab.views.live import is_live

VARIABLE = "GLM5LAB_FILE"
SAMPLE = "the sample, a tiny GLM-5 with random weights"


class Source:
    """The chosen file, and the sample, which proofs with a known answer use.

    Attributes:
        folder: a temporary folder, which has the sample; removed by `close`.
        sample: first shard of the sample.
        file: what the notebook works on; the picker changes it.
    """

    def __init__(self, **options: Any) -> None:
        self._workspace = tempfile.TemporaryDirectory(prefix="glm5lab-")
        self.folder = Path(self._workspace.name)
        self.sample = write_sample(self.folder, **options)
        named = os.environ.get(VARIABLE, "")
        self.file = Path(named).expanduser() if named else self.sample

    @property
    def is_sample(self) -> bool:
        """Whether the sample is what was chosen."""
        return self.file == self.sample

    def __str__(self) -> str:
        return SAMPLE if self.is_sample else str(self.file)

    def close(self) -> None:
        """Remove the folder; in JupyterLab, where widgets still read it, the kernel does."""
        if not is_live():
            self._workspace.cleanup()


def choose_file(**options: Any) -> Source:
    """Say which file the notebook works on; in JupyterLab also show a picker.

    Args:
        options: of `write_sample`.

    Returns:
        The choice. Cells below read `source.file`: run them again after picking another.
    """
    source = Source(**options)
    print("file:", source)
    if is_live():
        from IPython.display import display

        display(picker(source))
    return source


def picker(source: Source) -> Any:
    """A widget that walks folders and sets `source.file`."""
    import ipywidgets as w

    start = source.file.parent if not source.is_sample else Path.home()
    place, chosen = w.Label(), w.Label(f"works on: {source}")
    entries = w.Select(rows=6, layout={"width": "60%"})
    back = w.Button(description="use the sample", icon="undo")

    def show(folder: Path) -> None:
        place.value = str(folder)
        entries.options = [("(choose a .gguf, or a folder to look into)", None), *listing(folder)]
        entries.value = None

    def pick(change: dict[str, Any]) -> None:
        path = change["new"]
        if path is not None and path.is_dir():
            show(path)
        elif path is not None:
            use(path)

    def use(path: Path) -> None:
        source.file = path
        chosen.value = f"works on: {source} (run the cells below again)"

    entries.observe(pick, names="value")
    back.on_click(lambda _: use(source.sample))
    show(start)
    return w.Accordion([w.VBox([place, entries, w.HBox([back, chosen])])], titles=["another file"])


def listing(folder: Path) -> list[tuple[str, Path]]:
    """The folder above, folders, and GGUF files of a folder, as a picker shows them."""
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        folders = [path for path in inside if path.is_dir()]
        files = [path for path in inside if path.suffix == ".gguf" and path.is_file()]
    except OSError:
        folders, files = [], []
    rows = [("..", folder.parent)] if folder.parent != folder else []
    rows += [(f"{path.name}/", path) for path in folders]
    return rows + [(path.name, path) for path in files]

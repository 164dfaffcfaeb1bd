"""README's generated parts: measured tables, and what the commands of a deployment print.

    python -m tools.readme            make them anew, except the slow ones
    python -m tools.readme --all      those too: vLLM is asked what it selects
    python -m tools.readme --check    say what is not up to date, and change nothing

Each part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. Nothing in it is edited by
hand: a table follows its file in data/measurements, an output is that of the command above it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.readme_tables import TABLES, markdown

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PART = re.compile(r"<!-- begin (?P<name>\S+) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)
LAYOUT = "glm-5-q4_k_m"
FILE = f"/models/{LAYOUT}-00001-of-00011.gguf"
LOG = "tests/data/doctor/triton-shared-memory-sm120.txt"
STEPS = ("plan", "prepare", "serve", "doctor")
WIDTH = 100  # columns of what the commands print
# What ran where; a compute capability that is not named was compiled for and selected only.
# A data-centre card of Blackwell has vLLM's own kernels; nothing here was made for it.
RAN = {"9.0": "run on H200s", "10.0": "selection only"}


def printed(*arguments: str, folder: Path | None = None) -> str:
    """What a glm5lab command prints, as a fenced block with the command above it.

    Args:
        arguments: of the command; the file is called FILE, as in /models.
        folder: where the file really lies.
    """
    from typer.testing import CliRunner

    from glm5lab.__main__ import app

    real = [a.replace("/models", str(folder)) if folder else a for a in arguments]
    found = CliRunner().invoke(app, real, env={"COLUMNS": str(WIDTH)})
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    text = found.output.rstrip().replace(sys.executable, "python")
    if folder is not None:
        text = text.replace(str(folder), "/models")
    return f"```\n$ glm5lab {' '.join(arguments)}\n{text}\n```"


def deployment() -> dict[str, str]:
    """Outputs of the steps on eight GPUs, from headers of a public file without weights."""
    from glm5lab.gguf.layout_files import write_layout
    from glm5lab.gguf.layouts import read_layouts

    cards = ("--gpus", "8", "--gpu-memory", "96")
    with tempfile.TemporaryDirectory(prefix="glm5lab-readme-") as name:
        folder = Path(name).resolve()
        write_layout(read_layouts()[LAYOUT], folder)
        prepare = printed("prepare", FILE, "/models/prepared", folder=folder)
        held = " ".join(sorted(path.name for path in (folder / "prepared").iterdir()))
        outputs = (
            printed("plan", FILE, *cards, folder=folder),
            prepare.removesuffix("\n```") + f"\n$ ls /models/prepared\n{held}\n```",
            printed("serve", FILE, *cards, "--dry-run", folder=folder),
            printed("doctor", LOG),
        )
        return dict(zip(STEPS, outputs, strict=True))


def support() -> dict[str, str]:
    """What vLLM selects by GPU and rows of the cache, with glm5lab and without."""
    from glm5lab.env import engine_distribution
    from glm5lab.selection_table import selection
    from glm5lab.views.selection import CAPABILITIES, NONE, selection_rows

    asked = selection(list(CAPABILITIES.values()))
    lines = []
    for label, capability in CAPABILITIES.items():
        frame = selection_rows(asked, capability)
        rows = {(row["flashinfer"], row["cache"]): row for row in frame.to_dict("records")}
        cells: list[str] = []
        for cache in ("bfloat16", "fp8_ds_mla"):
            for column in ("stock", "here"):
                having, lacking = (rows[f, cache][column] for f in ("with", "without"))
                alone = having if having == lacking else f"{having}; without FlashInfer {lacking}"
                cells.append("-" if alone == NONE else alone)
        ran = RAN.get(capability, "compiled and selected only")
        lines.append((label, *cells, ran))
    headings = ["GPU", "bf16 rows: stock vLLM", "with glm5lab"]
    headings += ["fp8_ds_mla rows: stock vLLM", "with glm5lab", "TRITON_MLA_SPARSE was"]
    asked_of = f"Asked of {engine_distribution()} as if it saw each GPU"
    said = f"{asked_of}: `glm5lab env --capability`."
    return {"support": f"{said}\n\n{markdown(headings, lines)}"}


def parts(slow: bool) -> dict[str, str]:
    """Every generated part by its name."""
    made = {name: make() for name, make in TABLES.items()} | deployment()
    return made | (support() if slow else {})


def renewed(text: str, made: dict[str, str]) -> str:
    """README with these parts made anew; others stay.

    Raises:
        ValueError: a part has no place in README.
    """
    places = {match["name"] for match in PART.finditer(text)}
    if lost := made.keys() - places:
        raise ValueError(f"README has no `<!-- begin NAME -->` for {', '.join(sorted(lost))}")

    def put(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in made:
            return match[0]
        return f"<!-- begin {name} -->\n{made[name]}\n<!-- end {name} -->"

    return PART.sub(put, text)


def main(
    arguments: Sequence[str] | None = None, make: Callable[..., dict[str, str]] = parts
) -> int:
    """The command line; the exit status, 1 where something was not up to date."""
    parser = argparse.ArgumentParser(prog="python -m tools.readme")
    parser.add_argument("--all", action="store_true", help="the slow parts, too")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    before = README.read_text()
    made = make(given.all)
    stale = [name for name in made if renewed(before, {name: made[name]}) != before]
    if stale and not given.check:
        README.write_text(renewed(before, made))
    print(
        f"README: {', '.join(stale)} {'to be renewed' if given.check else 'renewed'}"
        if stale
        else "README is up to date"
    )
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())

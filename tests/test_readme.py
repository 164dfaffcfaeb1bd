"""README: its tables are those of data/measurements, its outputs real, its examples run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from glm5lab import env
from glm5lab.views.measurements import measurements
from tools import notebook_pictures, readme
from tools.readme_tables import TABLES, markdown, number, verdict

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LAYER = re.compile(r"^### (?P<layer>\d)\. [^\n]+\n\n```python\n(?P<code>.*?)```", re.DOTALL | re.M)
EXAMPLES = {int(match["layer"]): match["code"] for match in LAYER.finditer(README)}
ENGINE = {4, 5}  # layers whose examples start vLLM: `make test-all`


def test_the_generated_parts_are_up_to_date(capsys):
    assert readme.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_what_vllm_selects_is_up_to_date():
    if f"Asked of {env.engine_distribution()} " not in README:
        pytest.skip(f"README's table is another vLLM's than {env.engine_distribution()}")
    made = readme.support()
    assert readme.renewed(README, made) == README


def test_every_generated_part_has_a_maker():
    names = [match["name"] for match in readme.PART.finditer(README)]
    assert names
    assert sorted(names) == sorted({*TABLES, *readme.STEPS, "support"})
    assert README.count("<!-- begin ") == README.count("<!-- end ") == len(names)


def test_a_changed_measurement_is_noticed(monkeypatch, capsys):
    def made(slow):
        return {"cpu": "- The table of a set of 13 files"}

    assert readme.main(["--check"], made) == 1
    assert "cpu to be renewed" in capsys.readouterr().out
    renewed = readme.renewed(README, made(False))
    assert "13 files" in renewed
    assert readme.PART.sub("", renewed) == readme.PART.sub("", README)
    with pytest.raises(ValueError, match="for nowhere"):
        readme.renewed(README, {"nowhere": ""})


@pytest.mark.parametrize("name", ["glm5lab", "FlashMLA"])
def test_quoted_figures_stand_in_the_measurements(name):
    """Read here once more, without the tool's help."""
    document = json.loads((ROOT / "data" / "measurements" / "kernels.json").read_text())
    part = README.partition("<!-- begin sparse-mla -->")[2].partition("| bf16 rows, 64 heads")[0]
    head, *rows = [line.strip("| ").split(" | ") for line in part.splitlines() if "|" in line]
    shown = {row[0]: row[head.index(name)] for row in rows[1:7]}
    for row in document["rows"]:
        if row["name"] == name and re.fullmatch(r"bf16, 8 heads, \d+ tokens", row["case"]):
            tokens = row["case"].split()[-2]
            assert float(shown.pop(tokens).replace(",", "")) == pytest.approx(row["us"], rel=0.01)
    assert shown == {}


def test_figures_of_quantized_weights_are_within_the_bounds_of_their_tests():
    from test_loader_gpu import SPREADS
    from test_loader_layers import TWO_PRODUCTS

    engines, layers = measurements("gguf_engines"), measurements("gguf_layers")
    assert (engines["bound"], layers["bound"]) == (SPREADS, TWO_PRODUCTS)
    for row in engines["rows"]:
        assert max(row["blocks"], row["tp_2"], row["ep_2"]) <= SPREADS * row["bf16"]
    assert max(layers["one_gpu"]["errors"].values()) < TWO_PRODUCTS


def test_numbers_and_tables():
    assert [number(x) for x in (0.556, 6.912, 19.88, 150.4, 4618.1)] == [
        *("0.56", "6.91", "19.9", "150", "4,618"),
    ]
    assert markdown(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_the_verdict_on_answers_comes_from_the_file():
    failed = {"a b": {"error": "exit 1, see LOG: in f | [rank0]: ValueError: odd"}, "c": {}}
    document = {"engines": {"c": {}}, "wrong": [], "unjudged": []}
    assert verdict(document) == "All that is judged is in bounds."
    wrong = ["a b: exit 1, see LOG: in f | [rank0]: ValueError: odd"]
    document = {"engines": failed, "wrong": wrong, "unjudged": ["ours, TP 2"]}
    assert verdict(document) == (
        "All that is judged is in bounds. Not judged: ours, TP 2. The engine a b failed: "
        "ValueError: odd."
    )
    document["wrong"] = [*wrong, "ours: mean 0.08, where 'natives' has 0.06"]
    said = "Beyond a bound: ours: mean 0.08, where 'natives' has 0.06. Not judged: ours, TP 2."
    assert verdict(document).startswith(said)


def test_each_layer_has_an_example_of_15_lines():
    assert sorted(EXAMPLES) == [0, 1, 2, 3, 4, 5]
    for layer, code in EXAMPLES.items():
        assert len([line for line in code.splitlines() if line]) <= 15, f"layer {layer}"
        assert max(map(len, code.splitlines())) <= 100


def run(layer, folder):
    file = folder / f"layer_{layer}.py"
    # vLLM starts its workers anew from this file.
    body = "".join(f"    {line}\n" for line in EXAMPLES[layer].splitlines())
    file.write_text(f"if __name__ == '__main__':\n{body}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLM5LAB_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("layer", sorted(EXAMPLES.keys() - ENGINE))
def test_the_example_runs(layer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[layer], f"README.md, layer {layer}", "exec"), {})
    said = capsys.readouterr().out
    expected = {
        0: "nothing is missing\nattention: ",
        1: "top-k: 16\nfits: True tp 1",
        2: "model.embed_tokens.weight (512, 256)",
        3: "torch.Size([4, 8, 512]) torch.Size([4, 8])",
    }
    assert expected[layer] in said
    if layer == 3:
        assert float(said.rpartition(" ")[2]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layer", sorted(ENGINE))
def test_the_example_runs_with_an_engine(layer, tmp_path):
    done = run(layer, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    if layer == 4:
        assert "bfloat16 stock: None with glm5lab: TRITON_MLA_SPARSE" in done.stdout
        assert "\nagree: " in done.stdout
    else:
        assert len(done.stdout) > 0


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)\)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_each_notebook_has_a_small_picture():
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in notebooks] == list(notebook_pictures.SCENES)
    for path in notebooks:
        picture = ROOT / "notebooks" / "pictures" / f"{path.stem}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < notebook_pictures.LARGEST
        assert f"](notebooks/pictures/{path.stem}.png)" in README
        sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
        words = notebook_pictures.SCENES[path.stem].cell
        assert any(words in source for source in sources), f"{path.name} has no cell {words!r}"

"""What the notebooks explore with: figures, searches, a choice of files, and stock tools' words."""

import os
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch

from glm5lab.errors import InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.plan import make_plan
from glm5lab.gguf.reader import open_gguf
from glm5lab.loading.table import name_table
from glm5lab.views import attended, fit, live, ranks, roofline, side_by_side, source, stock
from glm5lab.views.charts import MEMORY
from glm5lab.views.measurements import measurements, origin

TEXT = "GLM-5 reads every token, but each query attends to few of them."


@pytest.fixture(scope="module")
def glm5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm5")
    return open_gguf(write_layout(read_layouts()["glm-5-q4_k_m"], folder))


@pytest.fixture
def at_jupyterlab(monkeypatch):
    """As a kernel that a Jupyter server started for an open notebook; what is displayed."""
    shown: list = []
    monkeypatch.setenv("JPY_SESSION_NAME", "01.ipynb")
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr("plotly.graph_objects.Figure.show", lambda f, **_: shown.append(f))
    return shown


def children(widget, kind):
    """All widgets of a kind below one."""
    found = [widget] if type(widget).__name__ == kind else []
    for child in getattr(widget, "children", ()):
        found += children(child, kind)
    return found


def test_the_figure_of_1_to_16_gpus_is_the_plans(glm5):
    figure = fit.fit_figure(glm5, 96)
    assert [bar.name for bar in figure.data] == list(MEMORY)
    for number in (1, 6, 8):
        plan = make_plan(glm5, gpus=number, gpu_memory_gib=96)
        row = fit.fit_row(glm5, number, 96)
        assert bool(row.command) == plan.fits
        assert [bar.y[number - 1] for bar in figure.data] == list(row.parts)
        held = sum(row.parts[:3]) * 2**30
        assert held == pytest.approx(plan.best.used)
    assert fit.fit_row(glm5, 8, 96).tokens == make_plan(glm5, 8, 96).best.caches[0].tokens
    first = next(n for n in fit.gpu_numbers() if fit.fit_row(glm5, n, 96).command)
    assert figure.layout.title.text.startswith(f"Fits on {first} GPUs of 96 GiB")
    assert fit.fit_figure(glm5, 24).layout.title.text.startswith("Does not fit on 16 GPUs of 24")


def test_the_memory_slider_follows(glm5, at_jupyterlab):
    live.memory_explorer(glm5)
    (box,) = at_jupyterlab
    (slider,), (card,) = children(box, "IntSlider"), children(box, "Dropdown")
    (answer,), (figure,) = children(box, "HTML"), children(box, "FigureWidget")
    assert "fits, tp 8" in answer.value
    slider.value = 4
    assert "does not fit" in answer.value
    assert [o == 1 for o in figure.data[0].marker.opacity].index(True) == 3
    card.value = 141
    assert "vllm serve FILE --tensor-parallel-size 4" in answer.value
    assert figure.data[0].y == fit.fit_figure(glm5, 141).data[0].y


def test_without_a_person_a_figure_stands_there(glm5, monkeypatch, capsys):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    shown = []
    monkeypatch.setattr("plotly.graph_objects.Figure.show", lambda f, **k: shown.append((f, k)))
    live.memory_explorer(glm5)
    ((figure, options),) = shown
    assert figure.to_dict() == fit.fit_figure(glm5, 96).to_dict()
    assert options == {"renderer": "plotly_mimetype"}


@pytest.mark.parametrize(
    ("words", "kind", "count"),
    [
        ("", "", 113),
        ("indexer 3", "", 5),
        ("3 INDEXER norm", "", 2),
        ("", "Q8_0", 16),
        ("no such", "", 0),
        ("7", "", 0),
    ],
)
def test_the_search_takes_parts_of_names_layers_and_types(sample_mix, words, kind, count):
    found = live.find_tensors(open_gguf(sample_mix).table(), words, kind)
    assert len(found) == count
    assert all(word in name for word in ("indexer",) * ("indexer" in words) for name in found.name)


def test_an_unknown_type_is_named(sample_mix):
    with pytest.raises(InputError, match=r"no tensor is 'Q9'; name one of F32, "):
        live.find_tensors(open_gguf(sample_mix).table(), type_="Q9")


def test_the_search_widget_follows(sample_mix, at_jupyterlab):
    table = open_gguf(sample_mix).table()
    live.tensor_explorer(table, go.Figure())
    box, below = at_jupyterlab
    assert isinstance(below, go.Figure)
    (words,), (result,) = children(box, "Text"), children(box, "HTML")
    assert result.value.startswith("113 tensors, ")
    assert "the first 15 shown" in result.value
    words.value = "indexer.proj 2"
    assert result.value.startswith("1 tensor, ")
    assert "blk.2.indexer.proj.weight" in result.value


def test_names_that_a_file_gives_are_no_html():
    table = live.html_table(["name"], [("<script>x</script>",)])
    assert "<script>" not in table
    assert "&lt;script&gt;" in table


def test_bytes_a_rank_are_the_name_tables(sample_mix):
    model = open_gguf(sample_mix)
    figure = ranks.ranks_figure(model)
    assert figure.data[0].x == ("1 GPU", "2 GPUs", "4 GPUs")  # the sample has four heads
    table = name_table(model, hf_config(model), tp=2, gpu=True)
    total = sum(bar.y[1] for bar in figure.data) * 2**20
    assert total == pytest.approx(table["rank_bytes"].sum())


def test_the_map_of_differences_finds_a_value():
    import numpy as np

    right = np.zeros((64, 48), np.float32)
    wrong = right.copy()
    wrong[17, 40] = 3
    figure = ranks.difference_figure(right, {"same": right, "one off": wrong})
    same, other = (np.array(trace.z) for trace in figure.data)
    assert not same.any()
    assert np.argwhere(other).tolist() == [[1, 2]]
    with pytest.raises(ValueError, match=r"other: expected shape \(64, 48\), got \(48, 64\)"):
        ranks.difference_figure(right, {"other": right.T})


def test_the_first_layers_choice_is_hugging_faces(sample_mix):
    """HF's indexer in the sample's twin, hooked while the whole model runs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from glm5lab.gguf.tokenizer import write_tokenizer

    model = open_gguf(sample_mix)
    choice = attended.attended(model, TEXT)
    twin = AutoModelForCausalLM.from_pretrained(sample_mix.parent / "hf", dtype=torch.float32)
    seen = []
    indexer = twin.model.layers[0].self_attn.indexer
    indexer.register_forward_hook(lambda *args: seen.append(args[-1]))
    folder = sample_mix.parent / "tokenizer-of-explorers"
    folder.mkdir()
    write_tokenizer(model, folder)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    assert len(ids) > model.metadata["glm-dsa.attention.indexer.top_k"]
    with torch.no_grad():
        twin(torch.tensor([ids]))
    for query, row in enumerate(seen[0][0].tolist()):
        assert choice.of(query) == sorted(p for p in row if p <= query)


def test_the_map_of_attention_is_the_choice(sample_mix):
    choice = attended.attended(open_gguf(sample_mix), TEXT, k=3)
    figure = attended.attended_figure(choice)
    state = figure.data[0].z
    for query in range(len(choice.tokens)):
        assert [p for p, s in enumerate(state[query]) if s == 2] == choice.of(query)
        assert all(s == 0 for s in state[query][query + 1 :])
    assert "Top-3" in figure.layout.title.text


def test_the_top_k_explorer_follows(sample_mix, at_jupyterlab):
    attended.attended_explorer(open_gguf(sample_mix), TEXT)
    (box,) = at_jupyterlab
    query, k = children(box, "IntSlider")
    (result,), (words,) = children(box, "HTML"), children(box, "Textarea")
    (figure,) = children(box, "FigureWidget")
    last = query.max
    assert f"token {last} attends to 16 of the {last + 1} tokens it sees" in result.value
    k.value = 2
    assert f"token {last} attends to 2 of" in result.value
    assert sum(state == 2 for state in figure.data[0].z[last]) == 2
    assert "Top-2" in figure.layout.title.text
    query.value = 1
    assert "token 1 attends to 2 of the 2 tokens it sees, 0 are left out" in result.value
    words.value = "<b>"
    assert query.max < last
    assert "&lt;" in result.value


def test_the_lines_side_by_side_are_in_the_sources():
    both = side_by_side.SideBySide()
    assert len(both.steps) == len(side_by_side.STEPS)
    for _, reference, kernel in both.steps:
        for path, lines in ((side_by_side.REFERENCE, reference), (side_by_side.KERNEL, kernel)):
            text = path.read_text()
            assert lines
            assert all(line.strip() in text for line in lines)
    assert "tl.dot(b_w, b_v0" in repr(both)
    assert "<table" in both._repr_html_()


def test_a_span_that_is_gone_is_named():
    with pytest.raises(ValueError, match=r"reference.py: no lines 'x = 1' to 'x = 2'; adapt"):
        side_by_side.lines_of(side_by_side.REFERENCE, [("x = 1", "x = 2")])


def test_roofline_points_are_the_measured_calls():
    measured = measurements("kernels")
    points = roofline.roofline_points(measured)
    one = next(
        p
        for p in points
        if (p["name"], p["rows"], p["heads"], p["tokens"]) == ("FlashMLA", "bf16", 8, 64)
    )
    row = next(
        r
        for r in measured["rows"]
        if (r["case"], r["name"]) == ("bf16, 8 heads, 64 tokens", "FlashMLA")
    )
    assert one["us"] == row["us"]
    assert one["tflops"] == pytest.approx(2 * 64 * 8 * 2048 * (576 + 512) / row["us"] / 1e6)
    # On the memory's line a call takes exactly its floor.
    assert one["tflops"] / (one["intensity"] * measured["copy_tb_s"]) == pytest.approx(
        one["of_memory"]
    )


def test_errors_by_token_and_head():
    expected = torch.zeros(2, 3, 4, dtype=torch.float64)
    expected[0, 1, 2] = 2.0
    found = expected.clone()
    found[0, 1, 0] = 0.5
    error = roofline.relative_errors(found.float(), expected)
    assert error[0, 1] == 0.25
    assert error.count_nonzero() == 1
    assert "at most 2.5e-01" in roofline.error_figure(found, expected).layout.title.text


def test_everything_compiled_for_sm120_fits():
    compiled = measurements("compile_sm120")
    table = roofline.compile_table(compiled)
    assert table["configurations"].sum() == len(compiled["kernels"])
    assert table["limit"].unique().tolist() == [101_376]
    assert bool(table["fits"].all()) == (compiled["failed"] == 0)
    assert len(roofline.compile_figure(compiled).data[0].x) == len(compiled["kernels"])
    assert origin(compiled) == "no GPU, triton 3.8.0, torch 2.13.0+cpu, 2026-11-30"


def test_unknown_measurements_are_named():
    with pytest.raises(InputError, match=r"no such file, there is .*kernels"):
        measurements("no_such")


def test_the_file_is_the_sample_or_what_the_variable_names(monkeypatch, capsys):
    monkeypatch.delenv(source.VARIABLE, raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    chosen = source.choose_file()
    assert chosen.is_sample
    assert chosen.file.is_file()
    assert capsys.readouterr().out == f"file: {source.SAMPLE}\n"
    chosen.close()
    assert not chosen.folder.exists()
    monkeypatch.setenv(source.VARIABLE, "/models/some.gguf")
    chosen = source.choose_file()
    assert (chosen.file, chosen.is_sample) == (Path("/models/some.gguf"), False)
    assert chosen.sample.is_file()
    assert capsys.readouterr().out == "file: /models/some.gguf\n"


def test_the_picker_walks_folders_and_chooses(tmp_path, at_jupyterlab, monkeypatch):
    (tmp_path / "models").mkdir()
    other = tmp_path / "models" / "own.gguf"
    other.touch()
    (tmp_path / "models" / "notes.txt").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    chosen = source.choose_file()
    (box,) = at_jupyterlab
    (entries,), (button,) = children(box, "Select"), children(box, "Button")
    entries.value = tmp_path / "models"
    assert [name for name, _ in entries.options[1:]] == ["..", "own.gguf"]
    entries.value = other
    assert chosen.file == other
    button.click()
    assert chosen.is_sample


def test_stock_tools_say_what_the_notebooks_show(sample_mix):
    """When one of these changes upstream, the notebook that begins with it has to change."""
    assert stock.stock_tensors(sample_mix) == 0  # its first shard has metadata only
    said = stock.stock_config(sample_mix)
    assert said == "ValueError: GGUF model with architecture glm-dsa is not supported yet."
    names = stock.stock_names(
        [
            "model.layers.1.self_attn.kv_b_proj.weight",
            "model.layers.1.mlp.experts.0.up_proj.weight",
        ],
        5,
    )
    assert list(names.values()) == ["blk.1.attn_kv_b.weight", None]
    assert "blk.1.attn_kv_b.weight" not in open_gguf(sample_mix).tensors


@pytest.mark.slow
def test_stock_vllm_refuses_sparse_attention_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("vLLM's platform here is CUDA")
    assert stock.stock_attention() == (
        "NotImplementedError: Sparse Attention is not supported on CPU."
    )
    assert "VLLM_PLUGINS" not in os.environ

"""The notebooks in JupyterLab, in a real browser: opened, run, used, and looked at in both themes.

Pictures lie in the folder that GLM5LAB_SCREENSHOTS names, where it is set.
"""

import os
from pathlib import Path

import pytest

from tools.browser import INSTALL, browser, chromium
from tools.lab import Lab, jupyterlab

pytestmark = pytest.mark.skipif(chromium() is None, reason=INSTALL)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("lab")) as url:
        yield url


@pytest.fixture(scope="module")
def chrome():
    with browser() as started:
        yield started


@pytest.fixture
def opened(request, address, chrome, tmp_path):
    """Opens a notebook, runs it, and checks after its use what holds for each."""
    labs = []

    def run(name):
        lab = Lab(chrome, address, f"{name}.ipynb")
        labs.append((name, lab))
        lab.run_all()
        return lab

    yield run
    for name, lab in labs:
        pictures = Path(os.environ.get("GLM5LAB_SCREENSHOTS", tmp_path))
        pictures.mkdir(parents=True, exist_ok=True)
        counts, failures = lab.counts(), lab.failures()
        for theme in ("light", "dark"):
            lab.picture(pictures / f"{name}-{theme}.png", theme)
            assert (pictures / f"{name}-{theme}.png").stat().st_size > 20_000
            assert lab.clipped() == []
        lab.close()
        assert failures == []
        assert counts == [str(n) for n in range(1, len(counts) + 1)]
        assert lab.errors == []


def text_of(lab, words):
    """The first output of the notebook that holds some words."""
    found = lab.page.locator(".jp-OutputArea", has_text=words).first
    return found.inner_text()


@pytest.mark.slow
def test_00_environment(opened):
    lab = opened("00_environment")
    assert "an engine is installed: True" in text_of(lab, "an engine")
    lab.page.locator(".jp-OutputArea", has_text="another file").get_by_text("another file").click()
    lab.page.wait_for_timeout(500)
    entries = lab.page.locator(".widget-select select").first.inner_text()
    assert "(choose a .gguf, or a folder to look into)" in entries.replace("\xa0", " ")


@pytest.mark.slow
def test_01_inspect_gguf(opened):
    lab = opened("01_inspect_gguf")
    assert "fits, tp 8" in text_of(lab, "tokens of cache with bf16 rows")
    lab.slide("GPUs", "ArrowLeft", times=3)
    assert "does not fit, best split" in text_of(lab, "are missing on each GPU of the fullest")
    assert lab.page.locator(".js-plotly-plot").count() == 3
    lab.page.get_by_placeholder("indexer 3").fill("indexer.proj 2")
    lab.page.wait_for_timeout(1000)
    assert "1 tensor, " in text_of(lab, "blk.2.indexer.proj.weight")


def test_02_loader_names(opened):
    lab = opened("02_loader_names")
    lab.page.get_by_placeholder("indexer 3").fill("kv_a 3")
    lab.page.wait_for_timeout(1000)
    assert "2 tensors" in text_of(lab, "blk.3.attn_kv_a_norm.weight")
    assert lab.page.locator(".js-plotly-plot").count() == 2


@pytest.mark.slow
def test_03_sparse_mla_kernels(opened):
    lab = opened("03_sparse_mla_kernels")
    assert "attends to 16 of the 49 tokens" in text_of(lab, "are left out")
    lab.slide("query", "ArrowLeft", times=9)
    assert "token 39 attends to 16 of the 40 tokens" in text_of(lab, "are left out")
    lab.slide("top-k", "ArrowLeft", times=3)
    assert "token 39 attends to 13 of the 40 tokens" in text_of(lab, "are left out")
    assert "Top-13 of the first layer" in text_of(lab, "are left out")


@pytest.mark.slow
def test_04_register_backend(opened):
    lab = opened("04_register_backend")
    assert "of 12 cases" in text_of(lab, "nothing else does")
    lab.page.locator(".widget-dropdown select").last.select_option("9.0 (H100, H200)")
    lab.page.wait_for_function(
        "document.querySelector('.jp-Notebook').innerText.includes('FLASH_ATTN_MLA_SPARSE')"
    )


@pytest.mark.slow
def test_05_serve(opened):
    lab = opened("05_serve")
    lab.page.get_by_placeholder("ask something").fill("Which layers are there?")
    lab.page.get_by_role("button", name="send").click()
    lab.page.wait_for_function(
        "document.querySelector('.jp-Notebook').innerText.includes('first piece after')"
    )
    said = text_of(lab, "first piece after")
    assert "user Which layers are there?" in said
    assert "assistant " in said
    assert "Counted by the engine while it answered" in said

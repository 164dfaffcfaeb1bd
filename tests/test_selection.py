"""Which backend vLLM takes for sparse MLA, on devices that are not here.

A child process pretends to be a CUDA platform of each compute capability; see pretend_cuda.
"""

import subprocess
import sys

import pytest
from pretended import printed_last

from glm5lab.vllm_plugin.selection import why_chosen

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0", "12.1")
OURS = "TRITON_MLA_SPARSE"


def ask(*capabilities, **env):
    return printed_last(["-m", "glm5lab.vllm_plugin.pretend_cuda", *capabilities], **env)


@pytest.fixture(scope="module")
def table():
    return ask(*CAPABILITIES)


def rows(table):
    for capability, by_flashinfer in table.items():
        for flashinfer, by_dtype in by_flashinfer.items():
            for dtype, row in by_dtype.items():
                yield (capability, flashinfer, dtype), row


def test_no_native_choice_is_displaced(table):
    seen = list(rows(table))
    assert len(seen) == len(CAPABILITIES) * 2 * 6
    for case, row in seen:
        if row["native"] is not None:
            assert row["chosen"] == row["native"], case
            assert row["valid"][-1] == OURS or OURS in row["refused"], case


def test_where_vllm_has_nothing_ours_serves(table):
    """All but rows of another 16-bit dtype than the model's, which the kernels do not mix."""
    for case, row in rows(table):
        if row["native"] is None:
            assert row["chosen"] == (None if case[2] == "float16" else OURS), case


@pytest.mark.parametrize("capability", ["12.0", "12.1"])
def test_desktop_blackwell(table, capability):
    found = {
        flashinfer: {dtype: row["chosen"] for dtype, row in by_dtype.items()}
        for flashinfer, by_dtype in table[capability].items()
    }
    native = "FLASHINFER_MLA_SPARSE_SM120"
    fp8 = dict.fromkeys(("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"), native)
    assert found["with flashinfer"] == fp8 | {"bfloat16": OURS, "float16": None}
    ours = dict.fromkeys((*fp8, "bfloat16"), OURS)
    assert found["without flashinfer"] == ours | {"float16": None}


def test_hopper_keeps_its_own(table):
    for by_dtype in table["9.0"].values():
        chosen = {dtype: row["chosen"] for dtype, row in by_dtype.items()}
        assert chosen["auto"] == chosen["bfloat16"] == "FLASH_ATTN_MLA_SPARSE"
        assert chosen["fp8_ds_mla"] == "FLASHMLA_SPARSE"


def test_first_in_line_when_asked():
    for case, row in rows(ask("9.0", "12.0", GLM5LAB_PRIORITY="first")):
        if case[2] != "float16":
            assert row["chosen"] == row["valid"][0] == OURS, case


def test_an_unknown_priority_is_refused():
    with pytest.raises(AssertionError, match="GLM5LAB_PRIORITY: expected first or last"):
        ask("9.0", GLM5LAB_PRIORITY="best")


def test_the_reason_names_what_each_native_backend_lacks(monkeypatch):
    monkeypatch.delenv("GLM5LAB_PRIORITY", raising=False)
    refused = {
        "TRITON_MLA": ["sparse not supported"],
        "FLASHINFER_MLA_SPARSE_SM120": ["kv_cache_dtype not supported"],
    }
    line = why_chosen((12, 0), "bfloat16", refused)
    assert line == (
        "TRITON_MLA_SPARSE for SM120, cache bfloat16: no backend of vLLM's takes it "
        "(FLASHINFER_MLA_SPARSE_SM120: kv_cache_dtype not supported)."
    )
    assert "has no sparse MLA of its own" in why_chosen((8, 9), None, {})
    monkeypatch.setenv("GLM5LAB_PRIORITY", "first")
    assert why_chosen((9, 0), "auto", {}).endswith("GLM5LAB_PRIORITY=first.")


def test_the_command_prints_the_same_table(table):
    from glm5lab.views.selection import format_selection

    text = format_selection({"12.0": table["12.0"]})
    lines = [line.split() for line in text.splitlines()]
    assert ["bfloat16", OURS, "*", OURS, "*"] in lines
    assert ["auto", "FLASHINFER_MLA_SPARSE_SM120", OURS, "*"] in lines
    assert ["float16", "none", "none"] in lines
    child = subprocess.run(
        [sys.executable, "-m", "glm5lab", "env", "--capability", "12.0"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert child.stdout.strip() == text


def test_what_is_no_capability_is_refused():
    from glm5lab.errors import InputError
    from glm5lab.selection_table import selection

    with pytest.raises(
        InputError, match=r"capability: expected MAJOR.MINOR such as 12.0, got 'sm_120'"
    ):
        selection(["sm_120"])


def test_gpus_that_vllm_uses_are_asked_for_once():
    from glm5lab.selection_table import present_capabilities

    gpus = [{"capability": (9, 0)}, {"capability": (9, 0)}, {"capability": (12, 0)}]
    assert present_capabilities({"platform": "cuda", "gpus": gpus}) == ["12.0", "9.0"]
    assert present_capabilities({"platform": "cpu", "gpus": gpus}) == []

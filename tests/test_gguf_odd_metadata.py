"""Any value under any key: what reads metadata answers, or says what is wrong."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from glm5lab.errors import Glm5labError
from glm5lab.gguf.chat import read_template
from glm5lab.gguf.config import config_notes, generation_config, hf_config
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.gguf.tokenizer import write_tokenizer
from glm5lab.views.inspection import inspect_json
from glm5lab.views.names import map_json
from glm5lab.views.plan import plan_json, plan_text
from glm5lab.views.tables import inspect_text

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**64 - 1, 0.0, -1.5, 1e30, float("nan"),
    float("inf"), "", "x", "\ufffd\u2028", "a b", [], [0], [1.5], [True] * 5, ["x"] * 3,
    [[1], [2]], [-1] * 512, ["a b"] * 512, [2**63] * 5, "{{ 1 }}", "{% x %}",
    "{{ " + "1" * 5000 + " }}", "[/x] [red]", "\x1b[2J",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(sample_share: Path) -> GgufModel:
    return open_gguf(sample_share)


def _readers(model: GgufModel, folder: Path) -> list[Callable[[], object]]:
    """What `prepare` takes from the metadata."""
    return [
        lambda: json.dumps(hf_config(model), allow_nan=False),
        lambda: json.dumps(generation_config(model), allow_nan=False),
        lambda: json.dumps(config_notes(model)),
        lambda: write_tokenizer(model, folder),
        lambda: json.dumps(read_template(model)),
    ]


def _views(model: GgufModel) -> list[Callable[[], object]]:
    """What the commands show."""
    return [
        lambda: inspect_text(model),
        lambda: json.dumps(inspect_json(model), allow_nan=False),
        lambda: json.dumps(map_json(model), allow_nan=False),
        lambda: plan_text(model, 1, 24.0),
        lambda: json.dumps(plan_json(model, 2, 0.5, kv_dtype="fp8_ds_mla"), allow_nan=False),
    ]


def _errors(steps: Sequence[Callable[[], object]]) -> list[str]:
    """The errors of our own with which the steps refused; any other one is raised."""
    errors = []
    for step in steps:
        try:
            step()
        except Glm5labError as error:
            errors.append(str(error))
    return errors


# The views take long for so many values: of these every 29th, all in the slow run.
@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_any_value_under_any_key(model: GgufModel, tmp_path: Path, every: int) -> None:
    assert _errors([*_readers(model, tmp_path), *_views(model)]) == []
    keys = [k for k in model.metadata if k != "general.architecture"]
    keys += ["tokenizer.ggml.add_bos_token", "glm-dsa.rope.scaling.type"]
    keys += ["glm-dsa.rope.scaling.factor", "general.sampling.temp"]
    errors: list[str] = []
    for number, (key, value) in enumerate(product(keys, ODD)):
        base = {"glm-dsa.rope.scaling.type": "yarn"} if "factor" in key else {}
        changed = dataclasses.replace(model, metadata=model.metadata | base | {key: value})
        views = _views(changed) if number % every == 0 else []
        try:
            errors += _errors([*_readers(changed, tmp_path), *views])
        except Exception as error:
            raise AssertionError(f"{key} = {value!r}") from error
    assert len(errors) > 300
    assert [e for e in errors if not e.isprintable() or len(e) > 1000] == []


def test_no_metadata(model: GgufModel, tmp_path: Path) -> None:
    only = {"general.architecture": "glm-dsa"}
    bare = dataclasses.replace(model, metadata=only)
    assert _errors([*_readers(bare, tmp_path), *_views(bare)])

"""Any value under any key: configuration, notes and tokenizer answer, or say what is wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from glm5lab.errors import Glm5labError
from glm5lab.gguf.chat import read_template
from glm5lab.gguf.config import config_notes, generation_config, hf_config
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.gguf.tokenizer import write_tokenizer

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**64 - 1, 0.0, -1.5, 1e30, float("nan"),
    float("inf"), "", "x", "\ufffd\u2028", "a b", [], [0], [1.5], [True] * 5, ["x"] * 3,
    [[1], [2]], [-1] * 512, ["a b"] * 512, [2**63] * 5, "{{ 1 }}", "{% x %}",
    "{{ " + "1" * 5000 + " }}",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(sample_share: Path) -> GgufModel:
    return open_gguf(sample_share)


def _use(model: GgufModel, folder: Path) -> list[str]:
    """Run everything that reads metadata; the errors of its own that it refused with."""
    errors = []
    for step in (
        lambda: json.dumps(hf_config(model), allow_nan=False),
        lambda: json.dumps(generation_config(model), allow_nan=False),
        lambda: json.dumps(config_notes(model)),
        lambda: write_tokenizer(model, folder),
        lambda: json.dumps(read_template(model)),
    ):
        try:
            step()
        except Glm5labError as error:
            errors.append(str(error))
    return errors


def test_any_value_under_any_key(model: GgufModel, tmp_path: Path) -> None:
    assert _use(model, tmp_path) == []
    keys = [k for k in model.metadata if k != "general.architecture"]
    keys += ["tokenizer.ggml.add_bos_token", "glm-dsa.rope.scaling.type"]
    keys += ["glm-dsa.rope.scaling.factor", "general.sampling.temp"]
    errors: list[str] = []
    for key in keys:
        for value in ODD:
            base = {"glm-dsa.rope.scaling.type": "yarn"} if "factor" in key else {}
            metadata = model.metadata | base | {key: value}
            try:
                errors += _use(dataclasses.replace(model, metadata=metadata), tmp_path)
            except Exception as error:
                raise AssertionError(f"{key} = {value!r}") from error
    assert len(errors) > 300
    assert [e for e in errors if "\n" in e or len(e) > 1000] == []


def test_no_metadata(model: GgufModel, tmp_path: Path) -> None:
    only = {"general.architecture": "glm-dsa"}
    assert _use(dataclasses.replace(model, metadata=only), tmp_path)

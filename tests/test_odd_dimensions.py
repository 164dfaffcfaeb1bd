"""Any dimension in a file: plan, map and inspect answer, or say what is wrong with it."""

import dataclasses
import json
from pathlib import Path

import pytest
from test_gguf_odd_metadata import ODD

from glm5lab.architecture import Glm5Architecture
from glm5lab.errors import Glm5labError, InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.views.inspection import inspect_json
from glm5lab.views.names import map_json
from glm5lab.views.plan import plan_json, plan_text
from glm5lab.views.tables import inspect_text

TYPES = "glm-dsa.attention.indexer.types"


@pytest.fixture(scope="module")
def model(sample_share: Path) -> GgufModel:
    return open_gguf(sample_share)


def changed(model: GgufModel, **values: object) -> GgufModel:
    """The model with other metadata; `__` stands for a dot."""
    named = {f"glm-dsa.{key.replace('__', '.')}": value for key, value in values.items()}
    return dataclasses.replace(model, metadata=model.metadata | named)


def test_any_value_under_any_dimension(model: GgufModel) -> None:
    keys = [key for key in model.metadata if key.startswith("glm-dsa.")]
    keys += ["glm-dsa.vocab_size", "glm-dsa.rope.scaling.factor"]
    seen = set()
    refused = 0
    for key in keys:
        base = {"glm-dsa.rope.scaling.type": "yarn"} if "scaling" in key else {}
        for value in ODD:
            odd = dataclasses.replace(model, metadata=model.metadata | base | {key: value})
            try:
                config = json.dumps(hf_config(odd), allow_nan=False)
                if config in seen:  # plan and map depend on nothing else
                    continue
                seen.add(config)
                json.dumps(plan_json(odd, 2, 8.0), allow_nan=False)
                json.dumps(map_json(odd, 2, 1, gpu=True), allow_nan=False)
            except Glm5labError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{key} = {value!r}") from error
    for value in ODD:
        inspect_text(
            dataclasses.replace(model, metadata=model.metadata | dict.fromkeys(keys, value))
        )
    assert len(seen) > 50
    assert refused > 300


def test_dimensions_of_zero_are_named(model: GgufModel) -> None:
    widths = {"attention__kv_lora_rank": 0, "attention__key_length": 0, "rope__dimension_count": 0}
    with pytest.raises(InputError, match=r"rope.dimension_count is 0, not a whole number of at"):
        plan_text(changed(model, **widths), 1, 8.0)
    for key in ("attention__indexer__key_length", "expert_count", "attention__head_count"):
        with pytest.raises(InputError, match=r"is 0, not a whole number of at least 1"):
            plan_text(changed(model, **{key: 0}), 1, 8.0)


@pytest.mark.parametrize("factor", [5e-324, 0.5, 0.0, -1.0, float("inf")])
def test_stretching_by_less_than_one_is_refused(model: GgufModel, factor: float) -> None:
    options = {"rope__scaling__type": "yarn", "rope__scaling__factor": factor}
    with pytest.raises(InputError, match=r"rope\.scaling"):
        hf_config(changed(model, **options))
    whole = hf_config(changed(model, **options | {"rope__scaling__factor": 4.0}))
    assert whole["rope_parameters"]["original_max_position_embeddings"] == 1024


@pytest.mark.parametrize(
    "odd",
    ["shared", [1], None, 1.0, 2, -1, float("nan"), {}, "x" * 10**6],
    ids=lambda v: str(v)[:8],
)
def test_indexer_types_are_booleans(model: GgufModel, odd: object) -> None:
    metadata = model.metadata | {TYPES: [True, odd, False, True, False]}
    with pytest.raises(ValueError, match="expected true or false") as refusal:
        Glm5Architecture.from_metadata(metadata)
    assert len(str(refusal.value)) < 200
    metadata[TYPES] = [1, True, 0, 1, False]
    types = Glm5Architecture.from_metadata(metadata).indexer_types
    assert types == ("full", "full", "shared", "full", "shared")


def test_long_lists_of_layers_are_written_in_passing(model: GgufModel) -> None:
    """No quadratic time, and nothing as long as the space between two blocks."""
    numbers = [n * n for n in range(100_000)]
    assert layer_ranges(numbers).count(",") > 99_000
    assert layer_ranges([0, 999_999_999]) == "0,999999999"
    many = changed(model, attention__indexer__types=[True, False, False] * 300_000)
    assert max(map(len, inspect_text(many, width=10_000).splitlines())) < 5_000
    assert inspect_json(many)["metadata"][TYPES] == {"array_of": 900_000}

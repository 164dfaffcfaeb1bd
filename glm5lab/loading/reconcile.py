"""What does not fit between a file and GLM-5: unknown names, missing tensors, wrong shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5lab.errors import InputError
from glm5lab.gguf.kernels import can_dequantize
from glm5lab.gguf.reader import GgufModel
from glm5lab.gguf.shapes import Shape
from glm5lab.loading.names import NameMapping, mappings, name_frame, split_names
from glm5lab.loading.shapes import expected_shapes

if TYPE_CHECKING:
    import pandas as pd

LISTED = 10  # problems that an error shows


@dataclass(frozen=True)
class Reconciliation:
    """The name table of a file and everything that is wrong with it.

    Attributes:
        mappings: one a tensor that GLM-5 has, in file order.
        problems: a sentence each, naming the tensor, what was expected and what was found.
    """

    mappings: list[NameMapping]
    problems: list[str]

    @property
    def loaded(self) -> list[NameMapping]:
        """The mappings that fill a parameter."""
        return [m for m in self.mappings if not m.dropped]

    @property
    def dropped(self) -> list[NameMapping]:
        """The mappings that are left out, each with its reason."""
        return [m for m in self.mappings if m.dropped]


def tensor_frame(model: GgufModel, config: Mapping[str, Any]) -> "pd.DataFrame":
    """`names.name_frame` of a file with its shapes and types, and what is wrong with each tensor.

    Returns:
        The columns of `name_frame`, and shape (tuple, torch order), type, and problem: why the
        tensor cannot be loaded, "" where it can or is dropped.
    """
    import pandas as pd

    tensors = model.tensors.values()
    frame = name_frame(model.tensors, config)
    frame["shape"] = pd.Series([t.shape for t in tensors], dtype=object)
    frame["type"] = pd.Series([t.type for t in tensors], dtype=object)
    expected = frame["name"].map(_expected(model, config))
    loaded = frame["known"] & (frame["dropped"] == "")
    wrong = loaded & expected.notna() & (expected != frame["shape"])
    twice = loaded & expected.isna()
    usable = frame["type"].map({name: can_dequantize(name) for name in frame["type"].unique()})
    opaque = loaded & ~wrong & ~twice & ~usable.astype(bool)
    frame["problem"] = ""
    frame.loc[~frame["known"], "problem"] = "GLM-5 has no such tensor"
    if wrong.any():
        pairs = zip(expected[wrong], frame.loc[wrong, "shape"], strict=True)
        frame.loc[wrong, "problem"] = [
            f"expected shape {_brackets(shape)}, found {_brackets(found)}" for shape, found in pairs
        ]
    frame.loc[twice, "problem"] = (
        "not expected: layer kind or a fused tensor leaves no place for it"
    )
    frame.loc[opaque, "problem"] = "type " + frame["type"] + " cannot be dequantized here"
    return frame


def missing_tensors(model: GgufModel, config: Mapping[str, Any]) -> list[str]:
    """A sentence for each tensor that GLM-5 needs and the file lacks, or for whole blocks."""
    problems = [
        f"{name}: missing, expected shape {_brackets(shape)}"
        for name, shape in _expected(model, config).items()
        if name not in model.tensors
    ]
    found = split_names(model.tensors)["layer"].dropna().astype("int64")
    absent = np.setdiff1d(np.arange(config["num_hidden_layers"]), found)
    for run in np.split(absent, np.flatnonzero(np.diff(absent) > 1) + 1):
        if len(run) == 1:
            problems.append(f"blk.{run[0]}: missing, every tensor of it")
        elif len(run):
            problems.append(f"blk.{run[0]} to blk.{run[-1]}: missing, every tensor of them")
    return problems


def _expected(model: GgufModel, config: Mapping[str, Any]) -> dict[str, Shape]:
    """`expected_shapes` of the blocks that the file holds at least a part of."""
    layers = split_names(model.tensors)["layer"].dropna().unique()
    count = config["num_hidden_layers"]
    return expected_shapes(config, model.tensors, sorted(int(n) for n in layers if n < count))


def sentences(frame: "pd.DataFrame") -> list[str]:
    """The problems of a frame with columns name and problem, each naming its tensor."""
    rows = frame.loc[frame["problem"] != ""]
    # Not by adding columns: pandas 3.0 with pyarrow refuses to where there are no rows.
    return [f"{name}: {text}" for name, text in zip(rows["name"], rows["problem"], strict=True)]


def reconcile(model: GgufModel, config: Mapping[str, Any]) -> Reconciliation:
    """Map every tensor and list what does not fit; never raises for the file's contents."""
    frame = tensor_frame(model, config)
    return Reconciliation(mappings(frame), sentences(frame) + missing_tensors(model, config))


def require_complete(model: GgufModel, config: Mapping[str, Any]) -> Reconciliation:
    """`reconcile`, raising InputError that lists the problems (the first ten of them)."""
    result = reconcile(model, config)
    if result.problems:
        shown = "; ".join(result.problems[:LISTED])
        more = len(result.problems) - LISTED
        raise InputError(
            model.path,
            f"does not hold a complete GLM-5: {shown}" + (f"; and {more} more" if more > 0 else ""),
            "`glm5lab map` lists everything; use a complete file of architecture glm-dsa",
        )
    return result


def _brackets(shape: tuple[int, ...]) -> str:
    return str(list(shape))

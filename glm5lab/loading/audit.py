"""The proof at the end of a load: every parameter filled once and completely, every tensor used.

Each rank marks what it fills, element by element (whole rows at a time). Then the ranks compare
what they took of the file: together they must have taken all of every tensor, each part of it
either on all of them or on one, so that a rank that took another's share is found.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from glm5lab.errors import CheckError
from glm5lab.gguf.parts import Part, stack_shape, whole
from glm5lab.gguf.tensors import Tensor
from glm5lab.loading.destinations import Copy

LISTED = 20
# A box of a tensor: first and last + 1 of its matrices, rows, columns.
Box = tuple[int, int, int, int, int, int]


class Audit:
    """What one rank has filled.

    Args:
        shapes: of the model's parameters, by name.
        padded: parameters that may be larger than the file's tensors; what is left of them has
            been set to zero.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], padded: Iterable[str] = ()) -> None:
        self.shapes = dict(shapes)
        self.padded = frozenset(padded)
        self.sources: dict[str, list[Part]] = defaultdict(list)
        self._filled: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}
        self._twice: dict[str, str] = {}

    def filled(self, copy: Copy) -> None:
        """Note that a copy's box now holds its values."""
        name, (matrices, rows, columns) = copy.parameter, copy.box
        stack, height, width = stack_shape(self.shapes[name])
        marks = self._filled.get(name)
        if marks is None:
            marks = self._filled[name] = np.zeros((stack, height), bool)
        box = marks[matrices.start : matrices.stop, rows.start : rows.stop]
        outside = box.shape != (len(matrices), len(rows)) or columns > width
        if outside or (columns < width and name not in self.padded):
            raise CheckError(
                f"{copy.part.tensor.name}: {len(matrices)} x {len(rows)} x {columns} from "
                f"{matrices.start}, {rows.start} on do not fit {name} {list(self.shapes[name])}"
            )
        if box.any():
            self._twice.setdefault(name, copy.part.tensor.name)
        box[:] = True
        self.sources[name] += copy.parts

    def problems(self) -> list[str]:
        """A sentence for each parameter that was not filled once and completely."""
        found = [f"{name}: filled twice, again by {by}" for name, by in self._twice.items()]
        for name, shape in self.shapes.items():
            marks = self._filled.get(name)
            if marks is None:
                found += [f"{name}: no tensor fills it"] if prod(shape) else []
            elif not marks.all() and name not in self.padded:
                found.append(
                    f"{name}: {int((~marks).sum())} of its {marks.size} rows are not filled"
                )
        return found

    def boxes(self) -> dict[str, list[Box]]:
        """Which boxes of each tensor this rank took, those that lie together joined."""
        found: dict[str, list[Box]] = defaultdict(list)
        for parts in self.sources.values():
            for part in parts:
                found[part.tensor.name].append(_box(part))
        return {name: _joined(boxes) for name, boxes in found.items()}


def not_taken(ranks: Sequence[Mapping[str, Sequence[Box]]], tensors: Iterable[Tensor]) -> list[str]:
    """A sentence for each tensor that the ranks together did not take exactly once.

    Args:
        ranks: `Audit.boxes` of every rank.
        tensors: those that had to be loaded.
    """
    problems = []
    for tensor in tensors:
        boxes = {box for rank in ranks for box in rank.get(tensor.name, ())}
        taken = sum((b - a) * (d - c) * (f - e) for a, b, c, d, e, f in boxes)
        total = whole(tensor).elements
        if taken < total:
            problems.append(
                f"{tensor.name}: the ranks together took {taken:,} of its {total:,} numbers"
                + (", and several the same" if len(ranks) > 1 and boxes else "")
            )
        elif taken > total:
            problems.append(f"{tensor.name}: the ranks took overlapping parts of it")
    return problems


def require_none(problems: Sequence[str]) -> None:
    """Raise CheckError that lists the problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise CheckError(
            f"the load audit found {len(problems)} problems: {'; '.join(problems[:LISTED])}{more}"
        )


def _box(part: Part) -> Box:
    ranges = (part.stack, part.rows, part.columns)
    first, rows, columns = ((r.start, r.stop) for r in ranges)
    return (*first, *rows, *columns)


def _joined(boxes: list[Box]) -> list[Box]:
    """Boxes that meet along matrices or along rows, as one."""
    for axis in (2, 0):
        joined: list[Box] = []
        for box in sorted(boxes, key=lambda b: (*b[:axis], *b[axis + 2 :], b[axis])):
            last = joined[-1] if joined else None
            if (
                last
                and last[axis + 1] == box[axis]
                and last[:axis] + last[axis + 2 :] == box[:axis] + box[axis + 2 :]
            ):
                ends = list(last)
                ends[axis + 1] = box[axis + 1]
                joined[-1] = (ends[0], ends[1], ends[2], ends[3], ends[4], ends[5])
            else:
                joined.append(box)
        boxes = joined
    return boxes

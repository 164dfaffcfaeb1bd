"""The name table as text: one line a role, its layers folded into ranges."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import GgufModel, open_gguf, require_glm5
from glm5lab.loading.names import BLOCK_NAME, NameMapping
from glm5lab.loading.reconcile import Reconciliation, reconcile
from glm5lab.views.tables import ranges

HEADINGS = ("GGUF tensor", "blocks", "type", "vLLM parameter", "part", "change")


@dataclass
class FoldedRow:
    """Mappings that differ in their block number only."""

    gguf: str
    mapping: NameMapping
    layers: list[int] = field(default_factory=list)
    types: set[str] = field(default_factory=set)


def fold(mappings: Iterable[NameMapping], model: GgufModel) -> list[FoldedRow]:
    """One row for each role and destination, in the order of first appearance."""
    rows: dict[tuple[str, str], FoldedRow] = {}
    for mapping in mappings:
        match = BLOCK_NAME.fullmatch(mapping.gguf)
        gguf = match[2] if match else mapping.gguf
        row = rows.setdefault((gguf, mapping.dropped), FoldedRow(gguf, mapping))
        row.types.add(model.tensors[mapping.gguf].type)
        if match:
            row.layers.append(int(match[1]))
    return list(rows.values())


def cells(row: FoldedRow) -> tuple[str, ...]:
    """The text of one row, in the order of HEADINGS."""
    mapping = row.mapping
    vllm = mapping.vllm
    for prefix in (f"model.layers.{row.layers[0]}." if row.layers else "", "self_attn."):
        vllm = vllm.removeprefix(prefix)
    part = "" if mapping.part is None else str(mapping.part)
    types = "/".join(sorted(row.types))
    return row.gguf, ranges(row.layers), types, vllm, part, mapping.change


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return [line.rstrip() for line in lines]


def names_text(model: GgufModel, result: Reconciliation) -> str:
    """The folded table, a line of sums, and every problem."""
    kept = [cells(row) for row in fold(result.loaded, model)]
    lines = columns([HEADINGS, *kept]) if kept else []
    lines += [
        f"dropped: {row.gguf} (blocks {ranges(row.layers)}): {row.mapping.dropped}"
        if row.layers
        else f"dropped: {row.gguf}: {row.mapping.dropped}"
        for row in fold(result.dropped, model)
    ]
    targets = {mapping.vllm for mapping in result.loaded}
    lines.append(
        f"{len(model.tensors)} tensors: {len(result.loaded)} fill {len(targets)} parameters, "
        f"{len(result.dropped)} dropped for a named reason, {len(result.problems)} problems"
    )
    lines += [f"problem: {problem}" for problem in result.problems]
    return "\n".join(lines)


def map_text(file: str | Path) -> tuple[str, bool]:
    """The name table of a file, and whether everything fits.

    Raises:
        InputError: the file cannot be read or is not GLM-5.
    """
    model = open_gguf(file)
    require_glm5(model)
    result = reconcile(model, hf_config(model))
    return names_text(model, result), not result.problems

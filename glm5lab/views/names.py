"""The name table as text and JSON: one line a role, its layers folded, or one line a tensor."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5lab.errors import printable
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.kernels import gpu_here
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.reader import GgufModel, require_glm5
from glm5lab.gguf.tensors import BLOCK_NAME
from glm5lab.loading.names import split_names
from glm5lab.loading.reconcile import missing_tensors, sentences
from glm5lab.loading.table import name_table
from glm5lab.views.inspection import notes, opened
from glm5lab.views.tables import human_bytes

if TYPE_CHECKING:
    import pandas as pd

FOLDED = ("GGUF tensor", "blocks", "type", "kernel", "a rank", "vLLM parameter", "change")
UNFOLDED = ("shard", "gguf", "hf", "vllm", "part", "change", "type", "kernel")


@dataclass(frozen=True)
class NameMap:
    """A file's name table with what it was made for.

    Attributes:
        model: the open file.
        table: from `loading.table.name_table`.
        missing: a sentence for each tensor that the file lacks.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        gpu: kernels and bytes as on a GPU, or on the CPU.
    """

    model: GgufModel
    table: "pd.DataFrame"
    missing: list[str]
    tp: int = 1
    pp: int = 1
    gpu: bool = False

    @property
    def problems(self) -> list[str]:
        """Everything that does not fit, a sentence each, naming its tensor."""
        return sentences(self.table) + self.missing

    def stage_bytes(self) -> list[int]:
        """Bytes that one rank of each pipeline stage holds."""
        sums = self.table.groupby("stage")["rank_bytes"].sum()
        return [int(sums.get(stage, 0)) for stage in range(self.pp)]


def name_map(
    model: GgufModel,
    config: Mapping[str, Any] | None = None,
    tp: int = 1,
    pp: int = 1,
    gpu: bool | None = None,
) -> NameMap:
    """Map an open file's names; the arguments are those of `name_table`."""
    require_glm5(model)
    config = hf_config(model) if config is None else config
    gpu = gpu_here() if gpu is None else gpu
    table = name_table(model, config, tp, pp, gpu)
    return NameMap(model, table, missing_tensors(model, config), tp, pp, gpu)


def names_text(names: NameMap, tensors: bool = False) -> str:
    """The table, a line of sums, and every problem.

    Args:
        names: from `name_map`.
        tensors: one line a tensor, instead of one a role with its layers folded.
    """
    table = names.table
    loaded = table[table["vllm"] != ""]
    lines = unfolded(names) if tensors else folded(loaded, names.gpu)
    lines += dropped_lines(table)
    shown = names.problems if tensors else fold_sentences(names.problems)
    lines += [*summary(names), *(f"note: {note}" for note in notes(names.model))]
    lines += [f"problem: {problem}" for problem in shown]
    return "\n".join(map(printable, lines))


def folded(loaded: "pd.DataFrame", gpu: bool) -> list[str]:
    """One line for each role and destination, in the order of first appearance."""
    if loaded.empty:
        return []
    table = loaded.assign(role=split_names(loaded["gguf"])["role"].to_numpy())
    rows = [folded_cells(str(role), rows) for role, rows in table.groupby("role", sort=False)]
    lines = [dict(zip(FOLDED, row, strict=True)) for row in rows]
    # On the CPU there are no kernels to tell apart: what is quantized is dequantized.
    headings = [heading for heading in FOLDED if gpu or heading != "kernel"]
    return columns([tuple(headings), *(tuple(line[h] for h in headings) for line in lines)])


def folded_cells(role: str, rows: "pd.DataFrame") -> tuple[str, ...]:
    """The cells of one role, in the order of FOLDED; bytes of the stage that holds most."""
    layers = [int(n) for n in rows["layer"].dropna()]
    first = rows.iloc[0]
    vllm = first["vllm"]
    for prefix in (f"model.layers.{layers[0]}." if layers else "", "self_attn."):
        vllm = vllm.removeprefix(prefix)
    if first["part"]:
        vllm += f" [{first['part']}]"
    return (
        role,
        layer_ranges(layers),
        "/".join(sorted(rows["type"].unique())),
        "/".join(sorted(rows["kernel"].replace("", "none").unique())),
        human_bytes(int(rows.groupby("stage")["rank_bytes"].sum().max())),
        vllm,
        first["change"],
    )


def unfolded(names: NameMap) -> list[str]:
    """One line a tensor, dropped ones too, with a heading."""
    table = names.table
    text = table[list(UNFOLDED)].astype(str)
    for column in ("nbytes", "rank_bytes"):
        text[column] = table[column].astype(str)
    if names.pp > 1:
        text["stage"] = table["stage"].astype(str).where(table["stage"] >= 0, "")
    return columns([tuple(text.columns), *text.itertuples(index=False, name=None)])


def dropped_lines(table: "pd.DataFrame") -> list[str]:
    """One line for each reason: how many tensors of which blocks, and their bytes in the file."""
    lines = []
    for reason, rows in table[table["dropped"] != ""].groupby("dropped", sort=False):
        layers = sorted({int(n) for n in rows["layer"].dropna()})
        blocks = f" of block{'s' * (len(layers) > 1)} {layer_ranges(layers)}" if layers else ""
        what = rows["gguf"].iloc[0] if len(rows) == 1 else f"{len(rows)} tensors{blocks}"
        size = human_bytes(int(rows["nbytes"].sum()))
        lines.append(f"dropped: {what} ({size}): {reason}")
    return lines


def summary(names: NameMap) -> list[str]:
    """The sums: tensors, parameters, what is left out, and bytes a rank."""
    table = names.table
    loaded = table[table["vllm"] != ""]
    dropped = int((table["dropped"] != "").sum())
    place = "a GPU" if names.gpu else "the CPU, where everything is dequantized"
    sizes = ", ".join(human_bytes(size) for size in names.stage_bytes())
    stages = f" of the {names.pp} pipeline stages" if names.pp > 1 else ""
    return [
        f"{len(table)} tensors: {len(loaded)} fill {loaded['vllm'].nunique()} parameters, "
        f"{dropped} dropped for a named reason, {len(names.problems)} problems",
        f"a rank{stages} at tensor parallel {names.tp} holds {sizes} on {place}",
    ]


def fold_sentences(problems: Iterable[str]) -> list[str]:
    """Problems that differ in their block only, as one line with the blocks' ranges."""
    folds: dict[tuple[str, str], list[int]] = {}
    for problem in problems:
        name, _, text = problem.partition(": ")
        block = BLOCK_NAME.fullmatch(name)
        layers = folds.setdefault((block[2] if block else name, text), [])
        layers += [int(block[1])] if block else []
    return [
        f"{role} (blocks {layer_ranges(layers)}): {text}"
        if len(layers) > 1
        else f"{f'blk.{layers[0]}.' if layers else ''}{role}: {text}"
        for (role, text), layers in folds.items()
    ]


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return [line.rstrip() for line in lines]


def map_text(
    source: str | Path | GgufModel,
    tp: int = 1,
    pp: int = 1,
    tensors: bool = False,
    gpu: bool | None = None,
) -> tuple[str, bool]:
    """The name table of a file, and whether everything fits.

    Args:
        source: an open model, or where `open_gguf` finds one.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        tensors: one line a tensor.
        gpu: as on a GPU or on the CPU; None for what this machine has.

    Raises:
        InputError: the file cannot be read or is not GLM-5, or tp or pp cannot be.
    """
    names = name_map(opened(source), tp=tp, pp=pp, gpu=gpu)
    return names_text(names, tensors), not names.problems


def map_json(
    source: str | Path | GgufModel, tp: int = 1, pp: int = 1, gpu: bool | None = None
) -> tuple[dict[str, Any], bool]:
    """`map_text` as plain values: one object a tensor with the columns of `name_table`.

    Bytes are whole numbers; layer is null outside the blocks, stage null where dropped.
    """
    names = name_map(opened(source), tp=tp, pp=pp, gpu=gpu)
    table = names.table.astype(object)
    table["shape"] = table["shape"].map(list)
    table["layer"] = table["layer"].where(table["layer"].notna(), None)
    table["stage"] = table["stage"].where(table["stage"] >= 0, None)
    content = {
        "file": str(names.model.path),
        "shards": [shard.name for shard in names.model.shards],
        "tp": tp,
        "pp": pp,
        "device": "gpu" if names.gpu else "cpu",
        "tensors": table.to_dict("records"),
        "stage_bytes": names.stage_bytes(),
        "warnings": notes(names.model),
        "missing": names.missing,
        "problems": names.problems,
    }
    return content, not names.problems

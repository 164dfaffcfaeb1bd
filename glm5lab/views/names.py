"""The name table as text and JSON: one line a role, its layers folded, or one line a tensor."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5lab.errors import counted, printable
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.kernels import gpu_here
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.parallel import whole_experts
from glm5lab.gguf.placement import border_notes, placements, stage_layers
from glm5lab.gguf.reader import GgufModel, require_glm5
from glm5lab.gguf.stages import environment, needed_partition, shared_starts
from glm5lab.gguf.tensors import BLOCK_NAME
from glm5lab.loading.names import split_names
from glm5lab.loading.reconcile import missing_tensors, sentences
from glm5lab.loading.table import name_table
from glm5lab.views.inspection import notes, opened, shards_json
from glm5lab.views.tables import human_bytes
from glm5lab.views.text import table_lines, terminal_width, wrapped

if TYPE_CHECKING:
    import pandas as pd

FOLDED = ("GGUF tensor", "blocks", "type", "kernel", "a rank", "vLLM parameter", "change")
UNFOLDED = ("shard", "name", "hf", "vllm", "part", "change", "type", "kernel")


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
        partition: layers a stage where vLLM's own division will not do.
        stages: why it will not do.
        expert_parallel: whether ranks hold whole experts.
    """

    model: GgufModel
    table: "pd.DataFrame"
    missing: list[str]
    tp: int = 1
    pp: int = 1
    gpu: bool = False
    partition: tuple[int, ...] | None = None
    stages: tuple[str, ...] = ()
    expert_parallel: bool = False

    @property
    def problems(self) -> list[str]:
        """Everything that does not fit, a sentence each, naming its tensor or stage."""
        found = sentences(self.table) + self.missing
        return found if self.partition else [*found, *self.stages]

    @property
    def notes(self) -> list[str]:
        """What is odd about the file, what its stages need, and what its ranks hold."""
        found = notes(self.model)
        for variable, value in environment(self.partition).items():
            why = f"vLLM's own division will not do, {'; '.join(self.stages)}"
            found.append(f"set {variable}={value}, which is counted here: {why}")
        if self.expert_parallel:
            found.append("whole experts a rank (--enable-expert-parallel) are counted here")
        columns = self.table[["name", "type", "rank_bytes", "border_bytes"]]
        return found + border_notes(columns.itertuples(index=False, name=None))

    def counts(self) -> dict[str, int]:
        """Numbers of tensors, of those that are loaded or dropped, of parameters and problems."""
        loaded = self.table[self.table["vllm"] != ""]
        return {
            "tensors": len(self.table),
            "loaded": len(loaded),
            "parameters": int(loaded["vllm"].nunique()),
            "dropped": int((self.table["dropped"] != "").sum()),
            "problems": len(self.problems),
        }

    def stage_bytes(self) -> list[int]:
        """Bytes that one rank of each pipeline stage holds."""
        sums = self.table.groupby("stage")["rank_bytes"].sum().to_dict()
        return [int(sums.get(stage, 0)) for stage in range(self.pp)]


def name_map(
    model: GgufModel,
    config: Mapping[str, Any] | None = None,
    tp: int = 1,
    pp: int = 1,
    gpu: bool | None = None,
    expert_parallel: bool | None = None,
) -> NameMap:
    """Map an open file's names; the arguments are those of `name_table`.

    Where `expert_parallel` is None, GPUs hold whole experts where `glm5lab plan` proposes it.
    """
    require_glm5(model)
    config = hf_config(model) if config is None else config
    gpu = gpu_here() if gpu is None else gpu
    if expert_parallel is None:
        expert_parallel = gpu and whole_experts(placements(model, config, tp, pp))
    partition = needed_partition(model, config, tp, pp, gpu, expert_parallel)
    table = name_table(model, config, tp, pp, gpu, partition, expert_parallel)
    stages = tuple(shared_starts(config, stage_layers(config["num_hidden_layers"], pp)))
    missing = missing_tensors(model, config)
    stages = stages if pp > 1 else ()
    return NameMap(model, table, missing, tp, pp, gpu, partition, stages, expert_parallel)


def names_text(names: NameMap, tensors: bool = False, width: int | None = None) -> str:
    """The table, a line of sums, and every problem.

    Args:
        names: from `name_map`.
        tensors: one line a tensor, however long, instead of one a role with its layers folded.
        width: columns; the terminal's when None.
    """
    table, width = names.table, width or terminal_width()
    loaded = table[table["vllm"] != ""]
    lines = unfolded(names) if tensors else folded(loaded, names.gpu, width)
    shown = names.problems if tensors else fold_sentences(names.problems)
    prose = [*dropped_lines(table), *summary(names), *(f"note: {note}" for note in names.notes)]
    for line in [*prose, *(f"problem: {problem}" for problem in shown)]:
        lines += wrapped(printable(line), width)
    return "\n".join(lines)


def folded(loaded: "pd.DataFrame", gpu: bool, width: int) -> list[str]:
    """One line for each role and destination, in the order of first appearance."""
    if loaded.empty:
        return []
    table = loaded.assign(role=split_names(loaded["name"])["role"].to_numpy())
    rows = [folded_cells(str(role), rows) for role, rows in table.groupby("role", sort=False)]
    lines = [dict(zip(FOLDED, row, strict=True)) for row in rows]
    # On the CPU there are no kernels to tell apart: what is quantized is dequantized.
    headings = [heading for heading in FOLDED if gpu or heading != "kernel"]
    cells = (tuple(printable(line[h]) for h in headings) for line in lines)
    return table_lines([tuple(headings), *cells], width, whole=("a rank",))


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
    rows = text.itertuples(index=False, name=None)
    return table_lines([tuple(text.columns), *(tuple(map(printable, row)) for row in rows)])


def dropped_lines(table: "pd.DataFrame") -> list[str]:
    """One line for each reason: how many tensors of which blocks, and their bytes in the file."""
    lines = []
    for reason, rows in table[table["dropped"] != ""].groupby("dropped", sort=False):
        layers = sorted({int(n) for n in rows["layer"].dropna()})
        blocks = f" of block{'s' * (len(layers) > 1)} {layer_ranges(layers)}" if layers else ""
        what = rows["name"].iloc[0] if len(rows) == 1 else f"{len(rows)} tensors{blocks}"
        size = human_bytes(int(rows["nbytes"].sum()))
        lines.append(f"dropped: {what} ({size}): {reason}")
    return lines


def summary(names: NameMap) -> list[str]:
    """The sums: tensors, parameters, what is left out, and bytes a rank."""
    count = names.counts()
    place = "a GPU" if names.gpu else "the CPU, where everything is dequantized"
    sizes = ", ".join(human_bytes(size) for size in names.stage_bytes())
    stages = f" of the {names.pp} pipeline stages" if names.pp > 1 else ""
    return [
        f"{counted(count['tensors'], 'tensor')}: {count['loaded']:,} fill "
        f"{counted(count['parameters'], 'parameter')}, {count['dropped']:,} dropped for a named "
        f"reason, {counted(count['problems'], 'problem')}",
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


def map_text(
    source: str | Path | GgufModel,
    tp: int = 1,
    pp: int = 1,
    tensors: bool = False,
    gpu: bool | None = None,
    width: int | None = None,
    expert_parallel: bool | None = None,
) -> tuple[str, bool]:
    """The name table of a file, and whether everything fits.

    Args:
        source: an open model, or where `open_gguf` finds one.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        tensors: one line a tensor.
        gpu: as on a GPU or on the CPU; None for what this machine has.
        width: columns; the terminal's when None.
        expert_parallel: whole experts a rank; None for what `glm5lab plan` proposes.

    Raises:
        InputError: the file cannot be read or is not GLM-5, or tp or pp cannot be.
    """
    names = name_map(opened(source), None, tp, pp, gpu, expert_parallel)
    return names_text(names, tensors, width), not names.problems


def map_json(
    source: str | Path | GgufModel,
    tp: int = 1,
    pp: int = 1,
    gpu: bool | None = None,
    expert_parallel: bool | None = None,
) -> tuple[dict[str, Any], bool]:
    """`map_text` as plain values: one object a tensor with the columns of `name_table`.

    Bytes are whole numbers; layer is null outside the blocks, stage null where dropped.
    """
    names = name_map(opened(source), None, tp, pp, gpu, expert_parallel)
    table = names.table.astype(object)
    table["shape"] = table["shape"].map(list)
    table["layer"] = table["layer"].where(table["layer"].notna(), None)
    table["stage"] = table["stage"].where(table["stage"] >= 0, None)
    content = {
        "file": str(names.model.path),
        "shards": shards_json(names.model),
        "tp": tp,
        "pp": pp,
        "device": "gpu" if names.gpu else "cpu",
        "expert_parallel": names.expert_parallel,
        "tensors": table.to_dict("records"),
        "counts": names.counts(),
        "stage_bytes": names.stage_bytes(),
        "environment": environment(names.partition),
        "warnings": names.notes,
        "missing": names.missing,
        "problems": names.problems,
    }
    return content, not names.problems

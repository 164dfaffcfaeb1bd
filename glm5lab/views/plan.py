"""The plan as text and as JSON: does a file fit on some GPUs, and how."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5lab.errors import counted, printable
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.memory import GIB, KV_DTYPES, index_row_bytes, kv_row_bytes
from glm5lab.gguf.parallel import Split
from glm5lab.gguf.plan import Plan, borders, dequantized_types, make_plan
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.reconcile import sentences
from glm5lab.views.inspection import notes, opened
from glm5lab.views.names import fold_sentences, name_map
from glm5lab.views.tables import human_bytes
from glm5lab.views.text import GAP, command_lines, table_lines, terminal_width, wrapped

SHOWN_SPLITS, SHOWN_STAGES, SHOWN_PROBLEMS = 8, 16, 3
STAGE_ROWS = (
    *("a rank of", "layers", "of these with an indexer"),
    *("weights, quantized", "weights, plain", "workspace (estimate)", "left for the cache"),
)
CONTEXT_RANKS = (
    "dcp needs an attention backend with context parallelism: TRITON_MLA_SPARSE has it, and has "
    "been run with dcp 2 on two H200s"
)


def make_checked_plan(model: GgufModel, gpus: int, gpu_memory: float, **options: Any) -> Plan:
    """`make_plan`, with all that `glm5lab map --device gpu` refuses among the problems."""
    plan = make_plan(model, gpus, gpu_memory, **options)
    names = name_map(model, plan.config, gpu=True)
    # A type without a kernel is a problem of the plan already, told once for all its tensors.
    told = (names.table["kernel"] == "") & (names.table["vllm"] != "")
    refused = fold_sentences(sentences(names.table[~told]) + names.missing)
    return replace(plan, problems=(*plan.problems, *refused))


def plan_notes(model: GgufModel, plan: Plan) -> list[str]:
    """What the sums do not say: limits of this version, oddities of the file."""
    found = [*notes(model), *dequantized_types(model, plan.config), *borders(model, plan)]
    return found + ([CONTEXT_RANKS] if plan.best.dcp > 1 else [])


def plan_text(
    source: str | Path | GgufModel,
    gpus: int,
    gpu_memory: float,
    width: int | None = None,
    **options: Any,
) -> tuple[str, bool]:
    """What `glm5lab plan` prints, and whether the model fits.

    Args:
        source: any shard, folder or address of a GLM-5, or an open model.
        gpus: number of GPUs.
        gpu_memory: GiB of each.
        width: columns; the terminal's when None.
        options: further arguments of `make_plan`.

    Raises:
        InputError: the file cannot be read or is not GLM-5, or an argument is out of range.
    """
    model, width = opened(source), width or terminal_width()
    plan = make_checked_plan(model, gpus, gpu_memory, **options)
    lines = [*prose([headline(plan)], width), *verdict(plan, width)]
    lines += ["", *stage_lines(plan, width), "", *prose(cache_lines(plan), width)]
    lines += ["", *split_lines(plan, width)]
    lines += prose([f"note: {note}" for note in plan_notes(model, plan)], width)
    return "\n".join(lines), plan.fits


def prose(lines: Sequence[str], width: int) -> list[str]:
    """Sentences as lines that fit."""
    return [part for line in lines for part in wrapped(printable(line), width)]


def headline(plan: Plan) -> str:
    """The file, and what the GPUs offer."""
    card = plan.card
    plural = "s" * (plan.gpus > 1)
    return (
        f"{plan.model} on {plan.gpus} GPU{plural} of {card.memory_gib:g} GiB, of which vLLM takes "
        f"{card.utilization * 100:.4g}%: {gib(card.budget)} each"
    )


def verdict(plan: Plan, width: int) -> list[str]:
    """Yes, with the command to type; or no, and whether file, split or memory is the reason."""
    best = plan.best
    if plan.problems:
        more = len(plan.problems) - SHOWN_PROBLEMS
        shown = [*plan.problems[:SHOWN_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        lists = "`glm5lab map FILE --device gpu` lists everything"
        return prose([f"vLLM cannot run this file: {'; '.join(shown)}; {lists}"], width)
    missing = f"{gib(best.caches[0].missing)} are missing on each GPU"
    if best.problems:
        count = len(plan.splits)
        what = "the split is" if count == 1 else f"all {count} splits are"
        memory = f"; besides, {missing}" if best.caches[0].missing else ""
        why = "; ".join(best.problems) + memory
        fix = "name another --tp, --pp or --dcp, or leave them out"
        return prose(
            [f"no: {what} impossible, whatever the memory: {best.shape}: {why}; {fix}"], width
        )
    if not plan.fits:
        stages = "" if best.pp == 1 else " of the fullest stage"
        asked = f"a context of {best.caches[0].context:,} tokens"
        line = f"does not fit with {asked}: in the best split ({name(best)}) {missing}{stages}"
        return prose([line], width)
    words = [f"{key}={value}" for key, value in best.environment.items()]
    words += ["vllm", "serve", "FILE", *best.options(plan.card)]
    return [*prose([f"fits: {name(best)}"], width), *command_lines(words, width)]


def name(split: Split) -> str:
    """What distinguishes a split: tp 4, pp 2, layers 40+38."""
    return ", ".join([split.shape, *traits(split)])


def traits(split: Split) -> list[str]:
    """What is unusual about a split."""
    found = ["whole experts a rank"] if split.expert_parallel else []
    return found + ([f"layers {'+'.join(map(str, split.partition))}"] if split.partition else [])


def stage_lines(plan: Plan, width: int) -> list[str]:
    """The best split's bytes a rank, one column a stage; as many blocks as fit beside each other.

    The first stages only, and how many more there are.
    """
    best, budget = plan.best, plan.card.budget
    columns = [(*STAGE_ROWS, *(f"bytes a token, {kind}" for kind in KV_DTYPES))]
    pairs = list(zip(best.stages, best.workspaces, strict=True))
    for number, (stage, space) in enumerate(pairs[:SHOWN_STAGES]):
        columns.append((
            "each GPU" if best.pp == 1 else f"stage {number}",
            layer_ranges(stage.layers),
            str(stage.indexers),
            *map(signed, (stage.packed, stage.plain, space.total)),
            signed(budget - stage.weights - space.total),
            *(f"{stage.token_bytes(plan.config, kind):,}" for kind in KV_DTYPES),
        ))  # fmt: skip
    label, *stages = columns
    widest = max(len(cell) for stage in stages for cell in stage)
    block = max(1, (width - max(map(len, label))) // (GAP + widest))
    lines = []
    for start in range(0, len(stages), block):
        shown = stages[start : start + block]
        rows = list(zip(label, *shown, strict=True))
        lines += ["", *table_lines(rows, width, whole=[stage[0] for stage in shown])]
    more = len(pairs) - len(stages)
    return [*lines[1:], *([f"and {counted(more, 'more stage')}, see --json"] if more > 0 else [])]


def cache_lines(plan: Plan) -> list[str]:
    """How the bytes of a token come about in each row format, and how many tokens fit."""
    config, best = plan.config, plan.best
    index, stage = index_row_bytes(config), best.stages[0]
    dcp = f", divided by dcp {best.dcp}" if best.dcp > 1 else ""
    lines = []
    for cache in best.caches:
        row = kv_row_bytes(config, cache.kv_dtype)
        sums = f"a stage's layers + index keys {index} x its indexers a token"
        if best.pp == 1:
            total = stage.token_bytes(config, cache.kv_dtype)
            sums = f"{len(stage.layers)} layers + index keys {index} x {stage.indexers}"
            sums += f" = {total:,} bytes a token"
        line = f"{cache.kv_dtype}: {row} bytes x {sums}, not divided by tp{dcp}"
        if not best.problems:
            place = " on the fullest stage" if best.pp > 1 else ""
            line += f": {cache.tokens:,} tokens{place}, "
            line += f"the longest request {min(cache.context, cache.tokens):,}"
        lines.append(line)
    return lines


def split_lines(plan: Plan, width: int) -> list[str]:
    """The ranked splits as a table; no tokens where a split cannot be."""
    numbers = ("tp", "pp", "dcp", "a rank", *KV_DTYPES)
    rows: list[tuple[str, ...]] = [(*numbers, "")]
    for split in plan.splits[:SHOWN_SPLITS]:
        tokens = {c.kv_dtype: "-" if split.problems else f"{c.tokens:,}" for c in split.caches}
        missing = split.caches[0].missing
        lacks = [f"lacks {gib(missing)}"] if missing and not split.problems else []
        rows.append(
            (
                *map(str, (split.tp, split.pp, split.dcp)),
                signed(split.used),
                *(tokens[kind] for kind in KV_DTYPES),
                printable("; ".join([*split.problems, *lacks, *traits(split)])),
            )
        )
    more = len(plan.splits) - SHOWN_SPLITS
    title = "splits, best first (tokens of cache by row format)"
    rest = [f"and {counted(more, 'more split')}, see --json"] if more > 0 else []
    return [*prose([title], width), *table_lines(rows, width, whole=numbers), *rest]


def gib(count: float) -> str:
    """1 << 30 -> "1.0 GiB"."""
    return f"{count / GIB:.1f} GiB"


def signed(count: int) -> str:
    """Bytes in the largest fitting unit, negative ones too."""
    return f"-{human_bytes(-count)}" if count < 0 else human_bytes(count)


def plan_json(
    source: str | Path | GgufModel, gpus: int, gpu_memory: float, **options: Any
) -> tuple[dict[str, Any], bool]:
    """The whole plan as plain values (bytes, tokens), and whether the model fits.

    Args and errors as `plan_text`.
    """
    model = opened(source)
    plan = make_checked_plan(model, gpus, gpu_memory, **options)
    config, best = plan.config, plan.best
    return {
        "file": str(model.path),
        "gpus": plan.gpus,
        "gpu_memory_gib": plan.card.memory_gib,
        "utilization": plan.card.utilization,
        "budget_bytes": plan.card.budget,
        "context": plan.context,
        "fits": plan.fits,
        "missing_gib": round(plan.missing_gib, 3),
        "reasons": [*plan.problems, *best.problems],
        "notes": plan_notes(model, plan),
        "row_bytes": {kind: kv_row_bytes(config, kind) for kind in KV_DTYPES},
        "index_row_bytes": index_row_bytes(config),
        "splits": [split_json(split, plan) for split in plan.splits],
    }, plan.fits


def split_json(split: Split, plan: Plan) -> dict[str, Any]:
    """One split as plain values."""
    config, runs = plan.config, not (plan.problems or split.problems)
    stages = [
        {
            "layers": [stage.layers[0], stage.layers[-1]],
            "packed_bytes": stage.packed,
            "dequantized_bytes": stage.plain,
            "workspace_bytes": space.total,
            "workspace": vars(space),
            "token_bytes": {kind: stage.token_bytes(config, kind) for kind in KV_DTYPES},
        }
        for stage, space in zip(split.stages, split.workspaces, strict=True)
    ]
    caches = {
        cache.kv_dtype: {
            "fits": runs and cache.fits,
            "tokens": cache.tokens,
            "context": cache.context,
            "missing_bytes": cache.missing,
        }
        for cache in split.caches
    }
    return {
        "tp": split.tp,
        "pp": split.pp,
        "dcp": split.dcp,
        "expert_parallel": split.expert_parallel,
        "partition": split.partition and list(split.partition),
        "fits": runs and split.fits,
        "problems": list(split.problems),
        "stages": stages,
        "cache": caches,
        "vllm_options": split.options(plan.card),
        "environment": split.environment,
    }

"""The plan as text and as JSON: does a file fit on some GPUs, and how."""

from pathlib import Path
from typing import Any

from glm5lab.errors import printable
from glm5lab.gguf.memory import GIB, KV_DTYPES, index_row_bytes, kv_row_bytes
from glm5lab.gguf.parallel import Split
from glm5lab.gguf.plan import Plan, make_plan
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.reconcile import missing_tensors
from glm5lab.views.inspection import notes, opened
from glm5lab.views.names import columns
from glm5lab.views.tables import human_bytes

SHOWN_SPLITS = 8
DEQUANTIZES = (
    "weights are counted as vllm-gguf-plugin keeps them; this version's loader still dequantizes, "
    "and needs far more for a quantized file"
)
FP8_ROWS = (
    "fp8_ds_mla rows need an attention backend that takes them; this version's TRITON_MLA_SPARSE "
    "keeps bf16 rows only"
)
CONTEXT_RANKS = (
    "dcp needs an attention backend with context parallelism; this version's TRITON_MLA_SPARSE "
    "has none"
)


def plan_notes(model: GgufModel, plan: Plan) -> list[str]:
    """What the sums do not say: limits of this version, oddities of the file, missing tensors."""
    found = [*notes(model), DEQUANTIZES, FP8_ROWS]
    found += [CONTEXT_RANKS] if plan.best.dcp > 1 else []
    missing = missing_tensors(model, plan.config)
    if missing:
        found.append(f"{missing[0]} ({len(missing)} such lines by `glm5lab map`): counted without")
    return found


def plan_text(
    source: str | Path | GgufModel, gpus: int, gpu_memory: float, **options: Any
) -> tuple[str, bool]:
    """What `glm5lab plan` prints, and whether the model fits.

    Args:
        source: any shard, folder or address of a GLM-5, or an open model.
        gpus: number of GPUs.
        gpu_memory: GiB of each.
        options: further arguments of `make_plan`.

    Raises:
        InputError: the file cannot be read or is not GLM-5, or an argument is out of range.
    """
    model = opened(source)
    plan = make_plan(model, gpus, gpu_memory, **options)
    lines = [headline(plan), *verdict(plan), "", *stage_lines(plan), "", *cache_lines(plan)]
    lines += ["", *split_lines(plan), *(f"note: {note}" for note in plan_notes(model, plan))]
    return "\n".join(map(printable, lines)), plan.fits


def headline(plan: Plan) -> str:
    """The file, and what the GPUs offer."""
    card = plan.card
    plural = "s" * (plan.gpus > 1)
    return (
        f"{plan.model} on {plan.gpus} GPU{plural} of {card.memory_gib:g} GiB, of which vLLM takes "
        f"{card.utilization * 100:.4g}%: {gib(card.budget)} each"
    )


def verdict(plan: Plan) -> list[str]:
    """Yes with the options that do it, or no with what is missing."""
    best = plan.best
    if plan.problems:
        fix = "use a file of other types, `glm5lab map` lists them"
        return [f"vLLM cannot run this file: {'; '.join(plan.problems)}; {fix}"]
    if not plan.fits:
        why = "; ".join(best.problems) or f"{gib(best.caches[0].missing)} are missing on each GPU"
        stages = "" if best.pp == 1 else " of the fullest stage"
        asked = f"a context of {best.caches[0].context:,} tokens"
        return [f"does not fit with {asked}: in the best split ({name(best)}) {why}{stages}"]
    words = [f"{key}={value}" for key, value in best.environment.items()]
    return [
        f"fits: {name(best)}",
        f"  {' '.join([*words, 'vllm serve FILE', *best.options(plan.card)])}",
    ]


def name(split: Split) -> str:
    """What distinguishes a split: tp 4, pp 2."""
    words = [f"tp {split.tp}"]
    words += [f"pp {split.pp}"] if split.pp > 1 else []
    words += [f"dcp {split.dcp}"] if split.dcp > 1 else []
    return ", ".join([*words, *traits(split)])


def traits(split: Split) -> list[str]:
    """What is unusual about a split."""
    found = ["whole experts a rank"] if split.expert_parallel else []
    return found + ([f"layers {'+'.join(map(str, split.partition))}"] if split.partition else [])


def stage_lines(plan: Plan) -> list[str]:
    """The best split's bytes a rank, one column a stage (at most 8)."""
    best, budget = plan.best, plan.card.budget
    shown = list(zip(best.stages, best.workspaces, strict=True))[:8]
    left = [budget - stage.weights - space.total for stage, space in shown]
    titles = ["each GPU" if best.pp == 1 else f"stage {n}" for n in range(len(shown))]
    layers = [f"{s.layers[0]}-{s.layers[-1]}" for s, _ in shown]
    rows = [
        ("a rank of", *titles),
        ("layers", *layers),
        ("weights, quantized", *(signed(s.packed) for s, _ in shown)),
        ("weights, plain", *(signed(s.plain) for s, _ in shown)),
        ("workspace (estimate)", *(signed(w.total) for _, w in shown)),
        ("left for the cache", *(signed(n) for n in left)),
    ]
    return columns(rows)


def cache_lines(plan: Plan) -> list[str]:
    """Bytes of a token in each row format, and how many tokens fit."""
    config, best = plan.config, plan.best
    index = index_row_bytes(config)
    layers, indexers = config["num_hidden_layers"], sum(s.indexers for s in best.stages)
    lines = []
    for cache in best.caches:
        row = kv_row_bytes(config, cache.kv_dtype)
        lines.append(
            f"{cache.kv_dtype}: {row} bytes x {layers} layers + index keys {index} x {indexers} = "
            f"{row * layers + index * indexers:,} bytes a token, not divided by tp: "
            f"{cache.tokens:,} tokens, the longest request {min(cache.context, cache.tokens):,}"
        )
    return lines


def split_lines(plan: Plan) -> list[str]:
    """The ranked splits as a table."""
    rows: list[tuple[str, ...]] = [("tp", "pp", "dcp", "a rank", *KV_DTYPES, "")]
    for split in plan.splits[:SHOWN_SPLITS]:
        tokens = {cache.kv_dtype: f"{cache.tokens:,}" for cache in split.caches}
        missing = split.caches[0].missing
        lacks = [f"lacks {gib(missing)}"] if missing and not split.problems else []
        rows.append(
            (
                *map(str, (split.tp, split.pp, split.dcp)),
                signed(split.used),
                *(tokens[kind] for kind in KV_DTYPES),
                "; ".join([*split.problems, *lacks, *traits(split)]),
            )
        )
    more = len(plan.splits) - SHOWN_SPLITS
    title = "splits, best first (tokens of cache by row format)"
    return [title, *columns(rows), *([f"and {more} more"] if more > 0 else [])]


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
    plan = make_plan(model, gpus, gpu_memory, **options)
    config, best = plan.config, plan.best
    return {
        "file": plan.model,
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

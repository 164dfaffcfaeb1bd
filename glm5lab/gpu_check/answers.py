"""Answers of TRITON_MLA_SPARSE beside those of vLLM's own backends: `glm5lab backends answers`."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from glm5lab.attention.compile import MODULES
from glm5lab.cuda_device import require_cuda
from glm5lab.errors import CheckError, InputError, counted
from glm5lab.gpu_check.cases import CASES, LENGTHS, PAIRS, EngineCase
from glm5lab.gpu_check.compare import (
    Difference,
    as_dicts,
    differences,
    line,
    pooled_mean,
    spread,
)
from glm5lab.gpu_check.machine import machine
from glm5lab.gpu_check.model import DESCRIPTION, write_model
from glm5lab.gpu_check.run import run_cases, visible_gpus
from glm5lab.json_output import require_writable, write_json

# Ours may be this much further from a native backend than two native comparisons are apart: each
# is a mean over some 40,000 tokens, of which a few per cent change an expert or a key.
BOUND = 1.1
# Without log-probabilities of the prompts: where they are asked for, vLLM leaves the cache aside.
AGAIN = "again from the cache"
# What one has to know to read the figures; they go into the file with them.
REMARKS = (
    "Prompts of more than 128 tokens that are no longer than the top-k attend densely in every "
    "backend of vLLM: in the same batch on one GPU their log-probabilities are equal.",
    "vLLM's own indexer chooses among near-ties anew in every run; with the Triton indexer a "
    "repeated prompt gives the same log-probabilities.",
    "HF (transformers, bfloat16 and float32) keeps index keys unrounded, vLLM in fp8: of long "
    "prompts they select other rows, in native backends as in ours.",
    "Engines share GPUs and start at once, so started_s is not a start's usual time.",
)


def check_answers(
    work: Path,
    names: Sequence[str] | None,
    at_once: int,
    timeout_s: float,
    out: Path | None,
    echo: Callable[[str], None],
) -> None:
    """Run the cases, print every comparison, write all figures.

    Args:
        work: folder for models, answers and logs.
        names: of the cases; None for all.
        at_once: engines side by side on the GPU.
        timeout_s: seconds an engine may take.
        out: JSON file, or None.
        echo: where lines go.

    Raises:
        CheckError: an engine failed, or ours is further from vLLM's than those are apart.
        InputError: there is no CUDA device, no case or none that fits, or the file cannot be
            written.
    """
    require_cuda("backends answers")
    require_writable(out)
    cases = fitting(chosen(names), len(visible_gpus()), echo)
    kinds = sorted({case.kind for case in cases})
    models = {kind: write_model(work / f"model-{kind}", kind) for kind in kinds}
    found = run_cases(cases, models, work, at_once, timeout_s, echo=echo)
    report = compared(cases, found, echo)
    facts = {"model": DESCRIPTION, "at_once": at_once, "gpus": len(visible_gpus())}
    document = machine("glm5lab backends answers") | facts | {"remarks": list(REMARKS)}
    write_json(out, document | report)
    if report["wrong"]:
        raise CheckError("; ".join(report["wrong"]))


def chosen(names: Sequence[str] | None) -> list[EngineCase]:
    """The cases of these names; of None all.

    Raises:
        InputError: there is no name, or no case of one.
    """
    if names is None:
        return list(CASES)
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        cause = f"no case is called {unknown[0]!r}" if unknown else "names no case"
        raise InputError("--only", cause, f"there are {', '.join(known)}")
    return [known[name] for name in names]


def fitting(
    cases: Sequence[EngineCase], gpus: int, echo: Callable[[str], None]
) -> list[EngineCase]:
    """The cases for which there are GPUs enough; the others are named.

    Raises:
        InputError: there is none.
    """
    for case in cases:
        if case.gpus > gpus:
            echo(f"{case.name}: left out, it takes {case.gpus} GPUs and there are {gpus}")
    kept = [case for case in cases if case.gpus <= gpus]
    if not kept:
        least = min(case.gpus for case in cases)
        cause = f"no case fits, they take {counted(least, 'GPU')} or more and there are {gpus}"
        raise InputError("--only", cause, "choose others, or run it where there are more GPUs")
    return kept


def compared(
    cases: Sequence[EngineCase], found: dict[str, dict[str, Any]], echo: Callable[[str], None]
) -> dict[str, Any]:
    """Every comparison that the answers allow, what compiled while serving, and what is wrong."""
    rows: dict[str, list[Difference]] = {}
    for name, (a, b, _) in PAIRS.items():
        if all("alone" in found.get(case, {}) for case in (a, b)):
            rows[name] = differences(LENGTHS, found[a]["alone"], found[b]["alone"])
    for case in cases:
        answer = found[case.name]
        if "together" in answer:
            together = differences(LENGTHS, answer["alone"], answer["together"])
            rows[f"{case.name}, alone and together"] = together
        if "awake" in answer:
            awake = differences(LENGTHS, answer["alone"], answer["awake"])
            rows[f"{case.name}, before and after"] = awake
        if "again" in answer:
            first, second = answer["again"]
            rows[f"{case.name}, {AGAIN}"] = differences(LENGTHS, first, second)
    for name, table in rows.items():
        for row in table:
            echo(line(name, row))
    unjudged = [name for name in rows if absent(bounds_of(name), rows)]
    for name in unjudged:
        echo(f"{name}: not judged, as {' and '.join(absent(bounds_of(name), rows))} did not run")
    serving = {name: serving_facts(answer) for name, answer in found.items()}
    for name, facts in serving.items():
        echo(f"{name}: {facts}")
    return {
        "differences": {name: as_dicts(table) for name, table in rows.items()},
        "mean": {name: pooled_mean(table) for name, table in rows.items()},
        "engines": serving,
        "unjudged": unjudged,
        "wrong": wrong(rows, serving),
    }


def serving_facts(answer: dict[str, Any]) -> dict[str, Any]:
    """What an engine shows besides its answers: start, kernels compiled late, cached tokens."""
    if "error" in answer:
        return {"error": answer["error"]}
    ours = [text for text in answer["compiled"] if is_ours(text)]
    facts = {
        "started_s": round(answer["started_s"], 1),
        "compiled_while_serving": len(answer["compiled"]),
        "of_these_ours": len(ours),
    }
    if "again" in answer:
        facts["cached"] = [entry["cached"] for entry in answer["again"][1]]
    return facts


def is_ours(text: str) -> bool:
    """Whether a line of vLLM's JIT monitor is about a kernel of glm5lab."""
    return any(f": {name} " in text for name in kernel_names())


@cache
def kernel_names() -> tuple[str, ...]:
    """The Triton kernels of glm5lab."""
    modules = [import_module(name) for name in MODULES]
    return tuple(name for m in modules for name in vars(m) if name.endswith("_kernel"))


def wrong(rows: dict[str, list[Difference]], serving: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each failure; empty where all holds."""
    found = [f"{name}: {facts['error']}" for name, facts in serving.items() if "error" in facts]
    for name, facts in serving.items():
        if facts.get("of_these_ours"):
            found.append(f"{name}: {facts['of_these_ours']} kernels of ours compiled while serving")
        if "cached" in facts and not any(facts["cached"]):
            found.append(f"{name}: nothing came from the prefix cache")
    for name, table in rows.items():
        bounds = bounds_of(name)
        if bounds and not absent(bounds, rows):
            found += beyond(name, table, [rows[bound] for bound in bounds], bounds)
    return found


def bounds_of(name: str) -> tuple[str, ...]:
    """The comparisons of native backends that bound one; none where it is such a one itself."""
    if name in PAIRS:
        return PAIRS[name][2]
    if not name.startswith("ours"):
        return ()
    # Of one engine with itself, in other batches or later.
    return ("natives, bf16 and fp8",) if "fp8" in name else ("natives",)


def beyond(
    name: str, table: list[Difference], native: list[list[Difference]], bounds: Sequence[str]
) -> list[str]:
    """In what a comparison of ours exceeds those of native backends: over a prompt, or at a token.

    A generated token may be as far apart as the furthest of a prompt's tokens is among the natives:
    there an expert or a key changed. What came from the cache is judged by those tokens alone.
    """
    said, found = " and ".join(map(repr, bounds)), []
    mine, spread_ = pooled_mean(table), spread(native)
    if spread_ is None or (mine is None and not name.endswith(AGAIN)):
        lacking = said if spread_ is None else name
        found.append(f"{name}: not judged, {lacking} has no log-probabilities of prompts")
    elif mine is not None and mine > BOUND * spread_:
        found.append(f"{name}: mean {mine:.4f}, where {said} has {spread_:.4f}")
    furthest = max(row.largest for rows in native for row in rows)
    for row in table:
        token = max(row.step, row.margin)
        if token > furthest:
            found.append(
                f"{name}: a token after {row.length} is {token:.2f} apart, "
                f"where {said} has {furthest:.2f} at most"
            )
    return found


def absent(bounds: Sequence[str], rows: dict[str, list[Difference]]) -> list[str]:
    """The comparisons among `bounds` whose engines did not run."""
    return [bound for bound in bounds if bound not in rows]

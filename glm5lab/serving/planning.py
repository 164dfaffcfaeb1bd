"""What a server is given on this machine: ranks, cache, context; or why the file cannot fit.

On GPUs this is `gguf.plan`'s best split for the GPUs at hand. On a CPU all weights are plain
numbers in the machine's memory.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5lab.env import Gpu, available_memory, find_gpus, memory_total
from glm5lab.errors import Glm5labError, InputError, counted
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.memory import GIB, UTILIZATION
from glm5lab.gguf.parallel import obstacles
from glm5lab.gguf.plan import MOST_GIB, Plan, make_plan
from glm5lab.gguf.reader import GgufModel
from glm5lab.serving.command import option_value
from glm5lab.serving.cpu_plan import plan_cpu

# vLLM's names of the row formats, and ours.
KV_NAMES = {"auto": "auto", "bfloat16": "bf16", "fp8_ds_mla": "fp8_ds_mla"}
UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
# Numbers of GPUs that somebody may have instead.
LARGER = (2, 4, 8, 16, 32, 64)


class NoFitError(Glm5labError):
    """The file does not fit on this machine as asked (exit code 1)."""


@dataclass(frozen=True)
class Wanted:
    """What the user asks of a layout; None leaves the choice to the plan.

    Attributes:
        gpus: GPUs a machine; given on a machine without any, it plans for others.
        gpu_memory: GiB of one, or of this machine where a CPU serves.
        tp, pp, dcp: tensor-parallel ranks, pipeline stages, context-parallel ranks.
        context: tokens of the longest request.
        kv_dtype: "auto", "bf16" or "fp8_ds_mla".
        nodes: machines of the same kind.
        options: vLLM's own, which win over the plan's.
    """

    gpus: int | None = None
    gpu_memory: float | None = None
    tp: int | None = None
    pp: int | None = None
    dcp: int | None = None
    context: int | None = None
    kv_dtype: str = "auto"
    nodes: int = 1
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Layout:
    """How a server is started.

    Attributes:
        summary: one line that says what fits where.
        platform: "cuda" or "cpu", where it is to run.
        options: of vLLM, without those that the user gave.
        environment: variables that the layout needs.
    """

    summary: str
    platform: str
    options: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def layout(model: GgufModel, platform: str, wanted: Wanted) -> Layout:
    """The layout for this machine.

    Args:
        model: an open GLM-5; its header is enough.
        platform: "cuda" or "cpu", where vLLM runs.
        wanted: the user's wishes.

    Raises:
        NoFitError: it does not fit; the message has the numbers and what would do.
        InputError: an argument contradicts another, or the file is no GLM-5.
    """
    if wanted.gpu_memory is not None and not 0 < wanted.gpu_memory < MOST_GIB:
        cause = f"{wanted.gpu_memory}: expected GiB above 0 and below {MOST_GIB:,}"
        raise InputError("--gpu-memory", cause, "change the argument")
    if platform == "cpu" and wanted.gpus is None:
        given = wanted.gpu_memory
        memory = available_memory() if given is None else int(given * GIB)
        return _cpu_layout(model, memory, wanted, simulated=given is not None)
    return _gpu_layout(model, wanted)


def visible_gpus() -> list[Gpu]:
    """The GPUs that a server may use: those of CUDA_VISIBLE_DEVICES, where it is set."""
    gpus = find_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if all(name.isdigit() and int(name) < len(gpus) for name in names):
        return [gpus[int(name)] for name in names]
    return gpus[: len(names)]  # by UUID: as many as are named


def tokens(text: str | None) -> int | None:
    """A count as vLLM takes it ("32768", "32k", "32K"); None for "auto", -1 and none at all."""
    number, factor = text or "", 1
    if number[-1:] in UNITS:
        number, factor = number[:-1], UNITS[number[-1]]
    try:
        return int(float(number) * factor) if float(number) > 0 else None
    except ValueError:
        return None


def _count(given: int | None, options: Sequence[str], *names: str) -> int | None:
    """A number that is asked for by our option or by vLLM's."""
    if given is not None:
        if option_value(options, *names) is not None:
            raise InputError(names[0], "is given on both sides of `--`", "leave one out")
        return given
    return tokens(option_value(options, *names))


def _share(text: str | None) -> float:
    try:
        return UTILIZATION if text is None else float(text)
    except ValueError:
        name = "--gpu-memory-utilization"
        raise InputError(name, f"{text!r} is no number", "give a part such as 0.9") from None


def _gpu_layout(model: GgufModel, wanted: Wanted) -> Layout:
    gpus, options = visible_gpus(), wanted.options
    if not gpus and (wanted.gpus is None or wanted.gpu_memory is None):
        raise InputError("--gpus", "no GPU is here to be asked", "give --gpus and --gpu-memory")
    count = (wanted.gpus or len(gpus)) * wanted.nodes
    memory = wanted.gpu_memory
    if memory is None:
        # GB10 shares the machine's memory and reports none of its own.
        memory = min(gpu.memory_mib / 1024 or memory_total() / GIB for gpu in gpus)
    kv_name = option_value(options, "--kv-cache-dtype")
    kv_dtype = wanted.kv_dtype if kv_name is None else KV_NAMES.get(kv_name, "auto")
    share = _share(option_value(options, "--gpu-memory-utilization"))
    arguments: dict[str, Any] = {
        "tp": _count(wanted.tp, options, "--tensor-parallel-size", "-tp"),
        "pp": _count(wanted.pp, options, "--pipeline-parallel-size", "-pp"),
        "dcp": _count(wanted.dcp, options, "--decode-context-parallel-size", "-dcp"),
        "context": _count(wanted.context, options, "--max-model-len"),
        "utilization": share,
    }
    plan = make_plan(model, count, memory, kv_dtype=kv_dtype, **arguments)
    if kv_dtype == "auto" and not plan.fits:
        smaller = make_plan(model, count, memory, kv_dtype="fp8_ds_mla", **arguments)
        plan = smaller if smaller.fits else plan
    if not plan.fits:
        raise NoFitError(_refusal(model, plan, memory, kv_dtype, arguments))
    split = plan.best
    if wanted.nodes > 1:
        # Tensor-parallel ranks talk in every layer: they stay within a machine where they can.
        local = [s for s in plan.splits if s.fits and s.tp <= count // wanted.nodes]
        split = local[0] if local else split
    cache = split.caches[0]
    summary = (
        f"{model.path.name} on {counted(count, 'GPU')} of {memory:.4g} GiB: {split.shape}; "
        f"{split.used / GIB:.1f} GiB of weights and workspace on the fullest, "
        f"{cache.tokens:,} tokens of cache in {cache.kv_dtype}, requests up to {cache.context:,}"
    )
    return Layout(summary, "cuda", without(split.options(plan.card), options), split.environment)


def without(planned: Sequence[str], given: Sequence[str]) -> list[str]:
    """The plan's options but those that the user gives, whose own win."""
    short = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp"}
    short["--decode-context-parallel-size"] = "-dcp"
    kept: list[str] = []
    skip = False
    for word in planned:
        if word.startswith("--"):
            skip = option_value(given, word, short.get(word, word)) is not None
        kept += [] if skip else [word]
    return kept


def _refusal(
    model: GgufModel, plan: Plan, memory: float, kv_dtype: str, arguments: dict[str, Any]
) -> str:
    """Why the best split cannot be, in numbers, and which one could."""
    best = plan.best
    reasons = [*plan.problems, *best.problems]
    if reasons:
        return f"{model.path}: vLLM cannot run it so: {'; '.join(reasons[:3])}"
    budget, missing = plan.card.budget / GIB, plan.missing_gib
    text = (
        f"{model.path}: does not fit on {counted(plan.gpus, 'GPU')} of {memory:.4g} GiB: the best "
        f"split ({best.shape}) needs {budget + missing:.1f} GiB on the fullest for requests of "
        f"{best.caches[0].context:,} tokens, vLLM may use {budget:.1f}: "
        f"{missing:.1f} GiB are missing"
    )
    return f"{text}; {_instead(model, plan, memory, kv_dtype, arguments)}"


def _instead(
    model: GgufModel, plan: Plan, memory: float, kv_dtype: str, arguments: dict[str, Any]
) -> str:
    """What would fit: a shorter context here, or more GPUs."""

    def fits(gpus: int, **changed: Any) -> Plan | None:
        try:
            other = make_plan(model, gpus, memory, **{**arguments, "kv_dtype": kv_dtype, **changed})
        except InputError:
            return None
        return other if other.fits else None

    if arguments["context"] and (shorter := fits(plan.gpus, context=None)):
        cache = shorter.best.caches[0]
        return f"--context {cache.context} would fit there, with {cache.kv_dtype} rows"
    for gpus in (count for count in LARGER if count > plan.gpus):
        if other := fits(gpus, tp=None, pp=None):
            return f"{gpus} such GPUs would do ({other.best.shape})"
    return f"no number of such GPUs up to {LARGER[-1]} would do"


def _cpu_layout(model: GgufModel, memory: int | None, wanted: Wanted, simulated: bool) -> Layout:
    options = wanted.options
    tp = _count(wanted.tp, options, "--tensor-parallel-size", "-tp")
    pp = _count(wanted.pp, options, "--pipeline-parallel-size", "-pp") or 1
    tp = tp or max(1, wanted.nodes // pp)
    context = _count(wanted.context, options, "--max-model-len")
    config = hf_config(model)
    longest = int(config["max_position_embeddings"])
    if context is not None and context > longest:
        cause = f"context {context}: expected 1 to {longest} tokens, the model's longest"
        raise InputError(model.path, cause, "change the argument")
    if problems := obstacles(config, tp, 1, ()):
        raise NoFitError(f"{model.path}: vLLM cannot run it so: {problems[0]}")
    plan = plan_cpu(
        model,
        config,
        dtype=option_value(options, "--dtype") or "float32",
        tp=tp,
        pp=pp,
        machines=wanted.nodes,
        context=context,
        cache_bytes=tokens(option_value(options, "--kv-cache-memory-bytes")),
    )
    if memory is not None and plan.needed > memory:
        there = "--gpu-memory gives" if simulated else "free are"
        text = f"{model.path}: does not fit in memory: {plan.sums()}, {there} {memory / GIB:.2f}"
        raise NoFitError(f"{text} GiB; {plan.instead(memory)}")
    planned = plan.options()
    planned = ["--pipeline-parallel-size", str(pp), *planned] if pp > 1 else planned
    planned = ["--tensor-parallel-size", str(tp), *planned] if tp > 1 else planned
    free = "" if memory is None else f" of {memory / GIB:.1f} GiB"
    name = model.path.name
    summary = f"{name} on this CPU: {plan.sums()}{free}; requests up to {plan.context:,} tokens"
    return Layout(summary, "cpu", without(planned, options))

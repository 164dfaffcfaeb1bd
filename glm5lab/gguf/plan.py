"""Does a model fit on these GPUs, spread how, and how many tokens of cache are left.

Weights and cache rows are counted as vLLM and the loader allocate them, see `placement`.
Workspace is an estimate, see `memory.workspace`. A file's header is all that is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from glm5lab.errors import InputError, counted
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.kernels import DEQUANTIZED, kernel, role_name
from glm5lab.gguf.memory import GIB, KV_DTYPES, UTILIZATION
from glm5lab.gguf.parallel import Card, Split, evaluate
from glm5lab.gguf.placement import border_notes, placements
from glm5lab.gguf.reader import GgufModel

MOST_GPUS = 4096
MOST_GIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """All ways to spread a model over the GPUs at hand, best first.

    Attributes:
        model: the file's name.
        config: its HF configuration.
        gpus: how many there are.
        card: each of them.
        context: tokens asked for one request; None for as many as fit.
        splits: ranked: those that have the memory, by fewer stages.
        problems: why vLLM cannot run the file on any GPUs: types that nothing takes.
    """

    model: str
    config: dict[str, Any]
    gpus: int
    card: Card
    context: int | None
    splits: tuple[Split, ...]
    problems: tuple[str, ...] = ()

    @property
    def best(self) -> Split:
        """The split to use; when none fits, the one that lacks least."""
        return self.splits[0]

    @property
    def fits(self) -> bool:
        """Whether the model runs on these GPUs."""
        return self.best.fits and not self.problems

    @property
    def missing_gib(self) -> float:
        """GiB that the fullest GPU of the best split lacks; 0 when it fits."""
        return self.best.caches[0].missing / GIB


def make_plan(
    model: GgufModel,
    gpus: int,
    gpu_memory_gib: float,
    tp: int | None = None,
    pp: int | None = None,
    dcp: int | None = None,
    context: int | None = None,
    kv_dtype: str = "auto",
    utilization: float | None = None,
) -> Plan:
    """Work out every split of a GLM-5 over some GPUs.

    Args:
        model: an open file; its header is enough.
        gpus: GPUs of the same kind.
        gpu_memory_gib: memory of each, GiB.
        tp: tensor-parallel ranks; None tries all that use every GPU.
        pp: pipeline stages; None as for `tp`.
        dcp: context-parallel ranks; None for 1.
        context: tokens that one request shall have; None for as many as fit.
        kv_dtype: "bf16", "fp8_ds_mla", or "auto": bf16, with fp8_ds_mla's tokens beside it.
        utilization: the part of a GPU's memory that vLLM may take; None for its default.

    Raises:
        InputError: the file is no GLM-5, or an argument is out of range or contradicts another.
    """
    config = hf_config(model)
    utilization = UTILIZATION if utilization is None else utilization
    _check(model, config, gpus, gpu_memory_gib, utilization, context, kv_dtype)
    kv_dtypes = (
        KV_DTYPES if kv_dtype == "auto" else (kv_dtype, *(k for k in KV_DTYPES if k != kv_dtype))
    )
    card = Card(gpu_memory_gib, utilization)
    splits = [
        evaluate(model, config, card, kv_dtypes, *shape, context)
        for shape in _shapes(model, config, gpus, tp, pp, dcp)
    ]
    ranked = tuple(sorted(splits, key=_rank))
    problems = tuple(types_without_kernel(model, config))
    return Plan(model.path.name, config, gpus, card, context, ranked, problems)


def types_without_kernel(model: GgufModel, config: Mapping[str, Any]) -> list[str]:
    """A sentence for each type among the loaded tensors that nothing on a GPU takes."""
    return [
        f"no kernel takes {kind} ({counted(len(names), 'tensor')}, such as {names[0]})"
        for kind, names in _by_type(model, config, "").items()
    ]


def dequantized_types(model: GgufModel, config: Mapping[str, Any]) -> list[str]:
    """A sentence for each quantized type that is kept as plain numbers for want of a kernel."""
    return [
        f"no kernel takes {kind}: {counted(len(names), 'tensor')}, such as {names[0]}, dequantized "
        "while loading and counted so"
        for kind, names in _by_type(model, config, "dequantized").items()
    ]


def borders(model: GgufModel, plan: Plan) -> list[str]:
    """What blocks that lie on two ranks cost in the best split; nothing where there are none."""
    best = plan.best
    options = (best.tp, best.pp, True, best.expert_parallel, best.partition)
    placed = placements(model, plan.config, *options)
    return border_notes(
        (name, model.tensors[name].type, p.loaded, p.border) for name, p in placed.items()
    )


def _by_type(model: GgufModel, config: Mapping[str, Any], kind: str) -> dict[str, list[str]]:
    """Type -> loaded tensors of it for which `kernels.kernel` says `kind`, though others have one.

    Matrices that vLLM needs as plain numbers whatever their type are not among them.
    """
    placed = placements(model, config)
    found: dict[str, list[str]] = {}
    for tensor in model.tensors.values():
        loaded = placed[tensor.name].split != "dropped"
        needed = kind and role_name(tensor.role) in DEQUANTIZED
        if loaded and not needed and kernel(tensor.type, tensor.role, gpu=True) == kind:
            found.setdefault(tensor.type, []).append(tensor.name)
    return found


def _rank(split: Split) -> tuple[Any, ...]:
    """Runs; else lacks least. Stages wait for each other."""
    cache = split.caches[0]
    if split.fits:
        return (0, 0, split.pp, split.expert_parallel, -cache.tokens)
    return (1, bool(split.problems), cache.missing, split.pp, 0)


def _shapes(
    model: GgufModel,
    config: Mapping[str, Any],
    gpus: int,
    tp: int | None,
    pp: int | None,
    dcp: int | None,
) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, dcp) to try: those given, and for what is left open all that use every GPU."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    found = False
    for ranks in [tp] if tp else range(1, gpus + 1):
        for stages in [pp] if pp else [gpus // ranks]:
            # Both given: fewer GPUs than there are is the user's choice.
            exact = ranks * stages == gpus or (tp and pp and ranks * stages < gpus)
            tried = tp or heads % ranks == 0
            if exact and tried and stages <= layers:
                found = True
                yield ranks, stages, dcp or 1
    if not found:
        wanted = f"tp {tp or 'any'} x pp {pp or 'any'}"
        raise InputError(
            model.path,
            f"{wanted} does not come to {gpus} GPUs with {heads} heads and {layers} layers",
            "let tp x pp be the number of GPUs, tp a divisor of the heads",
        )


def _check(
    model: GgufModel,
    config: Mapping[str, Any],
    gpus: int,
    gpu_memory_gib: float,
    utilization: float,
    context: int | None,
    kv_dtype: str,
) -> None:
    longest = config["max_position_embeddings"]
    rules = (
        (1 <= gpus <= MOST_GPUS, f"gpus {gpus}", f"1 to {MOST_GPUS}"),
        (
            0 < gpu_memory_gib < MOST_GIB,
            f"gpu memory {gpu_memory_gib}",
            f"GiB of one GPU, above 0 and below {MOST_GIB:,}",
        ),
        (0 < utilization <= 1, f"utilization {utilization}", "a part above 0, at most 1"),
        (
            context is None or 1 <= context <= longest,
            f"context {context}",
            f"1 to {longest} tokens, the model's longest",
        ),
        (kv_dtype in ("auto", *KV_DTYPES), f"kv dtype {kv_dtype!r}", "auto, bf16 or fp8_ds_mla"),
    )
    for holds, what, expected in rules:
        if not holds:
            raise InputError(model.path, f"{what}: expected {expected}", "change the argument")

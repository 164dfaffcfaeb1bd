"""One way to spread a model over GPUs: does it fit, what is left, what stands against it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5lab.errors import counted
from glm5lab.gguf.memory import (
    GIB,
    PAGE_TOKENS,
    UTILIZATION,
    StageWeights,
    Workspace,
    kv_row_bytes,
    stage_weights,
    workspace,
)
from glm5lab.gguf.placement import Placement, placements, stage_layers
from glm5lab.gguf.reader import GgufModel
from glm5lab.gguf.stages import balanced_partition, environment, shared_starts

# vLLM's names of the row formats. Never left to vLLM: on SM100 and SM120 it would pick 8 bits.
CACHE_OPTION = {"bf16": "bfloat16", "fp8_ds_mla": "fp8_ds_mla"}
SMALLEST_CONTEXT = 2048  # tokens; a server for less than GLM-5's top-k makes no sense


@dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        memory_gib: what the driver reports, GiB.
        utilization: the part of it that vLLM takes (its gpu_memory_utilization).
    """

    memory_gib: float
    utilization: float = UTILIZATION

    @property
    def budget(self) -> int:
        """Bytes that vLLM may use."""
        return int(self.memory_gib * self.utilization * GIB)


@dataclass(frozen=True)
class CacheFit:
    """The cache that one row format leaves room for.

    Attributes:
        kv_dtype: "bf16" or "fp8_ds_mla".
        context: the longest request that workspace is counted for; where none was asked for, the
            longest that fits, up to the model's.
        tokens: tokens of all requests together that the cache holds; 0 when nothing fits.
        missing: bytes that the fullest rank lacks for weights, workspace and one request.
    """

    kv_dtype: str
    context: int
    tokens: int
    missing: int

    @property
    def fits(self) -> bool:
        """Whether the model runs with at least one request of `context` tokens."""
        return self.missing == 0


@dataclass(frozen=True)
class Split:
    """One way to spread the model.

    Attributes:
        tp, pp, dcp: tensor-parallel ranks, pipeline stages, context-parallel ranks among the
            tensor-parallel ones.
        expert_parallel: whether ranks hold whole experts.
        partition: layers a stage where vLLM's own division will not do; None otherwise.
        stages: what each stage's ranks hold.
        workspaces: beside it, for the first cache format's context.
        caches: one a row format.
        problems: why vLLM cannot run this split at all.
    """

    tp: int
    pp: int
    dcp: int
    expert_parallel: bool
    partition: tuple[int, ...] | None
    stages: tuple[StageWeights, ...]
    workspaces: tuple[Workspace, ...]
    caches: tuple[CacheFit, ...]
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether it can run with the first cache format."""
        return not self.problems and self.caches[0].fits

    @property
    def fullest(self) -> tuple[StageWeights, Workspace]:
        """What the stage whose ranks hold most holds, and the workspace beside it."""
        pairs = zip(self.stages, self.workspaces, strict=True)
        return max(pairs, key=lambda pair: pair[0].weights + pair[1].total)

    @property
    def used(self) -> int:
        """Bytes of weights and workspace on the fullest rank."""
        stage, space = self.fullest
        return stage.weights + space.total

    @property
    def shape(self) -> str:
        """Its counts: tp 4, pp 2."""
        words = [f"tp {self.tp}"]
        words += [f"pp {self.pp}"] if self.pp > 1 else []
        return ", ".join([*words, *([f"dcp {self.dcp}"] if self.dcp > 1 else [])])

    def options(self, card: Card) -> list[str]:
        """Options of vLLM for this split and the first cache format, on cards as planned for."""
        cache = self.caches[0]
        words = ["--tensor-parallel-size", str(self.tp)]
        words += ["--pipeline-parallel-size", str(self.pp)] if self.pp > 1 else []
        words += ["--decode-context-parallel-size", str(self.dcp)] if self.dcp > 1 else []
        words += ["--enable-expert-parallel"] if self.expert_parallel else []
        words += ["--kv-cache-dtype", CACHE_OPTION[cache.kv_dtype]]
        if card.utilization != UTILIZATION:
            words += ["--gpu-memory-utilization", str(card.utilization)]
        return [*words, "--max-model-len", str(cache.context)]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that this split needs."""
        return environment(self.partition)


def whole_experts(sliced: Mapping[str, Placement]) -> bool:
    """Whether GPUs shall hold whole experts instead of a slice of each (expert parallel).

    They shall where slices cannot be, or cut blocks, which would then lie on two ranks each.

    Args:
        sliced: placements with a slice of every expert a rank.
    """
    return any("_exps." in name and (p.border or p.problem) for name, p in sliced.items())


def obstacles(config: Mapping[str, Any], tp: int, dcp: int, kv_dtypes: Sequence[str]) -> list[str]:
    """What vLLM refuses whatever the memory, without looking at tensors."""
    heads, found = config["num_attention_heads"], []
    if heads % tp:
        found.append(f"{heads} attention heads do not divide by tp {tp}")
    if tp % dcp:
        found.append(f"tp {tp} does not divide by dcp {dcp}")
    if "fp8_ds_mla" in kv_dtypes and kv_row_bytes(config, "fp8_ds_mla") != 656:
        found.append("fp8_ds_mla rows hold a latent of 512 and 64 rotary values only")
    return found


def evaluate(
    model: GgufModel,
    config: Mapping[str, Any],
    card: Card,
    kv_dtypes: Sequence[str],
    tp: int,
    pp: int,
    dcp: int = 1,
    context: int | None = None,
) -> Split:
    """Work out one split.

    Ranks get whole experts where `whole_experts` says so. Where vLLM's division into stages begins
    one at a layer that shares its top-k, or does not fit, layers are divided by bytes instead.

    Args:
        model: the file; its header is enough.
        config: its HF configuration.
        card: each of the GPUs.
        kv_dtypes: row formats to work out, the wanted one first.
        tp: tensor-parallel ranks.
        pp: pipeline stages, at most the number of layers.
        dcp: context-parallel ranks among the tensor-parallel ones.
        context: tokens that one request shall have; None for as many as fit.

    Raises:
        InputError: `tp` or `pp` cannot be.
    """
    placed = placements(model, config, tp, pp)
    expert_parallel = whole_experts(placed)
    if expert_parallel:
        placed = placements(model, config, tp, pp, expert_parallel=True)
    problems = [p.problem for p in placed.values() if p.problem]

    def build(partition: tuple[int, ...] | None) -> Split:
        options = (tp, pp, True, expert_parallel, partition)
        part = placed if partition is None else placements(model, config, *options)
        layers = stage_layers(config["num_hidden_layers"], pp, partition)
        stages = tuple(stage_weights(part.values(), layers, config))
        found = [*obstacles(config, tp, dcp, kv_dtypes[:1]), *shortened(problems)]
        found += shared_starts(config, layers)
        caches = tuple(_cache_fit(config, card, stages, tp, dcp, k, context) for k in kv_dtypes)
        spaces = _workspaces(config, card, tp, pp, caches[0].context)
        return Split(tp, pp, dcp, expert_parallel, partition, stages, spaces, caches, tuple(found))

    split = build(None)
    if pp > 1 and not split.fits:
        partition = balanced_partition(config, placed, model, pp)
        other = build(partition) if partition else split
        if (len(other.problems), other.caches[0].missing) < (
            len(split.problems),
            split.caches[0].missing,
        ):
            return other
    return split


def shortened(problems: Sequence[str], shown: int = 1) -> list[str]:
    """The first few problems of tensors, and how many more there are."""
    more = len(problems) - shown
    rest = [f"and {counted(more, 'more tensor')}"] if more > 0 else []
    return [*problems[:shown], *rest]


def _workspaces(
    config: Mapping[str, Any], card: Card, tp: int, pp: int, context: int
) -> tuple[Workspace, ...]:
    last = pp - 1
    return tuple(workspace(config, tp, context, card.memory_gib, n == last) for n in range(pp))


def _cache_fit(
    config: Mapping[str, Any],
    card: Card,
    stages: Sequence[StageWeights],
    tp: int,
    dcp: int,
    kv_dtype: str,
    context: int | None,
) -> CacheFit:
    """How many tokens fit; all stages cache the same tokens, so the fullest decides."""
    page = [PAGE_TOKENS * stage.token_bytes(config, kv_dtype) for stage in stages]

    def left(length: int) -> list[int]:
        spaces = _workspaces(config, card, tp, len(stages), length)
        used = (s.weights + w.total for s, w in zip(stages, spaces, strict=True))
        return [card.budget - bytes_used for bytes_used in used]

    def tokens(length: int) -> int:
        pages = min(room // size for room, size in zip(left(length), page, strict=True))
        return max(0, pages * PAGE_TOKENS * dcp)

    longest = config["max_position_embeddings"]
    length = context or longest
    if context is None and tokens(length) < length:
        length = max(_longest(tokens, longest), min(SMALLEST_CONTEXT, longest))
    needed = -(-length // (PAGE_TOKENS * dcp))
    lacks = max(needed * size - room for room, size in zip(left(length), page, strict=True))
    return CacheFit(kv_dtype, length, tokens(length), max(0, lacks))


def _longest(tokens: Callable[[int], int], longest: int) -> int:
    """The longest context that its own cache still holds; longer ones need more workspace."""
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) >= middle else (low, middle)
    return low // PAGE_TOKENS * PAGE_TOKENS

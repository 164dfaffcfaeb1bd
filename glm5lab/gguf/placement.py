"""Which GPU holds which part of each tensor, and how many bytes that takes there.

How vLLM divides GLM-5 (deepseek_v2.py and models/deepseek_v32, 0.32 and 0.33): matrices over
heads and inner widths are cut over the tensor-parallel ranks, the latents' projections and the
indexer are whole on every rank, vocabularies are cut by rows and padded, layers are dealt to the
pipeline stages. Where a share of quantized rows begins or ends inside a block, the rank keeps that
block whole: nothing is repacked. Per rank the largest share is given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, Literal

from glm5lab.architecture import has_indexer
from glm5lab.errors import InputError, counted
from glm5lab.gguf.kernels import is_packed
from glm5lab.gguf.parts import widest_share
from glm5lab.gguf.reader import GgufModel, Tensor
from glm5lab.gguf.tensors import type_sizes

Split = Literal["vocab", "column", "row", "expert", "replicated", "dropped"]

# Roles (names inside a block without `.weight`) by how vLLM cuts them; all others are replicated.
COLUMN = (
    "attn_q_b",
    "attn_k_b",
    "attn_v_b",
    "attn_kv_b",
    "ffn_gate",
    "ffn_up",
    "ffn_gate_shexp",
    "ffn_up_shexp",
)
ROW = ("attn_output", "ffn_down", "ffn_down_shexp")
EXPERTS_COLUMN = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps")
EXPERTS_ROW = ("ffn_down_exps",)
FIRST_STAGE, LAST_STAGE = ("token_embd.weight",), ("output.weight", "output_norm.weight")
VOCABULARY = ("token_embd.weight", "output.weight")
VOCABULARY_PADDING = 64  # rows; vLLM's DEFAULT_VOCAB_PADDING_SIZE

# Parameters that vLLM builds in float32 whatever the model's dtype.
FLOAT32 = ("exp_probs_b.bias", "indexer.k_norm.weight", "indexer.k_norm.bias")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_dtype(config: Mapping[str, Any], gpu: bool) -> str:
    """What the engine computes in: GPUs take bf16 even where an all-F32 file says float32."""
    dtype = str(config["dtype"])
    return "bfloat16" if gpu and dtype == "float32" else dtype


@dataclass(frozen=True)
class Placement:
    """Where a tensor goes.

    Attributes:
        split: how the ranks of a stage divide it ("dropped": no rank loads it).
        stage: pipeline stage that holds it, from 0; -1 when dropped.
        packed: bytes of the file that one rank takes, in whole blocks.
        loaded: bytes that this part occupies once loaded, padding included.
        kept: whether the loaded form is still the file's quantized one.
        border: of `loaded`, bytes of blocks that lie in neighbouring ranks' shares.
        problem: why the ranks cannot divide it so; "" when they can.
    """

    split: Split
    stage: int = -1
    packed: int = 0
    loaded: int = 0
    kept: bool = False
    border: int = 0
    problem: str = ""


DROPPED = Placement("dropped")


def stage_layers(layers: int, pp: int, partition: Sequence[int] | None = None) -> list[range]:
    """The decoder layers of each pipeline stage, as vLLM deals them (distributed/utils.py).

    Args:
        layers: decoder layers.
        pp: stages.
        partition: layers a stage (VLLM_PP_LAYER_PARTITION); None for vLLM's own: even, and what
            is left over one each to the stages before the last.

    Raises:
        ValueError: fewer layers than stages, or a partition that does not add up.
    """
    if not 1 <= pp <= layers:
        raise ValueError(f"pp: expected 1 to {layers} stages (one a layer), got {pp}")
    sizes = list(partition or [layers // pp] * pp)
    if partition is None:
        for stage in range(layers % pp):
            sizes[-2 - stage] += 1
    if len(sizes) != pp or sum(sizes) != layers or min(sizes) < 1:
        raise ValueError(f"partition: expected {pp} counts with the sum {layers}, got {sizes}")
    ends = list(accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def placements(
    model: GgufModel,
    config: Mapping[str, Any],
    tp: int = 1,
    pp: int = 1,
    gpu: bool = True,
    expert_parallel: bool = False,
    partition: Sequence[int] | None = None,
) -> dict[str, Placement]:
    """The placement of every tensor, by GGUF name.

    Args:
        model: a GLM-5; its header is enough.
        config: from `gguf.config.hf_config`; see `engine_dtype`.
        tp: tensor-parallel ranks of a stage.
        pp: pipeline stages.
        gpu: quantized weights stay quantized where a kernel takes them; on the CPU all are
            dequantized.
        expert_parallel: whole experts a rank instead of a slice of every expert.
        partition: decoder layers a stage; None for vLLM's own.

    Raises:
        InputError: `tp` or `pp` is no count that this model can have.
    """
    if tp < 1:
        raise InputError(model.path, f"tp {tp}: expected at least 1 rank", "name 1 or more")
    try:
        stages = stage_layers(config["num_hidden_layers"], pp, partition)
    except ValueError as error:
        raise InputError(model.path, str(error), "name a number of stages that fits") from error
    cut = _Cutter(model, config, tp, gpu, expert_parallel)
    stage_of = {layer: number for number, layers in enumerate(stages) for layer in layers}
    result = {}
    for tensor in model.tensors.values():
        stage = _stage(tensor, stage_of, pp, config)
        result[tensor.name] = DROPPED if stage is None else replace(cut(tensor), stage=stage)
    return result


def _stage(
    tensor: Tensor, stage_of: Mapping[int, int], pp: int, config: Mapping[str, Any]
) -> int | None:
    """The stage that loads a tensor; None for one that no stage loads."""
    layer, role = tensor.layer, tensor.role
    if layer is None:
        return 0 if role in FIRST_STAGE else pp - 1 if role in LAST_STAGE else None
    if layer not in stage_of or role.startswith("nextn."):
        return None
    if role.startswith("indexer.") and not has_indexer(config, layer):
        return None
    return stage_of[layer]


class _Cutter:
    """Cuts tensors for one rank."""

    def __init__(
        self, model: GgufModel, config: Mapping[str, Any], tp: int, gpu: bool, ep: bool
    ) -> None:
        self.tensors, self.tp, self.gpu, self.ep = model.tensors, tp, gpu, ep
        self.itemsize = DTYPE_BYTES[engine_dtype(config, gpu)]

    def __call__(self, tensor: Tensor) -> Placement:
        split, rows, columns, problem = self._part(tensor)
        held = min(rows, prod(tensor.shape[:-1]))  # padding rows are not in the file
        wide = columns
        if split == "row":
            every = (tensor.shape or (1,))[-1]
            wide = min(every, widest_share(every, self.tp, _block(tensor)))
        packed = _stored(tensor, held * wide)
        kept = self.gpu and is_packed(tensor.type, tensor.role, len(tensor.shape))
        if kept:
            loaded = _stored(tensor, rows * wide)
            border = loaded - _stored(tensor, rows * columns)
            return Placement(split, 0, packed, loaded, True, border, problem)
        loaded = rows * columns * (4 if tensor.role in FLOAT32 else self.itemsize)
        return Placement(split, 0, packed, loaded, problem=problem)

    def _part(self, tensor: Tensor) -> tuple[Split, int, int, str]:
        """How a tensor is split; rows (all leading axes) and columns of one rank; the problem."""
        role, shape, tp = tensor.role.removesuffix(".weight"), tensor.shape or (1,), self.tp
        rows, columns = prod(shape[:-1]), shape[-1]
        if tensor.role in VOCABULARY:
            padded = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
            return "vocab", -(-padded // tp), columns, _indivisible(tensor, "rows", padded, tp)
        if role in EXPERTS_COLUMN + EXPERTS_ROW and self.ep:
            return "expert", -(-shape[0] // tp) * (rows // max(1, shape[0])), columns, ""
        if role in COLUMN + EXPERTS_COLUMN:
            # k_b and v_b are [heads, ...]; q_b's rows are heads times the head size.
            cut, unit = (shape[0], "heads") if role in ("attn_k_b", "attn_v_b") else (rows, "rows")
            if role in EXPERTS_COLUMN:
                cut = shape[-2 if len(shape) > 1 else -1] // (
                    2 if role == "ffn_gate_up_exps" else 1
                )
            return "column", -(-rows // tp), columns, _indivisible(tensor, unit, cut, tp)
        if role in ROW + EXPERTS_ROW:
            return "row", rows, -(-columns // tp), _indivisible(tensor, "columns", columns, tp)
        return "replicated", rows, columns, ""


def _stored(tensor: Tensor, elements: int) -> int:
    """Bytes that so many elements take in a tensor's type."""
    return tensor.nbytes * elements // max(1, prod(tensor.shape))


def _block(tensor: Tensor) -> int:
    """Numbers in a block of a tensor's type."""
    return type_sizes().get(tensor.type_id, ("", 1, 1))[1]


def border_notes(
    held: Iterable[tuple[str, str, int, int]], who: str = "each rank at most"
) -> list[str]:
    """A sentence on the tensors whose blocks are cut by the borders between ranks; none if none.

    Args:
        held: name, type, bytes that a rank holds, and of these the bytes of other ranks' shares.
        who: whose bytes these are: of the rank with most, or of one.
    """
    cut = [row for row in held if row[3] > 0]
    if not cut:
        return []
    names, types, sizes, borders = zip(*cut, strict=True)
    what = counted(len(set(names)), "tensor")
    experts = any("_exps." in name for name in names)
    avoid = "; whole experts a rank (--enable-expert-parallel) need less" if experts else ""
    return [
        f"borders between ranks lie inside blocks of {'/'.join(sorted(set(types)))}: of {what}, "
        f"such as {names[0]}, ranks keep the blocks at their borders whole, "
        f"{who} {sum(borders):,} bytes beside its share of {sum(sizes) - sum(borders):,}{avoid}"
    ]


def _indivisible(tensor: Tensor, unit: str, count: int, tp: int) -> str:
    return f"{tensor.name}: {count} {unit} do not divide by {tp} ranks" if count % tp else ""

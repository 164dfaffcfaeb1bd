"""One table of a whole file: every tensor, where it comes from, where it goes, what it takes.

table = name_table(open_gguf("GLM-5-Q4_K_M-00001-of-00010.gguf"), config, tp=8)
table[table["problem"] != ""]
table.groupby("kernel")["rank_bytes"].sum()
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from glm5lab.gguf.kernels import gpu_here, kernel
from glm5lab.gguf.placement import Placement, placements
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.reconcile import tensor_frame

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("shard", "name", "hf", "vllm", "part", "change", "type", "kernel"),
    *("nbytes", "rank_bytes", "border_bytes", "shape", "layer", "stage", "dropped", "problem"),
)
TEXT = ("name", "hf", "vllm", "part", "change", "type", "kernel", "dropped", "problem")
FIELDS = [field.name for field in fields(Placement)]


def name_table(
    model: GgufModel,
    config: Mapping[str, Any],
    tp: int = 1,
    pp: int = 1,
    gpu: bool | None = None,
    partition: Sequence[int] | None = None,
    expert_parallel: bool = False,
) -> "pd.DataFrame":
    """Every tensor of a file, one a row, in file order.

    Args:
        model: a GLM-5; its headers are enough.
        config: from `gguf.config.hf_config`.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        gpu: kernels and bytes as on a GPU or on the CPU; None for what this machine has.
        partition: decoder layers a stage; None for vLLM's own.
        expert_parallel: whole experts a rank instead of a slice of every expert.

    Returns:
        Columns:
        shard (number of the file, from 1), name (in the file), hf (`{e}` for the expert), vllm,
        part ("0", "w1", "" for a whole parameter), change (of the values, besides dequantization),
        type, kernel (see `gguf.kernels`), nbytes (in the file), rank_bytes (of one rank of its
        stage, once loaded), border_bytes (of these, in other ranks' shares: ends of blocks), shape
        (tuple, torch order), layer (Int64), stage (-1 where dropped), dropped (the reason, or ""),
        problem (what does not fit, or "").

    Raises:
        InputError: tp or pp is no count that this model can have.
    """
    import pandas as pd

    gpu = gpu_here() if gpu is None else gpu
    frame = tensor_frame(model, config)
    tensors = model.tensors.values()
    placements_of = placements(model, config, tp, pp, gpu, expert_parallel, partition)
    placed = pd.DataFrame(list(placements_of.values()), columns=FIELDS)
    used = frame["known"] & (frame["dropped"] == "")
    frame["shard"] = [t.shard + 1 for t in tensors]
    frame["nbytes"] = [t.nbytes for t in tensors]
    frame["rank_bytes"] = placed["loaded"].where(used, 0)
    frame["border_bytes"] = placed["border"].where(used, 0)
    frame["stage"] = placed["stage"].where(used, -1)
    frame["kernel"] = _kernels(frame, gpu).where(used, "")
    opaque = used & (frame["kernel"] == "") & (frame["problem"] == "")
    _add(frame, opaque, "no kernel multiplies type " + frame["type"])
    # A placement's sentence names its tensor, which the row does already.
    _add(frame, used & (placed["problem"] != ""), placed["problem"].str.split(": ", n=1).str[-1])
    return frame[list(COLUMNS)].astype(dict.fromkeys(TEXT, "str"))


def _kernels(frame: "pd.DataFrame", gpu: bool) -> "pd.Series[str]":
    """`kernels.kernel` of every row, asked once a distinct pair of type and role."""
    pairs = frame[["type", "role"]].drop_duplicates()
    pairs["kernel"] = [
        kernel(kind, role, gpu) for kind, role in zip(pairs["type"], pairs["role"], strict=True)
    ]
    return frame[["type", "role"]].merge(pairs, on=["type", "role"], how="left")["kernel"]


def _add(frame: "pd.DataFrame", where: "pd.Series[bool]", text: "pd.Series[str]") -> None:
    """Give some rows a problem, behind those that they have."""
    if where.any():
        both = zip(frame.loc[where, "problem"], text[where], strict=True)
        frame.loc[where, "problem"] = [f"{old}; {new}" if old else new for old, new in both]

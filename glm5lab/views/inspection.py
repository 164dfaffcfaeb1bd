"""What `glm5lab inspect --json` gives, and what any report says about a file's oddities."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError, counted
from glm5lab.gguf.config import config_notes
from glm5lab.gguf.reader import ARCHITECTURE, GgufModel, is_adapter, open_gguf

# Longer arrays of metadata (tokens, merges) are counted, not listed.
LONGEST_ARRAY = 256
UNKNOWN = "unknown("  # how `gguf.tensors` names a type that ggml does not


def notes(model: GgufModel) -> list[str]:
    """What is odd about a file: its reader's warnings, and where its configuration is unusual."""
    found = list(model.warnings)
    if is_adapter(model):
        found.append("a LoRA adapter (general.type), not a model")
    unknown: dict[str, list[str]] = {}
    for tensor in model.tensors.values():
        if tensor.type.startswith(UNKNOWN):
            unknown.setdefault(tensor.type, []).append(tensor.name)
    for kind, names in unknown.items():
        found.append(
            f"type {kind} is none that ggml names ({counted(len(names), 'tensor')}, such as "
            f"{names[0]}): bytes are counted up to the next tensor"
        )
    if model.architecture == ARCHITECTURE:
        try:
            found += config_notes(model)
        except InputError as error:
            found.append(f"{error.cause}; {error.fix}")
    return found


def opened(source: str | Path | GgufModel) -> GgufModel:
    """An open model as it is; one by its path or address without asking for its weights."""
    return source if isinstance(source, GgufModel) else open_gguf(source, allow_truncated=True)


def inspect_json(source: str | Path | GgufModel) -> dict[str, Any]:
    """Everything in the headers of a model's files, as plain values.

    Args:
        source: a GGUF of any architecture: open, by its path or its address.

    Raises:
        InputError: the file cannot be used.
    """
    model = opened(source)
    by_type: Counter[str] = Counter()
    by_role: Counter[str] = Counter()
    for tensor in model.tensors.values():
        by_type[tensor.type] += tensor.nbytes
        by_role[tensor.role] += tensor.nbytes
    return {
        "file": str(model.path),
        "architecture": model.architecture,
        "name": plain(model.metadata.get("general.name")),
        "byte_order": model.byte_order,
        "header_only": model.header_only,
        "shards": shards_json(model),
        "warnings": notes(model),
        "nbytes": model.nbytes,
        "parameters": sum(math.prod(tensor.shape) for tensor in model.tensors.values()),
        "bytes_by_type": dict(by_type.most_common()),
        "bytes_by_role": dict(by_role.most_common()),
        "metadata": {key: plain(value) for key, value in model.metadata.items()},
        "tensors": [
            {
                "name": tensor.name,
                "layer": tensor.layer,
                "role": tensor.role,
                "shape": list(tensor.shape),
                "type": tensor.type,
                "type_id": tensor.type_id,
                "nbytes": tensor.nbytes,
                "shard": tensor.shard + 1,
                "offset": tensor.offset,
            }
            for tensor in model.tensors.values()
        ],
    }


def shards_json(model: GgufModel) -> list[dict[str, Any]]:
    """Each shard's file and number of tensors; `shard` of a tensor counts them from 1."""
    held = Counter(tensor.shard for tensor in model.tensors.values())
    return [{"file": str(shard), "tensors": held[n]} for n, shard in enumerate(model.shards)]


def plain(value: Any) -> Any:
    """A metadata value that JSON can hold; long arrays become their length."""
    if isinstance(value, list):
        if len(value) > LONGEST_ARRAY:
            return {"array_of": len(value)}
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

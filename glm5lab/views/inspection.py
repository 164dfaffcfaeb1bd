"""What `glm5lab inspect --json` gives, and what any report says about a file's oddities."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError
from glm5lab.gguf.config import config_notes
from glm5lab.gguf.reader import ARCHITECTURE, GgufModel, open_gguf

# Longer arrays of metadata (tokens, merges) are counted, not listed.
LONGEST_ARRAY = 256


def notes(model: GgufModel) -> list[str]:
    """What is odd about a file: its reader's warnings, and where its configuration is unusual."""
    found = list(model.warnings)
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
    in_shard: Counter[int] = Counter()
    for tensor in model.tensors.values():
        by_type[tensor.type] += tensor.nbytes
        by_role[tensor.role] += tensor.nbytes
        in_shard[tensor.shard] += 1
    return {
        "file": str(model.path),
        "architecture": model.architecture,
        "name": plain(model.metadata.get("general.name")),
        "byte_order": model.byte_order,
        "header_only": model.header_only,
        "shards": [
            {"file": str(shard), "tensors": in_shard[number]}
            for number, shard in enumerate(model.shards)
        ],
        "warnings": notes(model),
        "bytes": model.nbytes,
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
                "bytes": tensor.nbytes,
                "shard": tensor.shard,
                "offset": tensor.offset,
            }
            for tensor in model.tensors.values()
        ],
    }


def plain(value: Any) -> Any:
    """A metadata value that JSON can hold; long arrays become their length."""
    if isinstance(value, list):
        if len(value) > LONGEST_ARRAY:
            return {"array_of": len(value)}
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

"""What `glm5lab inspect` prints: a summary, and a table of tensor roles."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from glm5lab.architecture import MAX_BLOCKS
from glm5lab.errors import counted, printable
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.reader import GgufModel, Tensor
from glm5lab.views.inspection import notes, opened
from glm5lab.views.text import table_lines, terminal_width, wrapped

LONGEST_CELL = 2000  # characters; values in a damaged file may have any length
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# What the first lines of `inspect` show: label, keys of glm-dsa.*.
SUMMARY = (
    ("blocks (of these MTP)", ("block_count", "nextn_predict_layers")),
    ("context, hidden, vocabulary", ("context_length", "embedding_length", "vocab_size")),
    ("heads, query latent, key-value latent", (
        "attention.head_count", "attention.q_lora_rank", "attention.kv_lora_rank",
    )),
    ("head: key, value, rotary part", (
        "attention.key_length_mla", "attention.value_length_mla", "rope.dimension_count",
    )),
    ("experts: all, used, shared, dense layers", (
        "expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count",
    )),
    ("indexer: heads, head size, top-k", (
        "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
    )),
)  # fmt: skip


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in UNITS:
        if count < 1024 or unit == UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def inspect_text(source: str | Path | GgufModel, width: int | None = None) -> str:
    """What `glm5lab inspect` prints: summary, then one line a tensor role, layers folded.

    Args:
        source: a GGUF of any architecture, open or by its path.
        width: columns; the terminal's when None (100 where there is no terminal).

    Raises:
        InputError: the file cannot be used.
    """
    model, width = opened(source), width or terminal_width()
    lines = [_cell(str(model.path)), *summary_lines(model, width), "", *role_lines(model, width)]
    for note in notes(model):
        lines += wrapped(_cell(f"note: {note}"), width)
    return "\n".join(lines)


def _cell(value: str) -> str:
    """A string from the file: as one line of bounded length that no terminal obeys."""
    return printable(value if len(value) <= LONGEST_CELL else f"{value[:LONGEST_CELL]} ...")


def summary_lines(model: GgufModel, width: int) -> list[str]:
    """Name, sizes and dimensions from the metadata."""
    data = model.metadata
    parameters = sum(math.prod(t.shape) for t in model.tensors.values())
    shards = counted(len(model.shards), "file")
    filled = {t.shard for t in model.tensors.values()}
    empty = [i + 1 for i in range(len(model.shards)) if i not in filled]
    if empty:
        shards += f", without tensors: number {layer_ranges(empty)}"
    rows = {"model": f"{data.get('general.name', 'unnamed')} ({model.architecture})"}
    rows["size"] = (
        f"{human_bytes(model.nbytes)} in {counted(len(model.tensors), 'tensor')} and {shards}, "
        f"{_count(parameters)} parameters"
    )
    if model.byte_order == "big":
        rows["byte order"] = "big-endian, as on s390x"
    for label, keys in SUMMARY:
        values = [data.get(f"{model.architecture}.{k}") for k in keys]
        if any(v is not None for v in values):
            rows[label] = ", ".join(_value(v) for v in values)
    types = data.get(f"{model.architecture}.attention.indexer.types")
    if isinstance(types, list):
        full = (i for i, on in enumerate(types[:MAX_BLOCKS]) if on)
        rows["layers with an indexer"] = layer_ranges(full)
    tokens = data.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        kind = f"{data.get('tokenizer.ggml.model')}, {data.get('tokenizer.ggml.pre')}"
        chat = "with" if "tokenizer.chat_template" in data else "without"
        rows["tokenizer"] = f"{kind}: {len(tokens)} tokens, {chat} chat template"
    # Without headings: the first row stands in their place.
    return table_lines(
        [("", ""), *((label, _cell(value)) for label, value in rows.items())], width
    )[1:]


def _value(value: Any) -> str:
    """A number of the metadata; files may hold one a layer, damaged ones anything."""
    if isinstance(value, list) and len(value) > MAX_BLOCKS:
        return f"{len(value)} values"
    return "-" if value is None else str(value)


def role_lines(model: GgufModel, width: int) -> list[str]:
    """One row a tensor role: layers, shape, types with their layers, count, bytes; then sums."""
    roles: dict[str, list[Tensor]] = {}
    by_type: Counter[str] = Counter()
    for t in model.tensors.values():
        roles.setdefault(t.role, []).append(t)
        by_type[t.type] += t.nbytes
    rows: list[tuple[str, ...]] = [("tensor", "layers", "shape", "type", "count", "bytes")]
    for role, tensors in roles.items():
        layers = layer_ranges(t.layer for t in tensors if t.layer is not None)
        shapes = " ".join(dict.fromkeys("x".join(map(str, t.shape)) for t in tensors))
        size = human_bytes(sum(t.nbytes for t in tensors))
        cells = (role, layers, shapes, _types(tensors), str(len(tensors)), size)
        rows.append(tuple(map(_cell, cells)))
    rows.append(("total", "", "", "", str(len(model.tensors)), human_bytes(model.nbytes)))
    numbers = ("count", "bytes")
    shares = ", ".join(f"{name} {human_bytes(n)}" for name, n in by_type.most_common())
    return [
        *table_lines(rows, width, whole=numbers, right=numbers),
        *wrapped(_cell(f"bytes by type: {shares}"), width),
    ]


def _types(tensors: list[Tensor]) -> str:
    """The type, or "Q4_K 1-2, Q6_K 3" where layers differ."""
    groups: dict[str, list[Any]] = {}
    for t in tensors:
        groups.setdefault(t.type, []).append(t.layer)
    if len(groups) == 1 or tensors[0].layer is None:
        return " ".join(groups)
    return ", ".join(f"{name} {layer_ranges(layers)}" for name, layers in groups.items())


def _count(n: int) -> str:
    for limit, unit in ((10**9, "billion"), (10**6, "million")):
        if n >= limit:
            return f"{n / limit:.1f} {unit}"
    return str(n)

"""Tables for the terminal and for notebooks."""

import io
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5lab.architecture import MAX_BLOCKS
from glm5lab.errors import printable
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.reader import GgufModel, Tensor
from glm5lab.views.inspection import notes, opened

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

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
    from rich.console import Console

    model = opened(source)
    columns = width or shutil.get_terminal_size((100, 40)).columns
    console = Console(file=io.StringIO(), width=columns, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(_text(str(model.path)), soft_wrap=True)
        console.print(summary_table(model))
        console.print()
        console.print(role_table(model))
        for note in notes(model):
            console.print(_text(f"note: {note}"))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _text(value: str) -> "Text":
    """A string from the file for rich: nothing in it is markup or moves the cursor."""
    from rich.text import Text

    cut = value if len(value) <= LONGEST_CELL else f"{value[:LONGEST_CELL]} ..."
    return Text(printable(cut))


def summary_table(model: GgufModel) -> "Table":
    """Name, sizes and dimensions from the metadata."""
    from rich.table import Table

    data = model.metadata
    table = Table(show_header=False, box=None, pad_edge=False)
    parameters = sum(math.prod(t.shape) for t in model.tensors.values())
    shards = f"{len(model.shards)} file" + "s" * (len(model.shards) > 1)
    filled = {t.shard for t in model.tensors.values()}
    empty = [i + 1 for i in range(len(model.shards)) if i not in filled]
    if empty:
        shards += f", without tensors: number {layer_ranges(empty)}"
    rows = {"model": f"{data.get('general.name', 'unnamed')} ({model.architecture})"}
    rows["size"] = (
        f"{human_bytes(model.nbytes)} in {len(model.tensors)} tensors and {shards}, "
        f"{_count(parameters)} parameters"
    )
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
    for label, value in rows.items():
        table.add_row(label, _text(value))
    return table


def _value(value: Any) -> str:
    """A number of the metadata; files may hold one a layer, damaged ones anything."""
    if isinstance(value, list) and len(value) > MAX_BLOCKS:
        return f"{len(value)} values"
    return "-" if value is None else str(value)


def role_table(model: GgufModel) -> "Table":
    """One row a tensor role: layers, shape, types with their layers, count, bytes."""
    from rich.table import Table

    roles: dict[str, list[Tensor]] = {}
    for t in model.tensors.values():
        roles.setdefault(t.role, []).append(t)
    by_type: Counter[str] = Counter()
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=True)
    total = human_bytes(model.nbytes)
    table.add_column("tensor", no_wrap=True)
    table.add_column("layers", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("type", overflow="fold")
    table.add_column("count", str(len(model.tensors)), justify="right")
    table.add_column("bytes", total, justify="right", no_wrap=True)
    for role, tensors in roles.items():
        layers = [t.layer for t in tensors if t.layer is not None]
        shapes = dict.fromkeys("x".join(map(str, t.shape)) for t in tensors)
        size = sum(t.nbytes for t in tensors)
        row = [role, layer_ranges(layers), " ".join(shapes), _types(tensors), str(len(tensors))]
        table.add_row(*map(_text, row), human_bytes(size))
        for t in tensors:
            by_type[t.type] += t.nbytes
    shares = (f"{name} {human_bytes(n)}" for name, n in by_type.most_common())
    table.caption = _text("bytes by type: " + ", ".join(shares))
    table.caption_justify = "left"
    return table


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

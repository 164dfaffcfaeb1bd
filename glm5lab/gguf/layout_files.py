"""Files of a layout's shape: complete headers, and holes in place of the weights.

    first = write_layout(read_layouts()["glm-5-q4_k_m"], "build/glm-5")

A set of 455 GB takes some megabytes on disk. What reads headers only (inspect, map, plan) works on
it as on the real files; the weights read as zeros.
"""

import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError
from glm5lab.gguf.layouts import Layout, LayoutTensor
from glm5lab.gguf.sample_tokenizer import CHAT_TEMPLATE, published_vocabulary
from glm5lab.gguf.shards import shard_name

ALIGNMENT = 32
U16, U32, I32, F32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9
PACK = {U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}


def write_layout(
    layout: Layout, folder: str | Path, shards: int | None = None, vocabulary: bool = True
) -> Path:
    """Write header-only files of a layout.

    Args:
        layout: what to write.
        folder: where; made when it is not there.
        shards: number of files, all with tensors; default as published, a metadata-only first
            shard included.
        vocabulary: also the tokenizer's keys: the sample's tokens, as many and with GLM-5's
            numbers for special tokens.

    Returns:
        The first shard's path.

    Raises:
        InputError: the folder cannot be written or does not hold files of this size.
    """
    folder = Path(folder).expanduser()
    parts = _parts(layout, shards)
    names = [f"{layout.name}.gguf"]
    if len(parts) > 1:
        names = [shard_name(layout.name, i, len(parts)) for i in range(len(parts))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index, (name, part) in enumerate(zip(names, parts, strict=True)):
            keys = [] if index else _model_keys(layout, vocabulary)
            if len(parts) > 1:
                keys += [
                    _key("split.no", index, U16),
                    _key("split.count", len(parts), U16),
                    _key("split.tensors.count", len(layout.tensors), I32),
                ]
            _write_file(folder / name, keys, part)
    except OSError as error:
        raise InputError(
            folder, f"cannot be written: {error.strerror or error}", "choose another folder"
        ) from error
    return folder / names[0]


def _parts(layout: Layout, shards: int | None) -> list[Sequence[LayoutTensor]]:
    """The tensors of each file: as published, or about the same number in each."""
    total = len(layout.tensors)
    if shards is None:
        bounds = [0]
        for count in layout.shard_tensors:
            bounds.append(bounds[-1] + count)
    else:
        if not 1 <= shards <= total:
            raise InputError(layout.name, f"shards: {shards} is out of range", f"use 1 to {total}")
        bounds = [total * i // shards for i in range(shards + 1)]
    return [layout.tensors[a:b] for a, b in pairwise(bounds)]


def _model_keys(layout: Layout, vocabulary: bool) -> list[bytes]:
    keys = [_key(name, value) for name, value in layout.metadata.items()]
    return keys + (_tokenizer_keys(layout.architecture.vocab_size) if vocabulary else [])


def _tokenizer_keys(size: int) -> list[bytes]:
    v = published_vocabulary(size)
    return [
        _key("tokenizer.ggml.model", "gpt2"),
        _key("tokenizer.ggml.pre", "glm4"),
        _key("tokenizer.ggml.tokens", v.tokens),
        _key("tokenizer.ggml.token_type", v.types),
        _key("tokenizer.ggml.merges", v.merges),
        _key("tokenizer.ggml.eos_token_id", v.id("<|endoftext|>")),
        _key("tokenizer.ggml.eot_token_id", v.id("<|user|>")),
        _key("tokenizer.ggml.eom_token_id", v.id("<|observation|>")),
        _key("tokenizer.ggml.bos_token_id", v.id("[gMASK]")),
        _key("tokenizer.ggml.padding_token_id", v.id("[MASK]")),
        _key("tokenizer.chat_template", CHAT_TEMPLATE),
    ]


def _write_file(path: Path, keys: list[bytes], tensors: Sequence[LayoutTensor]) -> None:
    """Header, padding, and a hole as long as the tensors."""
    infos, offset = [], 0
    for t in tensors:
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        infos.append(_string(t.name) + dims + struct.pack("<IQ", t.type_id, offset))
        offset += _padded(t.nbytes)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join([*keys, *infos])
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(head)
            file.truncate(_padded(len(head)) + offset)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, value: Any, kind: int | None = None) -> bytes:
    """One key and its value; the type follows from the value where `kind` does not say it."""
    kind = _kind(value) if kind is None else kind
    return _string(name) + struct.pack("<I", kind) + _value(value, kind)


def _kind(value: Any) -> int:
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING, list: ARRAY}
    return kinds[type(value)]


def _value(value: Any, kind: int) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind != ARRAY:
        return struct.pack(PACK[kind], value)
    # Converters write token types as signed numbers, everything else as _kind has it.
    item = I32 if isinstance(value[0], int) and not isinstance(value[0], bool) else _kind(value[0])
    head = struct.pack("<IQ", item, len(value))
    return head + b"".join(_value(v, item) for v in value)

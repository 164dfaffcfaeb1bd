"""GGUF files byte by byte, for those that no library would write."""

import struct
from pathlib import Path


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def text_key(name: str, value: str) -> bytes:
    return key(name, 8, string(value))


def tensor(name: str, ne: tuple[int, ...], type_id: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(ne)}Q", len(ne), *ne)
    return string(name) + dims + struct.pack("<IQ", type_id, offset)


def header(
    keys: list[bytes],
    tensors: list[bytes],
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    return head + b"".join(keys) + b"".join(tensors)


def write(path: Path, head: bytes, data: bytes = b"", alignment: int = 32) -> Path:
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path

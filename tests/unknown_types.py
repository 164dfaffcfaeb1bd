"""Copies of GGUF files with type numbers that neither llama.cpp nor gguf-py knows.

The ik_llama.cpp fork numbers its own types from 133 on; gguf-py refuses a whole file for one.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

# Name ending -> type number; numbers as of the fork's own types.
IK_TYPES = {"ffn_gate_exps.weight": 144, "ffn_up_exps.weight": 144, "ffn_down_exps.weight": 138}


def with_unknown_types(first: Path, folder: Path, types: Mapping[str, int] | None = None) -> Path:
    """Copy a model and renumber some tensors' types; bytes and offsets stay.

    Args:
        first: its first shard; its sisters are copied too.
        folder: where the copy goes, another than `first`'s.
        types: ends of tensor names and their new type numbers; default IK_TYPES.

    Returns:
        The copy's first shard.
    """
    from glm5lab.gguf.reader import open_gguf

    types = IK_TYPES if types is None else types
    model = open_gguf(first)
    folder.mkdir(parents=True, exist_ok=True)
    changed = 0
    for shard in model.shards:
        raw = bytearray(Path(shard).read_bytes())
        for name, tensor in model.tensors.items():
            number = next((n for end, n in types.items() if name.endswith(end)), None)
            if number is None or Path(tensor.path) != Path(shard):
                continue
            entry = struct.pack("<Q", len(name)) + name.encode()
            entry += struct.pack("<I", len(tensor.shape))
            entry += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            at = raw.index(entry + struct.pack("<I", tensor.type_id)) + len(entry)
            raw[at : at + 4] = struct.pack("<I", number)
            changed += 1
        (folder / Path(shard).name).write_bytes(raw)
    assert changed, f"no tensor of {first} ends in one of {', '.join(types)}"
    return folder / first.name

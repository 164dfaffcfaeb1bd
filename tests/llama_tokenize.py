"""Token ids of texts by llama.cpp's own tokenizer (package xllamacpp), in a child process.

llama.cpp loads the whole model for it, and aborts its process on a file that it does not like.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest


class Params(ctypes.Structure):
    """llama_model_params, passed by value; larger than any version's, which the ABI allows."""

    _fields_ = (("opaque", ctypes.c_uint64 * 64),)


def llama_cpp_ids(path: Path, texts: list[str]) -> list[list[int]]:
    """Load `path` (any first shard) in llama.cpp and tokenize `texts`, special tokens included."""
    pytest.importorskip("xllamacpp")
    run = subprocess.run(
        [sys.executable, __file__, str(path)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    line = next(t for t in run.stdout.splitlines() if t.startswith("IDS "))
    ids: list[list[int]] = json.loads(line[4:])
    return ids


def main() -> None:
    """The child: texts as JSON on standard input, ids as one JSON line on standard output."""
    import xllamacpp.xllamacpp as extension

    lib = ctypes.CDLL(extension.__file__)
    for name in ("llama_model_load_from_file", "llama_model_get_vocab"):
        getattr(lib, name).restype = ctypes.c_void_p
    lib.llama_model_default_params.restype = Params
    lib.llama_backend_init()
    path = sys.argv[1].encode()
    model = lib.llama_model_load_from_file(ctypes.c_char_p(path), lib.llama_model_default_params())
    assert model, "llama.cpp did not load the file"
    vocab = ctypes.c_void_p(lib.llama_model_get_vocab(ctypes.c_void_p(model)))
    out = []
    for text in json.load(sys.stdin):
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        n = lib.llama_tokenize(
            vocab, raw, len(raw), ids, len(ids), ctypes.c_bool(True), ctypes.c_bool(True)
        )
        assert n >= 0
        out.append(list(ids[:n]))
    print("IDS " + json.dumps(out))


if __name__ == "__main__":
    main()

"""Referee 2: llama.cpp (package xllamacpp) on the CPU, float32, in a child process.

The child may abort on a wrong file; the parent then reports the end of what it wrote.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from glm5lab.check.cases import Case
from glm5lab.check.f32_gguf import is_float32, write_float32
from glm5lab.check.progress import say
from glm5lab.errors import CheckError

CHILD = Path(__file__).with_name("llamacpp_child.py")
TAIL_LINES = 8
TELLING = ("GGML_ASSERT", "GGML_ABORT", "error", "Error", "terminate")


class LlamaCppReferee:
    """llama.cpp with one GGUF file; a file that is not all F32 is rewritten as F32 first.

    Args:
        path: any shard of the file.
        threads: CPU threads of the child.
        timeout_s: seconds that one `judge_all` may take.

    Raises:
        CheckError: xllamacpp is missing.
        InputError: the file cannot be used, or the disk is too small for the F32 copy.
    """

    def __init__(self, path: str | Path, threads: int = 1, timeout_s: float = 1800.0) -> None:
        from glm5lab.gguf.reader import open_gguf

        if find_spec("xllamacpp") is None:
            raise CheckError("the referee llama.cpp needs xllamacpp; pip install xllamacpp")
        model = open_gguf(path)
        self.path, self.shards = model.files[0], model.files
        self.vocab_size = len(model.metadata["tokenizer.ggml.tokens"])
        self.sampled = plain_token(model.metadata)
        self.threads, self.timeout_s = threads, timeout_s

    def judge_all(self, cases: Sequence[Case]) -> list[np.ndarray]:
        """float32 [rows, vocab] of log-probabilities for each case.

        Raises:
            CheckError: the child ended without an answer, or took too long.
        """
        with tempfile.TemporaryDirectory(prefix="glm5lab-check-") as name:
            folder = Path(name)
            model = self.path
            if not is_float32(self.shards):
                model = folder / "float32.gguf"
                say("llama.cpp: writing a float32 copy of the file")
                write_float32(self.shards, model)
            request = {
                "model": str(model),
                "vocab_size": self.vocab_size,
                "sequences": [list(case.ids) for case in cases],
                "sampled": self.sampled,
                "context": max(len(case.ids) for case in cases) + 8,
                "threads": self.threads,
                "out": str(folder / "rows.npz"),
            }
            (folder / "request.json").write_text(json.dumps(request))
            self._run(folder)
            with np.load(folder / "rows.npz") as rows:
                return [rows[f"sequence_{i}"] for i in range(len(cases))]

    def _run(self, folder: Path) -> None:
        """Runs the child; CheckError when it does not end well."""
        log = folder / "stderr.txt"
        # gdb, if there is one, would be started for a backtrace and take minutes.
        env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        with log.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(folder / "request.json")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=env,
            )
            try:
                code: int | None = child.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        if code == 0 and (folder / "rows.npz").exists():
            return
        how = f"gave no answer within {self.timeout_s:.0f} s" if code is None else ended(code)
        raise CheckError(
            f"{self.path}: llama.cpp {how}; if other files pass, its metadata or tensors "
            f"are not what llama.cpp expects. Its last lines:\n{tail(log)}"
        )


def plain_token(metadata: Mapping[str, Any]) -> int:
    """Id of a token whose text is complete on its own: a letter, or else the end of text."""
    for number, text in enumerate(metadata["tokenizer.ggml.tokens"]):
        if text.isascii() and text.isalpha():
            return number
    return int(metadata["tokenizer.ggml.eos_token_id"])


def ended(code: int) -> str:
    """How a process with this exit code ended, in words."""
    name = f"signal {-code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {name}"


def tail(log: Path) -> str:
    """The last lines of a log, indented, preceded by lines further up that name an error."""
    lines = [s.rstrip() for s in log.read_text(errors="replace").splitlines() if s.strip()]
    before, last = lines[:-TAIL_LINES], lines[-TAIL_LINES:]
    telling = [s for s in before if any(word in s for word in TELLING)][-TAIL_LINES:]
    return "\n".join(f"    {s[:200]}" for s in telling + last) or "    (it wrote nothing)"

"""Layer 2 in the real engine: two ranks agree with one, and what is wrong ends all of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import broken_headers
import numpy as np
import pytest
from test_loader_ranks import KINDS, wide_sample

from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.loading.prepare import prepare

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128,
                "max_num_seqs": 1, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": True}
    llm = LLM(model=sys.argv[1], **(defaults | options))
    # Top-k is 16: the longer prompt goes through the indexer.
    scores = []
    for prompt in (range(3, 15), range(40, 80)):
        (answer,) = llm.generate(
            [{"prompt_token_ids": list(prompt)}],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=8, logprobs=8),
            use_tqdm=False,
        )
        rows = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
        scores += [{str(t): e.logprob for t, e in row.items()} for row in rows]
    print("SCORES", json.dumps(scores), flush=True)
"""
# The workers of an engine share two cores here, and must not bind to one.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# In every process of the engine: the file changes when a rank has loaded some of it.
CHANGE = """
import os
from glm5lab.loading import streaming
original = streaming.Streamer._put
def _put(self, copy, future):
    if copy.part.tensor.name == os.environ["CHANGE_AT"]:
        os.truncate(os.environ["CHANGE_FILE"], int(os.environ["CHANGE_SIZE"]))
    return original(self, copy, future)
streaming.Streamer._put = _put
"""


def engine(
    file: Path, env: dict[str, str] | None = None, error: str = "", **options: Any
) -> tuple[int, str, float]:
    """Exit code and output of an engine in processes of its own.

    The third value is how many seconds after the first line with `error` the last process ended.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", ENGINE, file, json.dumps(options)],
        env={**os.environ, **SETTINGS, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    guard = threading.Timer(300, os.killpg, (child.pid, signal.SIGKILL))
    guard.start()
    lines, failed = [], None
    assert child.stdout is not None
    for line in child.stdout:  # ends when the last process has closed it
        lines.append(line)
        if failed is None and error and error in line:
            failed = time.monotonic()
    code = child.wait()
    guard.cancel()
    return code, "".join(lines), time.monotonic() - failed if failed else 0.0


def scores(file: Path, **options: Any) -> list[dict[str, float]]:
    """Log-probabilities of the likeliest tokens, row by row."""
    code, output, _ = engine(file, **options)
    assert code == 0, output[-4000:]
    line = next(line for line in output.splitlines() if line.startswith("SCORES "))
    found: list[dict[str, float]] = json.loads(line.removeprefix("SCORES "))
    return found


def assert_same(ours: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Within the tolerance of fp32, on the tokens that both list."""
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        both = mine.keys() & theirs.keys()
        assert len(both) >= 7
        np.testing.assert_allclose([mine[t] for t in both], [theirs[t] for t in both], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["sample_mix", "sample_share"])
def test_two_ranks_say_what_one_says(sample, request, tmp_path, monkeypatch):
    file = request.getfixturevalue(sample)
    one = scores(file)
    monkeypatch.setenv("GLM5LAB_LOAD_REPORT", str(tmp_path / "load.json"))
    assert_same(scores(file, tensor_parallel_size=2), one)
    reports = [json.loads((tmp_path / f"load.rank{n}.json").read_text()) for n in range(2)]
    whole = open_gguf(file).nbytes
    for report in reports:
        assert report["ranks"] == 2
        assert report["bytes_read"] < whole
        assert len(report["parameters"]) == 89 or sample == "sample_share"
        assert all(p["sources"] for p in report["parameters"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_say_what_numbers_say_on_one_rank_and_on_two(kind, tmp_path):
    """Tensor parallel and expert parallel; GGUF blocks are dequantized for each product here."""
    file = wide_sample(tmp_path, kind, width=256)  # slices of experts cut blocks
    plain = scores(file)
    assert_same(scores(file, quantization="glm5lab"), plain)
    for ep in (False, True):
        options = {"tensor_parallel_size": 2, "enable_expert_parallel": ep}
        assert_same(scores(file, quantization="glm5lab", **options), plain)


@pytest.mark.slow
def test_experts_of_plain_numbers_can_be_spread_on_a_cpu(sample_share):
    """vLLM's own CPU experts take any expert's number as if it were there."""
    spread = scores(sample_share, tensor_parallel_size=2, enable_expert_parallel=True)
    assert_same(spread, scores(sample_share))


def damaged(folder: Path, sample: Path, name: str, at: int, value: bytes) -> Path:
    """A copy of a one-file sample with some bytes of a tensor changed."""
    path = Path(shutil.copy(sample, folder / sample.name))
    tensor = open_gguf(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(tensor.offset + at)
        file.write(value)
    return path


def ranks_that_said(output: str, text: str) -> set[str]:
    """Which workers logged a line with this text."""
    lines = [line for line in output.splitlines() if text in line]
    return {rank for rank in ("Worker_TP0", "Worker_TP1") for line in lines if rank in line}


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_damage_in_one_ranks_share_is_every_ranks_error(tmp_path, sample_f32, packed):
    name = "blk.2.ffn_up_exps.weight"
    sample = write_sample(tmp_path / "packed", types="q8_0") if packed else sample_f32
    kind, row = ("Q8_0", 256 // 32 * 34) if packed else ("F32", 256 * 4)
    last = (11 * 256 + 255) * row  # the last expert's last row: rank 1 alone reads it
    value = np.float16(np.nan) if packed else np.float32(np.inf)
    file = damaged(tmp_path, sample, name, last, value.tobytes())
    text = f"tensor '{name}' ({kind}) is damaged: infinite or no number at matrix 11, row 255"
    options: dict[str, Any] = {"quantization": "glm5lab"} if packed else {}
    code, output, seconds = engine(file, error=text, tensor_parallel_size=2, **options)
    assert code != 0
    assert ranks_that_said(output, text) == {"Worker_TP0", "Worker_TP1"}, output[-4000:]
    assert "rank 1 could not load" in output
    assert seconds < 30  # no rank waits for one that is gone


@pytest.mark.slow
@pytest.mark.parametrize("mistake", broken_headers.MISTAKES)
def test_a_wrong_header_is_every_ranks_error(tmp_path, sample_f32, mistake):
    """A file that became another one, of the same size, since its folder was prepared."""
    file = Path(shutil.copy(sample_f32, tmp_path))
    folder = prepare(file, tmp_path / "prepared")
    broken_headers.make(file, mistake)
    text = broken_headers.MISTAKES[mistake].says[0]
    code, output, seconds = engine(folder, error=text, tensor_parallel_size=2)
    assert code != 0
    assert ranks_that_said(output, text) == {"Worker_TP0", "Worker_TP1"}, output[-4000:]
    assert file.name in output
    assert seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize("change", ["truncated", "removed"])
def test_a_file_that_changes_while_it_loads_ends_all_ranks(tmp_path, sample_f32, change):
    first = write_sample(tmp_path / "model", "full", "f32", shards=3)
    last = open_gguf(first).tensors["blk.4.ffn_down_exps.weight"]
    (tmp_path / "site").mkdir()
    code = CHANGE
    if change == "removed":
        code = code.replace('os.truncate(os.environ["CHANGE_FILE"], ', "remove(").replace(
            "import os\n",
            "import os\ndef remove(size):\n"
            "    if os.path.exists(os.environ['CHANGE_FILE']):\n"
            "        os.unlink(os.environ['CHANGE_FILE'])\n",
        )
    # Python runs this in every process that has the folder on its path, workers included.
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import importlib.abc, sys\n"
        "class Hook(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'glm5lab.loading.loader' and not hasattr(self, 'done'):\n"
        "            self.done = True\n"
        f"            exec({code!r}, {{}})\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    env = {
        "PYTHONPATH": f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}",
        "CHANGE_AT": "blk.0.attn_q_a.weight",
        "CHANGE_FILE": str(last.path),
        "CHANGE_SIZE": str(last.offset),
    }
    text = "ends inside tensor" if change == "truncated" else "cannot be opened at tensor"
    returncode, output, seconds = engine(first, env, text, tensor_parallel_size=2)
    assert returncode != 0
    assert ranks_that_said(output, text) == {"Worker_TP0", "Worker_TP1"}, output[-4000:]
    assert Path(last.path).name in output
    assert seconds < 30  # no rank waits for one that is gone

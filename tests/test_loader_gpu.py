"""Layer 4 on GPUs: an engine whose weights stay blocks, beside one of the same numbers in bf16.

What bf16 alone costs is measured in the same run: the engine of plain numbers against HF in fp32.
An engine of blocks may be `SPREADS` times as far from HF on average, since its kernels round
activations to 8 bits besides; and two GPUs as far from one.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from check_prompts import prompts_of
from children import printed
from packed import random_quantizer
from test_loader_engine import ENGINE
from test_loader_layers import SETTINGS as GPU
from test_loader_ranks import KINDS, wide_sample

from glm5lab.check.f32_gguf import write_float32
from glm5lab.check.run import LazyHf
from glm5lab.gguf.reader import open_gguf

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SPREADS = 4.0
# The least top-k of the backend. Prompts are shorter: no near-tie can flip among selected rows.
TOP_K = 128
LENGTHS = [8, 40, 100]
# A small part of the GPU each: several engines at once.
SETTINGS = {
    **{"dtype": "bfloat16", "attention_backend": "TRITON_MLA_SPARSE", "max_logprobs": -1},
    **{"gpu_memory_utilization": 0.05},
}


def rows_of(file: Path, **options: object) -> np.ndarray:
    """Log-probabilities of the whole vocabulary after every prompt token but the first."""
    code = ENGINE.replace("logprobs=8", "logprobs=-1").replace(
        "(range(3, 15), range(40, 80))", repr([list(case.prompt) for case in prompts(file)])
    )
    arguments = ["-c", code, file, json.dumps(SETTINGS | options)]
    rows, _ = printed("SCORES", arguments, GPU, timeout=500)
    return np.array([[row[str(token)] for token in range(len(row))] for row in rows])


def prompts(file: Path) -> list:
    return list(prompts_of(file, LENGTHS))


def hf_rows(file: Path) -> np.ndarray:
    """The same of HF transformers in fp32, from the dequantized weights."""
    judge = LazyHf(file)
    return np.concatenate([judge(case).logprobs for case in prompts(file)])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Mean difference of log-probabilities, over the tokens that matter (above e^-10)."""
    assert a.shape == b.shape
    likely = b > -10
    return float(np.abs(a - b)[likely].mean())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_say_what_their_numbers_say(kind, tmp_path, monkeypatch):
    # Borders between two ranks lie inside blocks of 256; as many experts as vLLM's kernels know.
    monkeypatch.setattr("glm5lab.gguf.quantize._quantize_chunk", random_quantizer)
    file = wide_sample(tmp_path / "blocks", kind, width=256, experts=16, index_topk=TOP_K)
    plain = tmp_path / "plain.gguf"
    write_float32(open_gguf(file).files, plain)
    ranks = [{"tensor_parallel_size": 2, "enable_expert_parallel": ep} for ep in (False, True)]
    with ThreadPoolExecutor() as pool:
        engines = [pool.submit(rows_of, path) for path in (plain, file)]
        if torch.cuda.device_count() > 1:
            engines += [pool.submit(rows_of, file, **options) for options in ranks]
        expected = hf_rows(file)
        numbers, blocks, *divided = (engine.result() for engine in engines)
    spread, found = distance(numbers, expected), distance(blocks, expected)
    print(f"{kind}: bf16 {spread:.5f}, blocks {found:.5f}")
    assert found <= SPREADS * spread
    for options, rows in zip(ranks, divided, strict=False):
        two = distance(rows, blocks)
        print(f"{kind}: two GPUs, expert parallel {options['enable_expert_parallel']}: {two:.5f}")
        assert two <= SPREADS * spread

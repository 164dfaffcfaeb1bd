"""The side that is checked: log-probabilities from the real vLLM engine, in this process."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from glm5lab.check.cases import Candidates, Case
from glm5lab.check.progress import say
from glm5lab.errors import CheckError, Glm5labError

FULL_VOCABULARY = 4096  # up to here every token is compared, beyond the engine's TOP most likely
TOP = 64
ROOM = 8  # spare tokens of context
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: bit-stable, and an error stays visible
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


def engine_rows(
    file: str | Path, prompts: Sequence[Case], new_tokens: int, dtype: str, **llm_options: Any
) -> tuple[list[Candidates], str]:
    """Log-probabilities of every prompt row and of a greedy continuation, one prompt at a time.

    Args:
        file: GGUF file (any shard), handed to `vllm.LLM` as it is.
        prompts: what to feed.
        new_tokens: tokens to generate; all but the last are fed and give a row each.
        dtype: the engine's.
        llm_options: further arguments of `vllm.LLM`.

    Returns:
        One entry a prompt, whose case holds the generated tokens that were fed; and the name of
        the attention backend that the engine selected.

    Raises:
        CheckError: vLLM is missing, or the engine did not start.
    """
    longest = max(len(case.prompt) for case in prompts) + new_tokens
    with running(file, longest, dtype, **llm_options) as llm:
        vocab_size = llm.model_config.get_vocab_size()
        backend = attention_backend(llm)
        say(f"engine: selected {backend}")
        results = []
        for case in prompts:
            say(f"engine: prompt of {len(case.prompt)} tokens")
            results.append(one_prompt(llm, case, new_tokens, vocab_size))
    return results, backend


@contextmanager
def running(file: str | Path, longest: int, dtype: str, **options: Any) -> Iterator[Any]:
    """A `vllm.LLM` for single short prompts; everything it holds is released afterwards."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    llm = None
    import torch

    set_num_threads = torch.set_num_threads  # replaced by vLLM's CPU worker, for good
    try:
        say("engine: starting")
        defaults: dict[str, Any] = {
            "enforce_eager": True,
            "max_logprobs": -1,
            "max_model_len": longest + ROOM,
            "max_num_batched_tokens": longest + ROOM,  # a prompt is never chunked
            "max_num_seqs": 1,
            "kv_cache_memory_bytes": 256 << 20,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        with quiet_vllm():
            try:
                from vllm import LLM

                llm = LLM(model=str(file), dtype=dtype, **(defaults | options))
            except ImportError as error:
                raise CheckError(f"the engine needs vllm ({error}); run `make setup`") from error
            except Glm5labError:
                raise
            except Exception as error:
                raise CheckError(
                    f"{file}: the engine did not start: {type(error).__name__}: {error}"
                ) from error
            yield llm
    finally:
        release(llm)
        torch.set_num_threads = set_num_threads
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def quiet_vllm() -> Iterator[None]:
    """Only vLLM's errors reach the terminal, unless VLLM_LOGGING_LEVEL asks for more."""
    before = logging.root.manager.disable
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        # vLLM sets up its handlers while it starts, so there is none to quiet beforehand.
        logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's use of torch
            yield
    finally:
        logging.disable(before)


def attention_backend(llm: Any) -> str:
    """Names of the backends that the model's attention layers were built with, by commas."""
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    names = {
        layer.get_attn_backend().get_name()
        for layer in layers
        if hasattr(layer, "get_attn_backend") and hasattr(layer, "impl")
    }
    return ", ".join(sorted(names)) or "no attention backend"


def release(llm: Any) -> None:
    """Stops an in-process engine, so that another one can start in this process."""
    core = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    if core is not None:
        core.shutdown()
    del core, llm
    gc.collect()
    try:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    except ImportError:
        return
    cleanup_dist_env_and_memory()


def one_prompt(llm: Any, case: Case, new_tokens: int, vocab_size: int) -> Candidates:
    """Runs one prompt alone; row 0 is the distribution after the prompt's first token."""
    from vllm import SamplingParams

    count = -1 if vocab_size <= FULL_VOCABULARY else TOP
    params = SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=count,
        prompt_logprobs=count,
        detokenize=False,
    )
    prompt = {"prompt_token_ids": list(case.prompt)}
    (answer,) = llm.generate([prompt], params, use_tqdm=False)
    (out,) = answer.outputs
    # Entry i of prompt_logprobs belongs to token i, so the first one is None.
    rows = [*answer.prompt_logprobs[1:], *out.logprobs]
    width = vocab_size if count == -1 else TOP
    tokens, logprobs = zip(*(best(row, width) for row in rows), strict=True)
    fed = Case(case.prompt, tuple(out.token_ids[: new_tokens - 1]))
    return Candidates(fed, np.stack(tokens), np.stack(logprobs), vocab_size)


def best(row: dict[int, Any], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The `width` most likely tokens of one position: int64 [width], float32 [width]."""
    if len(row) < width:
        raise CheckError(f"the engine gave {len(row)} log-probabilities instead of {width}")
    tokens = np.fromiter(row, np.int64, len(row))
    values = np.array([entry.logprob for entry in row.values()], np.float32)
    order = np.argsort(-values, kind="stable")[:width]
    return tokens[order], values[order]

"""One engine in a process of its own: `python -m glm5lab.gpu_check.child CASE.json OUT.json`.

The case names a model folder, options of vllm.LLM and prompts; the answers go to OUT.json.
"""

import json
import os
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from glm5lab.gpu_check.cases import HF
from glm5lab.gpu_check.turns import Turn

VOCABULARY = 16384


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token numbers, the same for the same length and seed."""
    draw = random.Random(length * 1000 + seed)
    return [draw.randrange(100, VOCABULARY - 100) for _ in range(length)]


def engine(case: dict[str, Any]) -> Any:
    """The `vllm.LLM` of a case, in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 32768,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 4 << 30,
        "gpu_memory_utilization": 0.1,
        "jit_monitor_verbose": True,
    }
    return LLM(model=case["model"], **(options | case["options"]))


def answer(llm: Any, prompts: list[list[int]], case: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy tokens, their log-probabilities and those of the prompt, all prompts at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=case["new_tokens"],
        logprobs=5,
        prompt_logprobs=0 if case.get("prompt_logprobs", True) else None,
        ignore_eos=True,
        detokenize=False,
    )
    requests = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): entry.logprob for token, entry in step.items()}
                for step in output.outputs[0].logprobs
            ],
            "prompt": [
                entry[token].logprob
                for token, entry in zip(tokens, output.prompt_logprobs or [], strict=False)
                if entry is not None
            ],
            "cached": output.num_cached_tokens,
        }
        for tokens, output in zip(prompts, outputs, strict=True)
    ]


def refereed(case: dict[str, Any]) -> dict[str, Any]:
    """The referee's answers to every prompt."""
    from glm5lab.gpu_check.hf import HfModel

    started = time.perf_counter()
    model = HfModel(Path(case["model"]), case["options"].get("dtype", "bfloat16"))
    ready = time.perf_counter()
    answers = [model.answer(prompt(length), case["new_tokens"]) for length in case["lengths"]]
    seconds = time.perf_counter() - started
    return {"started_s": ready - started, "alone": answers, "seconds": seconds}


def answers(llm: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Every prompt alone, then what the case asks for: together, again, and after a sleep."""
    prompts = [prompt(length) for length in case["lengths"]]
    result: dict[str, Any] = {"alone": [answer(llm, [tokens], case)[0] for tokens in prompts]}
    if case.get("together"):
        result["together"] = answer(llm, prompts, case)
    if case.get("again"):
        plain = case | {"prompt_logprobs": False}
        result["again"] = [
            [answer(llm, [tokens], plain)[0] for tokens in prompts] for _ in range(2)
        ]
    if case.get("sleeps"):
        llm.sleep(level=1)
        llm.wake_up()
        result["awake"] = [answer(llm, [tokens], case)[0] for tokens in prompts]
    return result


def main(case_file: str, out_file: str) -> None:
    """Run a case: its answers, then what it measures; in turns, where it names their folder."""
    case = json.loads(Path(case_file).read_text())
    started = time.perf_counter()
    if case["backend"] == HF:
        Path(out_file).write_text(json.dumps(refereed(case)))
        return
    turn = Turn(Path(case["turns"]), case["name"]) if case.get("turns") else None
    llm = engine(case)
    result: dict[str, Any] = {"started_s": time.perf_counter() - started}
    if turn is not None:
        turn.started()
    part = turn.part if turn is not None else nullcontext
    with part():
        result |= answers(llm, case)
    if case.get("speed"):
        from glm5lab.gpu_check.speed import measure

        result["speed"] = measure(llm, case["speed"], part)
    if case.get("soak"):
        from glm5lab.gpu_check.soak import soak

        with part():
            result["soak"] = soak(llm, **case["soak"])
    result["seconds"] = time.perf_counter() - started
    Path(out_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

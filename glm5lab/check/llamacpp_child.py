"""Child process of the llama.cpp referee: `python llamacpp_child.py REQUEST.json`.

Run as a file, on its own: llama.cpp ends the whole process on some wrong files. It imports
xllamacpp and numpy only. REQUEST.json holds model (path), vocab_size, sequences (lists of token
ids), sampled (a token id), context (tokens), threads and out (path of the .npz that it writes:
float32 [rows, vocab] a sequence).

Only xllamacpp's public API is used: a one-token completion of `ids[: i + 1]` that reports the
log-probabilities of the whole vocabulary is row i, and the prompt cache makes each row cost one
token. They are taken before any sampler. The sampled token itself is forced: half a UTF-8 character
would be held back, and its log-probabilities with it.
"""

import json
import sys
from typing import Any

import numpy as np


def start(request: dict[str, Any]) -> Any:
    """The llama.cpp server object, in float32 throughout and without flash attention."""
    import xllamacpp

    f32 = xllamacpp.ggml_type.GGML_TYPE_F32
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx = request["context"]
    params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = f32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_gpu_layers = 0
    params.no_op_offload = True
    params.fit_params = False
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.endpoint_slots = params.ui = False
    return xllamacpp.Server(params)


def row(server: Any, ids: list[int], vocab_size: int, sampled: int) -> np.ndarray:
    """float32 [vocab]: log-probabilities of the token after `ids`; NaN where none was given."""
    answer = server.handle_completions(
        {
            "prompt": ids,
            "max_tokens": 1,
            "logprobs": vocab_size,
            "logit_bias": [[sampled, 1000.0]],
            "cache_prompt": True,
        }
    )
    if not (answer.get("choices") and answer["choices"][0].get("logprobs")):
        raise RuntimeError(f"no log-probabilities after {len(ids)} tokens: {str(answer)[:300]}")
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    out = np.full(vocab_size, np.nan, np.float32)
    out[[entry["id"] for entry in top]] = [entry["logprob"] for entry in top]
    return out


def main() -> None:
    """Answers the request; any failure ends the process with a message on stderr."""
    with open(sys.argv[1]) as file:
        request = json.load(file)
    server = start(request)
    results: dict[str, Any] = {}
    more = (request["vocab_size"], request["sampled"])
    for number, ids in enumerate(request["sequences"]):
        print(f"glm5lab: sequence {number + 1}, {len(ids)} tokens", file=sys.stderr, flush=True)
        rows = [row(server, ids[: n + 1], *more) for n in range(len(ids))]
        results[f"sequence_{number}"] = np.stack(rows)
    np.savez(request["out"], **results)


if __name__ == "__main__":
    main()

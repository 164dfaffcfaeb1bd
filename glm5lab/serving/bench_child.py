"""vLLM's own serving benchmark, once a point: `python -m glm5lab.serving.bench_child SPEC.json`.

One process for the whole grid: importing vLLM takes longer than most points. A point's figures
are one line of output that begins with MARK. Prompts are token ids, drawn anew in every process,
so that no server answers from its prefix cache; that needs a tokenizer only for its vocabulary.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

MARK = "GLM5LAB-POINT "
# Ids that every tokenizer of text has and that are none of its special ones.
SMALLEST_ID = 16
STATISTICS = ("mean", "median", "p99")


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer whose words are the ids from SMALLEST_ID to `vocabulary`, excluded."""
    from tokenizers import Tokenizer, models

    words = {f"t{number}": number for number in range(SMALLEST_ID, vocabulary)}
    Tokenizer(models.WordLevel({**words, "?": 0}, unk_token="?")).save(
        str(folder / "tokenizer.json")
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def arguments(spec: dict[str, Any], point: dict[str, int], folder: Path) -> list[str]:
    """The options of `vllm bench serve` for one point, whose requests lie in a trace file."""
    trace = folder / "trace.jsonl"
    entry = {"timestamp": 0, "input_length": point["prompt"], "output_length": point["output"]}
    lines = [
        json.dumps({**entry, "hash_ids": [point["first"] + number]})
        for number in range(point["requests"])
    ]
    trace.write_text("\n".join(lines) + "\n")
    words = ["--backend", "openai", "--base-url", spec["url"], "--endpoint", "/v1/completions"]
    words += ["--model", spec["model"], "--served-model-name", spec["model"]]
    words += ["--tokenizer", str(folder), "--dataset-name", "timed_trace", "--no-self-timed"]
    words += ["--dataset-path", str(trace), "--timed-trace-chunk-hash-size", str(point["prompt"])]
    for name in ("timestamp", "hash-ids", "input-length", "output-length"):
        words += [f"--timed-trace-label-{name}", name.replace("-", "_")]
    words += ["--num-prompts", str(point["requests"]), "--disable-shuffle", "--disable-tqdm"]
    words += ["--max-concurrency", str(point["concurrency"]), "--temperature", "0"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99"]
    # A refused request is a failed one; waiting for the server to change its mind takes minutes.
    return [*words, "--ready-check-timeout-sec", "0", "--num-warmups", "0", "--save-detailed"]


def figures(point: dict[str, int], result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of vLLM's result: its own numbers, ms and tokens a second."""
    metrics = {
        f"{name}_ms": {kind: round(float(result[f"{kind}_{name}_ms"]), 3) for kind in STATISTICS}
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    return {
        "concurrency": point["concurrency"],
        "prompt_tokens": point["prompt"],
        "output_tokens": point["output"],
        "requests": point["requests"],
        "completed": int(result["completed"]),
        "failed": int(result["failed"]),
        "seconds": round(float(result["duration"]), 3),
        **metrics,
        "requests_per_s": round(float(result["request_throughput"]), 3),
        "output_tokens_per_s": round(float(result["output_throughput"]), 2),
        "total_tokens_per_s": round(float(result["total_token_throughput"]), 2),
        "error": next((str(error) for error in result.get("errors", []) if error), ""),
    }


def main(spec_file: str) -> None:
    """Run every point of the specification."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    spec = json.loads(Path(spec_file).read_text())
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, spec["vocabulary"])
        for point in spec["points"]:
            result = bench(parser.parse_args(arguments(spec, point, folder)))
            print(f"\n{MARK}{json.dumps(figures(point, result))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

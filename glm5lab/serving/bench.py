"""Speed of a running server, measured by vLLM's own benchmark over a grid of loads."""

import datetime
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5lab.env import report
from glm5lab.errors import CheckError, InputError, printable
from glm5lab.serving.bench_child import MARK, SMALLEST_ID
from glm5lab.serving.client import Client, ClientError
from glm5lab.serving.process import LoggedProcess

POLL_S = 0.2
# Without the file at hand: ids that any model of this family has.
VOCABULARY = 512
WARM_TOKENS = 4
FIGURES = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
LOST = "the server failed some requests; their first error is in the table"


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        url: of the server.
        concurrencies: requests under way at once.
        prompts: prompt lengths in tokens.
        output: tokens of each answer.
        requests: of each point; None for four rounds of the concurrency, at least 8.
        api_key: the server's.
        model: name to ask for; None for the first that the server lists.
    """

    url: str
    concurrencies: Sequence[int] = (1, 4, 16)
    prompts: Sequence[int] = (128, 1024)
    output: int = 64
    requests: int | None = None
    api_key: str | None = None
    model: str | None = None

    def points(self) -> list[dict[str, int]]:
        """A warm-up under the heaviest load, then every point, with ids for its prompts."""
        loads = [(c, p) for p in self.prompts for c in self.concurrencies]
        heaviest = {
            "concurrency": max(self.concurrencies),
            "prompt": max(self.prompts),
            "output": min(WARM_TOKENS, self.output),
            "requests": max(self.concurrencies),
            "first": 0,
        }
        points = [heaviest]
        for concurrency, prompt in loads:
            points.append(
                {
                    "concurrency": concurrency,
                    "prompt": prompt,
                    "output": self.output,
                    "requests": self.requests or max(8, 4 * concurrency),
                    "first": points[-1]["first"] + points[-1]["requests"],
                }
            )
        return points


class BenchProcess(LoggedProcess):
    """The benchmark as a process; `figures` grows by a row for each point."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.figures: list[dict[str, Any]] = []

    def saw(self, line: str) -> None:
        """Note a point's figures."""
        if line.startswith(MARK):
            self.figures.append(json.loads(line.removeprefix(MARK)))


def bench_server(grid: Grid, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure; `show` gets each row as soon as it is there.

    Returns:
        Everything as plain values: command, date, server, client, and rows, see
        `bench_child.figures`.

    Raises:
        ClientError: the server does not answer.
        CheckError: the benchmark ended without all of its points.
    """
    client = Client(grid.url, grid.model, timeout_s=30.0, api_key=grid.api_key)
    facts = server_facts(client)
    rows = []
    for number, row in enumerate(run_points(grid, client, facts["vocabulary"])):
        if number:  # the first is the warm-up
            rows.append(row)
            show(row)
    return {
        "command": typed(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "server": facts,
        "client": client_facts(),
        "definitions": "vllm bench serve; times in ms, throughput in tokens a second",
        "rows": rows,
        "ok": all(not row["failed"] for row in rows),
    }


def typed(words: Sequence[str]) -> str:
    """The command as it was typed, without the server's key."""
    shown = [
        "***"
        if before == "--api-key"
        else "--api-key=***"
        if word.startswith("--api-key=")
        else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return shlex.join(["glm5lab", *shown])


def run_points(grid: Grid, client: Client, vocabulary: int) -> Iterator[dict[str, Any]]:
    """The rows of all points, as they come."""
    points = grid.points()
    spec = {"url": client.url, "model": client.model, "vocabulary": vocabulary, "points": points}
    # vLLM takes the key from there, and would print one that is an option.
    settings = {"OPENAI_API_KEY": grid.api_key or "", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="glm5lab-bench-") as name:
        file = Path(name) / "spec.json"
        file.write_text(json.dumps(spec))
        line = [sys.executable, "-P", "-m", "glm5lab.serving.bench_child", str(file)]
        with BenchProcess(line, Path(name) / "log", settings) as child:
            done = 0
            while child.exit_code is None or done < len(child.figures):
                yield from child.figures[done:]
                done = max(done, len(child.figures))
                time.sleep(POLL_S)
            code = child.wait()
            yield from child.figures[done:]
            if code or len(child.figures) < len(points):
                words = printable(child.first_error())
                raise CheckError(f"vLLM's benchmark ended with code {code}: {words}")


def server_facts(client: Client) -> dict[str, Any]:
    """What the server says about itself, and the model's vocabulary where its file is here."""
    model = client.model
    try:
        version = json.loads(client.text("/version"))["version"]
    except (ClientError, ValueError, KeyError):
        version = None
    return {
        "url": client.url,
        "model": model,
        "vllm": version,
        "vocabulary": _vocabulary(client.roots().get(model, "")),
    }


def _vocabulary(root: str) -> int:
    """The model's vocabulary where its file or folder lies on this machine."""
    from glm5lab.gguf.config import hf_config
    from glm5lab.loading.prepare import find_gguf, is_prepared, open_prepared

    try:
        if find_gguf(root):
            from glm5lab.gguf.reader import open_gguf

            return max(SMALLEST_ID + 1, int(hf_config(open_gguf(root))["vocab_size"]))
        if is_prepared(root):
            return max(SMALLEST_ID + 1, int(hf_config(open_prepared(root))["vocab_size"]))
    except InputError:
        pass
    return VOCABULARY


def client_facts() -> dict[str, Any]:
    """The machine that measures: for a server on it, the one that serves."""
    found = report()
    gpus = [{"name": gpu["name"], "driver": gpu["driver"]} for gpu in found["gpus"]]
    names = ("torch", "triton", "transformers")
    versions = {name: found["packages"].get(name) for name in names}
    versions |= {"glm5lab": found["glm5lab"], "engine": found["engine"]}
    return {"cpu": found["cpu"], "gpus": gpus, "versions": versions}


def comparison(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """The points that two results share, with both figures and their ratio.

    Raises:
        CheckError: they share none.
    """
    old = {_load(row): row for row in before["rows"] if row["completed"]}
    new = [row for row in after["rows"] if row["completed"] and _load(row) in old]
    rows = [_pair(old[_load(row)], row) for row in new]
    if not rows:
        raise CheckError("the two results share no point: prompt, output and concurrency differ")
    return rows


def _pair(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """One load's figures before and after, and after / before."""
    load = zip(("prompt_tokens", "output_tokens", "concurrency"), _load(new), strict=True)
    pairs = zip(FIGURES, _figures(old), _figures(new), strict=True)
    ratios = {
        name: {"before": a, "after": b, "ratio": round(b / a, 3) if a else None}
        for name, a, b in pairs
    }
    return {**dict(load), **ratios}


def _load(row: dict[str, Any]) -> tuple[int, int, int]:
    return int(row["prompt_tokens"]), int(row["output_tokens"]), int(row["concurrency"])


def _figures(row: dict[str, Any]) -> tuple[float, ...]:
    return (row["ttft_ms"]["median"], row["tpot_ms"]["median"], row["output_tokens_per_s"])


def read_result(path: Path) -> dict[str, Any]:
    """A file that `bench server --json` wrote.

    Raises:
        InputError: it cannot be read, or is another file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            _load(row), _figures(row), row["completed"]
    except OSError as error:
        raise InputError(path, error.strerror or str(error), "name a file that is there") from error
    except (ValueError, KeyError, TypeError) as error:
        fix = "name one that `glm5lab bench server --json` wrote"
        raise InputError(path, "holds no figures of a server", fix) from error
    return dict(found)

"""`glm5lab bench server` without a server: the grid, the comparison, the chart, its mistakes."""

import json
import subprocess
import sys

import pytest

from glm5lab.errors import CheckError, InputError
from glm5lab.serving.bench import Grid, comparison, read_result, typed
from glm5lab.serving.bench_child import SMALLEST_ID, arguments, write_tokenizer
from glm5lab.serving.command import option_value
from glm5lab.views.server_speed import bench_header, bench_line, comparison_text, speed_figure


def row(concurrency, prompt=128, output=64, ttft=10.0, tpot=2.0, rate=100.0, completed=8):
    times = {"mean": 1.0, "p99": 20.0}
    return {
        "concurrency": concurrency,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests": 8,
        "completed": completed,
        "failed": 8 - completed,
        "ttft_ms": {**times, "median": ttft},
        "tpot_ms": {**times, "median": tpot},
        "output_tokens_per_s": rate,
        "total_tokens_per_s": 3 * rate,
        "error": "" if completed == 8 else "Bad \x1b[2JRequest",
    }


def test_the_grid_warms_up_and_repeats_no_prompt():
    points = Grid("http://x", (1, 4), (8, 16), output=64).points()
    warm, *rest = points
    assert (warm["concurrency"], warm["prompt"], warm["output"]) == (4, 16, 4)
    assert [(p["prompt"], p["concurrency"], p["requests"]) for p in rest] == [
        (8, 1, 8), (8, 4, 16), (16, 1, 8), (16, 4, 16),
    ]  # fmt: skip
    ids = [p["first"] + n for p in points for n in range(p["requests"])]
    assert len(ids) == len(set(ids))


def test_a_point_is_exact_token_ids_of_the_vocabulary(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, 40)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    assert ids == set(range(SMALLEST_ID, 40))
    point = {"concurrency": 2, "prompt": 9, "output": 5, "requests": 3, "first": 7}
    spec = {"url": "http://x", "model": "tiny"}
    words = arguments(spec, point, tmp_path)
    assert option_value(words, "--max-concurrency") == "2"
    lines = [json.loads(x) for x in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [x["hash_ids"] for x in lines] == [[7], [8], [9]]
    assert {(x["input_length"], x["output_length"]) for x in lines} == {(9, 5)}


def test_two_results_side_by_side():
    before = {"rows": [row(1), row(4, completed=0), row(16)]}
    after = {"rows": [row(16, ttft=5.0, tpot=3.0, rate=150.0), row(4), row(2)]}
    (found,) = comparison(before, after)
    assert (found["prompt_tokens"], found["concurrency"]) == (128, 16)
    assert found["ttft_ms"] == {"before": 10.0, "after": 5.0, "ratio": 0.5}
    assert found["output_tokens_per_s"]["ratio"] == 1.5
    assert "10.00      5.00    0.50" in comparison_text([found])
    with pytest.raises(CheckError, match="share no point"):
        comparison(before, {"rows": [row(3)]})


def test_the_live_table_lines_up_and_shows_failures():
    title, _ = bench_header().splitlines()
    good, bad = bench_line(row(4)), bench_line(row(4, completed=3))
    assert len(good) == len(title)
    assert "8/8" in good
    assert "3/8" in bad
    assert bad.endswith(r"Bad \x1b[2JRequest")


def test_the_chart_has_a_line_a_prompt_length():
    result = {"rows": [row(4), row(1), row(1, prompt=1024)]}
    figure = speed_figure(result, result, names=["a", "b"])
    assert [line.name for line in figure.data] == [
        *("a 128 tokens", "a 1024 tokens", "b 128 tokens", "b 1024 tokens")
    ]
    assert [point[0] for point in figure.data[0].customdata] == [1, 4]


def test_the_key_is_not_written_down():
    words = ["bench", "server", "http://x", "--api-key", "secret", "--output", "4"]
    assert typed(words) == "glm5lab bench server http://x --api-key '***' --output 4"
    assert "secret" not in typed(["--api-key=secret"])


def test_files_that_are_no_results(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_result(tmp_path / "none")
    for text in ("{", "[]", '{"rows": [{}]}', '{"rows": [1]}'):
        (tmp_path / "x").write_text(text)
        with pytest.raises(InputError, match="holds no figures of a server"):
            read_result(tmp_path / "x")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "give either the server's URL or --compare A B"),
        (["http://127.0.0.1:9"], 1, "no answer ("),
        (["127.0.0.1:9"], 1, "no URL; write http://HOST:PORT"),
        (["http://x", "--concurrency", "0"], 2, "each count is at least 1"),
        (["http://x", "--json", "/dev/null/x"], 2, "cannot be written"),
        (["--compare", "/no/a", "/no/b"], 2, "/no/a: No such file"),
    ],
)
def test_a_mistake_is_one_line(words, code, says):
    line = [sys.executable, "-m", "glm5lab", "bench", "server", *words]
    answer = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert answer.returncode == code
    assert says in answer.stderr
    assert len(answer.stderr.splitlines()) == 1

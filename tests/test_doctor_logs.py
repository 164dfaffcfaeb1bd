"""Logs as people have them: prefixed, coloured, cut, damaged, packed, several, with secrets."""

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_logs import CASES, FAILED, FOLDER, diagnosed, log

from glm5lab.errors import InputError
from glm5lab.serving.doctor import examine
from glm5lab.serving.doctor.secrets import masked
from glm5lab.views.doctor import doctor_text

Change = Callable[[bytes, random.Random], bytes]


def _each(form: Callable[[bytes], bytes]) -> Change:
    def change(content: bytes, _random: random.Random) -> bytes:
        return b"".join(form(line) + b"\n" for line in content.splitlines())

    return change


def _json_file(line: bytes) -> bytes:
    text = line.decode("utf-8", "replace") + "\n"
    return json.dumps({"log": text, "stream": "stderr", "time": "2026-11-29T09:00:00.1Z"}).encode()


def _colours(content: bytes, rng: random.Random) -> bytes:
    """Each tag in a colour, as Ray and vLLM's own colour logging write it."""
    lines = []
    for line in content.split(b"\n"):
        end = line.find(b")") + 1 if line.startswith(b"(") else 0
        colour = b"\x1b[%d;%dm" % (rng.randrange(2), rng.randrange(30, 37))
        lines.append(colour + line[:end] + b"\x1b[0m" + line[end:])
    return b"\n".join(lines)


def _garbage_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    for _ in range(10):
        lines.insert(
            rng.randrange(len(lines) + 1), rng.randbytes(rng.randrange(1, 300)).replace(b"\n", b"")
        )
    return b"\n".join(lines)


def _progress(content: bytes, _random: random.Random) -> bytes:
    """Progress bars that end with a carriage return before every line."""
    bar = b"Fetching 2 files:  50%|#####     | 1/2 [00:01<00:01]\r"
    return b"\n".join(bar * 3 + line for line in content.split(b"\n"))


# What keeps every message: the same layer, and the same process where the log names one.
KEPT: dict[str, Change] = {
    "journald": _each(lambda line: b"Nov 29 10:11:12 gpu-node7 vllm[4123]: " + line),
    "journald-iso": _each(lambda line: b"2026-11-29T10:11:12+0100 node vllm.sh[1]: " + line),
    "compose": _each(lambda line: b"vllm-glm5-1  | " + line),
    "kubernetes": _each(lambda line: b"2026-11-29T10:11:12.123456789Z stderr F " + line),
    "docker-timestamps": _each(lambda line: b"2026-11-29T10:11:12.123456789Z " + line),
    "docker-json": _each(_json_file),
    "docker-json-tight": _each(
        lambda line: _json_file(line).replace(b'": "', b'":"').replace(b'", "', b'","')
    ),
    "quoted": _each(lambda line: b"> " + line),
    "windows": lambda content, _: content.replace(b"\r", b"").replace(b"\n", b"\r\n"),
    "colours": _colours,
    "garbage": _garbage_lines,
    "progress": _progress,
    "zero-bytes": lambda content, _: content.replace(b"\n", b"\n\x00\x00"),
    "no-last-line-end": lambda content, _: content.rstrip(b"\n"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
@pytest.mark.parametrize("name", KEPT)
def test_other_forms_of_the_same_log(name: str, case: dict[str, Any]) -> None:
    found = diagnosed(KEPT[name](log(case), random.Random(7)))
    assert (found.verdict, found.layer, found.rank) == (
        case["verdict"],
        case["layer"],
        case["rank"],
    )
    if case["evidence"] is not None:
        assert found.evidence is not None
        assert case["evidence"] in found.evidence["text"].replace('\\"', '"')


def _cut(content: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(content))
    return content[begin : rng.randrange(begin, len(content) + 1)]


def _cut_behind_evidence(content: bytes, rng: random.Random, evidence: bytes) -> bytes:
    end = content.find(b"\n", content.find(evidence)) + 1
    return content[: rng.randrange(end, len(content) + 1)]


def _other_ranks(content: bytes, rng: random.Random) -> bytes:
    """The ranks change places, in whole."""
    new = list(range(8))
    rng.shuffle(new)
    for rank in range(8):
        content = content.replace(b"_TP%d " % rank, b"_TP<%d> " % new[rank])
    return content.replace(b"<", b"").replace(b"> ", b" ")


def _interleaved(content: bytes, rng: random.Random) -> bytes:
    """Lines of one process stay in order, those of several are mixed anew."""
    lines = content.split(b"\n")
    keys = [line[: line.find(b")")] if line.startswith(b"(") else b"" for line in lines]
    for _ in range(len(lines)):
        i = rng.randrange(len(lines) - 1)
        if keys[i] and keys[i + 1] and keys[i] != keys[i + 1]:
            lines[i], lines[i + 1] = lines[i + 1], lines[i]
            keys[i], keys[i + 1] = keys[i + 1], keys[i]
    return b"\n".join(lines)


def _bytes(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(len(damaged) // 50):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


@pytest.mark.parametrize("seed", range(500))
def test_mutated_logs(seed: int) -> None:
    """No crash; where the evidence is still there and the order tells the same, the same layer."""
    rng = random.Random(seed)
    case = FAILED[seed % len(FAILED)]
    content, evidence = log(case), case["evidence"].encode()
    keeping: list[Change] = [
        *KEPT.values(),
        _interleaved,
        lambda c, r: _cut_behind_evidence(c, r, evidence),
    ]
    breaking: list[Change] = [_cut, _bytes, lambda c, r: b"\n".join(r.sample(c.split(b"\n"), 20))]
    if seed % 3 == 2:
        for change in (rng.choice(keeping), rng.choice(breaking)):
            content = change(content, rng) if content.count(b"\n") > 20 else content
        found = diagnosed(content)
        assert found.verdict in ("failed", "hang", "degraded", "healthy", "unknown")
        doctor_text(found)
        return
    content = rng.choice(keeping)(content, rng)
    if seed % 2:
        content = _other_ranks(content, rng)
    found = diagnosed(content)
    # A hang and a stall are a matter of what follows, which a cut takes away.
    if case["verdict"] != "hang":
        assert found.layer == case["layer"]
    doctor_text(found)


SECRETS = [
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "sk-proj-abcdefghijklmnop1234",
    "ghp_abcdefghijklmnopqrstuvwx1234567890",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "topsecretvalue",
]


@pytest.mark.parametrize(
    "text",
    [
        "token hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345 is wrong",
        "Authorization: Bearer topsecretvalue",
        "'authorization': 'Bearer topsecretvalue'",
        "curl -H 'X-Api-Key: topsecretvalue' http://a",
        "vllm serve m --api-key topsecretvalue --port 1",
        "vllm serve m --api-key=topsecretvalue",
        "vllm serve m --api-key 'topsecretvalue'",
        "non-default args: {'api_key': ['topsecretvalue', 'topsecretvalue2'], 'port': 1}",
        "non-default args: {'api_key': 'topsecretvalue'}",
        "vllm serve m --hf-token topsecretvalue",
        "{'hf_token': 'topsecretvalue', 'token': 'topsecretvalue'}",
        "MY_OWN_TOKEN=topsecretvalue NGC_KEY=topsecretvalue",
        "HF_TOKEN=topsecretvalue VLLM_API_KEY=topsecretvalue vllm serve",
        "AWS_SECRET_ACCESS_KEY: topsecretvalue",
        "password=topsecretvalue",
        "proxy http://user:topsecretvalue@proxy:3128/x failed",
        "https://topsecretvalue@host/x.git",
        "https://host/x?X-Amz-Signature=topsecretvalue&y=1",
        "sk-proj-abcdefghijklmnop1234 and ghp_abcdefghijklmnopqrstuvwx1234567890",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    assert not any(secret in masked(text) for secret in SECRETS)
    assert "***" in masked(text)
    cause = f"OSError: [Errno 98] Address already in use {text}\n"
    found = diagnosed(f"{cause}RuntimeError: Executor failed. {text}\n")
    shown = json.dumps(found.as_json()) + doctor_text(found)
    assert not any(secret in shown for secret in SECRETS)
    unknown = diagnosed(f"FooError: {text}\n")
    shown = json.dumps(unknown.as_json()) + doctor_text(unknown)
    assert not any(secret in shown for secret in SECRETS)


@pytest.mark.parametrize(
    "text",
    [
        "tokenizer='/models/GLM-5', skip_tokenizer_init=False, max_tokens=2048",
        "KeyError: 'model.embed_tokens.qweight_type'",
        "GPU KV cache size: 402,176 tokens, Maximum concurrency for 131,072 tokens per request",
        "Avg generation throughput: 0.0 tokens/s",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
        "api_key=None",
        "--max-num-batched-tokens 2048 --max-model-len 4096",
        "eos_token='</s>', 'num_tokens': 'many', prompt_token_ids=[1, 2, 3]",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


def test_escape_sequences_do_not_reach_the_terminal() -> None:
    found = diagnosed(b"FooError: \x1b]0;title\x07\x1b[2J a\x08b\xe2\x80\xaex\n")
    shown = doctor_text(found)
    assert shown.replace("\n", "").isprintable()


def test_packed_and_wide_logs(tmp_path: Path) -> None:
    case = CASES[0]
    forms = {
        "a.gz": gzip.compress(log(case)),
        "two.gz": gzip.compress(log(case)[:999]) + gzip.compress(log(case)[999:]),
        "cut.gz": gzip.compress(log(case))[:-9],
        "utf-16": log(case).decode().encode("utf-16"),
        "utf-8-sig": log(case).decode().encode("utf-8-sig"),
    }
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        found = examine([str(tmp_path / name)])
        assert found.evidence is not None
        assert (found.layer, found.evidence["line"]) == (case["layer"], case["line"]), name


def test_one_very_long_line(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_bytes(b"x" * 5_000_000 + b"\n" + b"10%\r" * 1_000_000 + b"\n" + log(CASES[0]))
    found = examine([str(path)])
    assert found.evidence is not None
    assert found.evidence["line"] == CASES[0]["line"] + 2


def test_several_logs(tmp_path: Path) -> None:
    """The node that only lost its peer, and the node that has the cause."""
    (tmp_path / "node0.log").write_text(
        "(Worker_TP0 pid=1) ERROR 11-29 20:12:09 [multiproc_executor.py:1057] RuntimeError: NCCL"
        " error: remote process exited or there was a network error\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    (tmp_path / "node1.log").write_text(
        "(Worker_TP9 pid=1) ERROR 11-29 20:12:01 [multiproc_executor.py:1057]"
        " torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB.\n"
    )
    found = examine([str(tmp_path / "node0.log"), str(tmp_path / "node1.log")])
    assert (found.layer, found.rank) == ("memory", "Worker_TP9")
    assert found.evidence is not None
    assert found.evidence["file"].endswith("node1.log")


@pytest.mark.parametrize("name", ["missing.log", "", "."])
def test_unreadable(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        examine([str(tmp_path / name) if name != "." else str(tmp_path)])


def test_empty(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\n \n")
    with pytest.raises(InputError, match="is empty"):
        examine([str(tmp_path / "a.log")])


@pytest.mark.parametrize(
    ("name", "code"),
    [("port-in-use.txt", 1), ("healthy-long-compile.txt", 0), ("missing.txt", 2)],
)
def test_command(name: str, code: int) -> None:
    line = [sys.executable, "-m", "glm5lab", "doctor", str(FOLDER / name), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == code
    if code == 2:
        assert done.stderr.count("\n") == 1
        assert "cannot be read" in done.stderr
    else:
        assert json.loads(done.stdout)["verdict"] == ("failed" if code else "healthy")


def test_pipe() -> None:
    line = [sys.executable, "-m", "glm5lab", "doctor", "-"]
    done = subprocess.run(line, input=log(CASES[0]), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"layer: gguf" in done.stdout
    assert b"-:28" in done.stdout

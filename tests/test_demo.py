"""`glm5lab demo` and `glm5lab serve` on files that cannot be used, and the demo's parts.

The whole demo is `make demo`; it takes about a minute and is not repeated here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_bytes import header, tensor, text_key, write
from processes import mark, marked

from glm5lab import demo
from glm5lab.errors import InputError
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample


def not_gguf(folder: Path) -> Path:
    path = folder / "notes.gguf"
    path.write_text("no model\n" * 20)
    return path


def other_architecture(folder: Path) -> Path:
    keys = [text_key("general.architecture", "llama")]
    return write(folder / "llama.gguf", header(keys, [tensor("a", (8,), 0, 0)]), b"\0" * 32)


def truncated(folder: Path) -> Path:
    path = write_sample(folder)
    os.truncate(path, path.stat().st_size - 1000)
    return path


def missing_shard(folder: Path) -> Path:
    first = write_sample(folder, shards=2)
    first.with_name(first.name.replace("00001-of", "00002-of")).unlink()
    return first


def absent(folder: Path) -> Path:
    return folder / "absent.gguf"


BAD = {
    not_gguf: "not GGUF",
    other_architecture: "architecture 'llama'",
    truncated: "truncated",
    missing_shard: "00002-of-00002",
    absent: "absent.gguf",
}


@pytest.mark.parametrize("command", ["serve", "demo"])
@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_unusable_files_end_with_one_line_and_exit_code_2(tmp_path, command, make):
    file, marker = make(tmp_path), mark()
    answer = subprocess.run(
        [sys.executable, "-m", "glm5lab", command, str(file)],
        env={**os.environ, **marker, "GLM5LAB_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2, answer.stderr
    lines = answer.stderr.splitlines()
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    # The demo says what it is doing before it fails.
    assert len(lines) == (2 if command == "demo" else 1)
    assert lines[-1].startswith("glm5lab: layer 1, file: " if command == "demo" else "glm5lab: ")
    assert str(tmp_path) in lines[-1]
    assert BAD[make] in lines[-1]
    assert "; " in lines[-1]  # cause; fix
    assert not marked(marker)


def test_the_failing_layer_is_named_and_the_cause_keeps_its_exit_code():
    named = pytest.raises(demo.DemoError, match=r"^layer 2, names: f: bad; fix$")
    with named as caught, demo.layer(2, "names", "mapping"):
        raise InputError("f", "bad", "fix")
    assert caught.value.exit_code == 2
    named = pytest.raises(demo.DemoError, match=r"^layer 3, kernel: ZeroDivisionError: .*; GLM5LAB")
    with named, demo.layer(3, "kernel", "comparing"):
        _ = 1 / 0


def test_an_incomplete_file_fails_at_layer_2(sample_f32):
    model = open_gguf(sample_f32)
    del model.tensors["blk.2.attn_k_b.weight"]
    with pytest.raises(demo.DemoError, match=r"^layer 2, names: .*blk\.2\.attn_k_b\.weight: miss"):
        demo.names_layer(model)


def work_of(folder: Path) -> demo.Work:
    return demo.Work(folder, "cpu", False, folder / "none.gguf")


def test_the_kernel_layer_prints_its_figure(tmp_path, capsys):
    with demo.kernel_process(work_of(tmp_path)) as child:
        demo.kernel_layer(child)
    line = capsys.readouterr().out
    assert line.startswith("3 kernel    Triton (in its interpreter) equals the reference: max |d| ")
    found = json.loads((tmp_path / "kernel.json").read_text())
    assert 0 < found["largest"] < 1e-5


def test_a_childs_error_is_the_layers_error(tmp_path):
    arguments = ("check", str(tmp_path / "none.gguf"), "hf", "8")
    named = pytest.raises(demo.DemoError, match=r"none\.gguf")
    with work_of(tmp_path).child(*arguments) as child, named as caught:
        demo.result_of(child)
    assert caught.value.exit_code == 2
    named = pytest.raises(demo.DemoError, match=r"KeyError.*its whole output")
    with work_of(tmp_path).child("no such part") as child, named:
        demo.result_of(child)


def test_a_model_too_large_for_the_referees_is_not_compared(sample_f32, monkeypatch):
    model = open_gguf(sample_f32)
    assert demo.too_large(model) is None
    monkeypatch.setattr(demo, "available_memory", lambda: 1 << 20)
    assert demo.too_large(model) == "float32 needs 0 GiB of memory, 0 are free"

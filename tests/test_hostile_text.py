"""What a file says reaches a terminal as text: no markup, no escape sequences, no own lines."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_bytes import header, tensor, text_key, write
from rewrite import rewrite
from typer.testing import CliRunner

from glm5lab.__main__ import app, main
from glm5lab.errors import InputError, printable
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.views.names import map_text
from glm5lab.views.plan import plan_text
from glm5lab.views.tables import inspect_text

# Markup of rich, clearing the screen, a title, an 8-bit control, a reversed file name, a line.
HOSTILE = "[/x][red]\x1b[2J\x1b]0;title\x07\x9b1m\u202egpj.exe\nnote: all is well"
WRITTEN = r"[/x][red]\x1b[2J\x1b]0;title\x07\x9b1m\u202egpj.exe\nnote: all is well"


def harmless(text: str) -> bool:
    """Whether a terminal shows it line by line."""
    lines = text.splitlines()
    return all(map(str.isprintable, lines)) and not any(
        line.startswith("note: all is well") for line in lines
    )


@pytest.fixture(scope="module")
def hostile(sample_f32: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole GLM-5 with one more tensor, of a name like no other."""
    out = tmp_path_factory.mktemp("hostile") / "model.gguf"
    name = f"blk.1.{HOSTILE}"
    norm = "blk.1.attn_norm.weight"
    return rewrite(sample_f32, out, lambda tensors: tensors | {name: tensors[norm]})


def named(path: Path) -> GgufModel:
    """The model, with the same in its metadata."""
    model = open_gguf(path)
    names = dict.fromkeys(("general.name", "tokenizer.ggml.model", "tokenizer.ggml.pre"), HOSTILE)
    return replace(model, metadata=model.metadata | names)


def test_reports_write_it_out(hostile: Path) -> None:
    model = named(hostile)
    texts = [
        inspect_text(model, width=1000),
        map_text(model)[0],
        map_text(model, tensors=True)[0],
        plan_text(model, 1, 8.0)[0],
    ]
    assert [harmless(text) for text in texts] == [True] * 4
    assert f" {WRITTEN} (glm-dsa)" in texts[0]
    assert f"{WRITTEN}, {WRITTEN}: 512 tokens" in texts[0]
    assert all(WRITTEN in text for text in texts[:3])


@pytest.mark.parametrize(
    "command", [["inspect"], ["map"], ["map", "--tensors"], ["plan"], ["inspect", "--json"],
                ["map", "--json"]],
    ids=" ".join,
)  # fmt: skip
def test_commands_write_it_out(command: list[str], hostile: Path) -> None:
    options = ["--gpus", "1", "--gpu-memory", "8"] if command == ["plan"] else []
    output = CliRunner().invoke(app, [*command, str(hostile), *options]).output
    assert output
    assert harmless(output)


def test_other_architectures_too(tmp_path: Path) -> None:
    path = write(
        tmp_path / "other.gguf",
        header(
            [text_key("general.architecture", "[bold]"), text_key("general.name", "x" * 100_000)],
            [tensor("[/bold].weight", (32,), 0, 0)],
        ),
        bytes(128),
    )
    text = inspect_text(path, width=200)
    assert "([bold])" not in text  # cut off behind the long name
    assert len(text) < 10_000
    assert "[/bold].weight" in text


def test_errors_are_one_line_that_a_terminal_shows(tmp_path: Path, capsys) -> None:
    error = InputError(tmp_path / "a\x1b[2J\n.gguf", f"tensor {HOSTILE}", "look at it")
    for text in (str(error), error.cause, str(pickle.loads(pickle.dumps(error)))):
        assert text.isprintable()
        assert WRITTEN in text
    path = write(
        tmp_path / "x.gguf",
        header(
            [text_key("general.architecture", "glm-dsa"), text_key("general.name", HOSTILE)],
            [tensor(HOSTILE, (32,), 0, 0), tensor(HOSTILE, (32,), 0, 128)],
        ),
        bytes(256),
    )
    for command in (["inspect"], ["map"], ["plan", "--gpus", "1", "--gpu-memory", "8"]):
        with pytest.raises(SystemExit) as ended:
            main([command[0], str(path), *command[1:]])
        assert ended.value.code == 2
        shown = capsys.readouterr().err.removesuffix("\n")
        assert shown.isprintable()


def test_printable_leaves_other_text_alone() -> None:
    for text in ("", "GLM-5 Q4_K_M", "智谱 GLM–5 é ✓ 😀", "a\\nb"):
        assert printable(text) == text
    assert printable("\ud800\t\u2028") == r"\ud800\t\u2028"
    every = "".join(map(chr, range(0x110000)))
    assert printable(every).isprintable()
    printable(every).encode()

"""Lines that fit a terminal, and lose nothing."""

import re
import subprocess

import pytest

from glm5lab.views.names import map_text
from glm5lab.views.plan import plan_text
from glm5lab.views.tables import inspect_text
from glm5lab.views.text import command_lines, fold, table_lines, wrapped

ROWS = [
    ("tensor", "layers", "type", "bytes"),
    ("attn_q_b.weight", "0-2,6-74/4", "IQ4_XS 1,3,15-20, Q4_K 2,4", "1,536,320"),
    ("ffn_down_exps.weight", "3-77 but 6-74/4", "F32", "12.0 MiB"),
]


@pytest.mark.parametrize("width", [None, *range(20, 90)])
def test_a_table_keeps_every_cell(width):
    lines = table_lines(ROWS, width, whole=("bytes",), right=("bytes",))
    assert max(map(len, lines)) <= (width or 1000)
    text = "\n".join(lines)
    assert all(number in text for number in ("1,536,320", "6-74/4", "15-20"))
    found = re.sub(r"[\s;]", "", text)
    for cell in (cell for row in ROWS[1:] for cell in row):
        if width is None or width >= 80:
            assert cell in text
        else:
            assert all(re.sub(r"\s", "", piece) in found for piece in fold(cell, 0))
    assert sum(len(cell) for row in ROWS[1:] for cell in row) <= sum(map(len, lines))


def test_a_command_stays_one_command():
    words = ["A=1,2,3", "vllm", "serve", "FILE", "--tensor-parallel-size", "4", "--max-len", "40"]
    for width in (20, 40, 80, 200):
        lines = command_lines(words, width)
        shell = ["sh", "-c", "printf '%s\\n' " + "\n".join(lines)]
        assert subprocess.check_output(shell, text=True).split("\n") == [*words, ""]
        assert all(len(line) <= max(width, 26) for line in lines)


def test_prose_keeps_long_words_whole():
    assert wrapped("note: " + "x" * 50 + " and more", 30) == [
        "note:",
        "  " + "x" * 50,
        "  and more",
    ]


@pytest.mark.parametrize("width", [30, 45, 60, 80, 100])
@pytest.mark.parametrize("sample", ["sample_mix", "sample_share"])
def test_reports_fit_the_terminal(width, sample, request):
    """But for single words that are longer, such as a path or a parameter's name."""
    path = request.getfixturevalue(sample)
    texts = {
        "inspect": inspect_text(path, width),
        "map": map_text(path, 2, 3, gpu=True, width=width)[0],
        "plan": plan_text(path, 6, 8.0, width=width)[0],
    }
    for name, text in texts.items():
        for line in text.splitlines():
            assert len(line) <= width or " " not in line.removesuffix(" \\").strip(), name
    words = "".join(texts["inspect"].split())
    numbers = re.findall(r"[0-9.]+ [KM]iB", inspect_text(path, 1000))
    assert len(numbers) > 30
    assert all(number.replace(" ", "") in words for number in numbers)

"""What `glm5lab inspect` prints."""

from pathlib import Path

import pytest

from glm5lab.errors import InputError
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.reader import open_gguf
from glm5lab.views.tables import human_bytes, inspect_text


def test_inspect_shows_every_role_once(sample_mix: Path) -> None:
    model = open_gguf(sample_mix)
    text = inspect_text(sample_mix, width=120)
    lines = text.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120
    assert lines[0] == str(sample_mix)
    for role in {t.role for t in model.tensors.values()}:
        assert sum(line.startswith(f"{role} ") for line in lines) == 1
    exps = next(line for line in lines if line.startswith("ffn_gate_exps"))
    assert exps.split()[:7] == [
        *("ffn_gate_exps.weight", "1-4", "12x256x256"),
        *("IQ4_XS", "1,3,", "Q4_K", "2,4"),
    ]
    assert "without tensors: number 1" in text
    assert f"{len(model.tensors)} tensors and 3 files" in text
    assert human_bytes(model.nbytes) in text
    assert text == inspect_text(model, width=120)


def test_inspect_folds_on_a_narrow_terminal(sample_mix: Path) -> None:
    lines = inspect_text(sample_mix, width=80).splitlines()
    assert max(map(len, lines[1:])) <= 80


def test_inspect_reports_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no .gguf file"):
        inspect_text(tmp_path)


def test_numbers() -> None:
    assert layer_ranges([6, 0, 2, 1, 10]) == "0-2,6,10"
    assert layer_ranges([]) == ""
    texts = [human_bytes(n) for n in (0, 1023, 1536, 5 << 40)]
    assert texts == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]

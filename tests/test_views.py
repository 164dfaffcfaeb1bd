"""What notebooks show: figures, and an engine's output kept apart."""

import logging
import os
import subprocess
import sys

import pytest

from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.views.charts import COLOURS, bytes_figure
from glm5lab.views.quiet import quiet


@pytest.mark.parametrize("kind", ["full", "share", "mtp"])
def test_the_figure_holds_every_byte_once(kind, tmp_path):
    model = open_gguf(write_sample(tmp_path, kind=kind, types="q8_0"))
    figure = bytes_figure(model)
    assert [bar.name for bar in figure.data] == list(COLOURS)
    assert sum(sum(bar.y) for bar in figure.data) * 2**20 == pytest.approx(model.nbytes)
    assert figure.data[0].x == ("0", "1", "2", "3", "4", "outside")
    assert figure.layout.xaxis.title.text == "layer"
    assert "MiB" in figure.layout.yaxis.title.text


def test_all_of_an_mtp_block_is_mtp(sample_mtp):
    """Block 4 of the sample holds attention and experts of its own."""
    model = open_gguf(sample_mtp)
    figure = bytes_figure(model)
    bars = {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figure.data}
    block = sum(tensor.nbytes for tensor in model.tensors.values() if tensor.layer == 4)
    assert bars["embedding, output, MTP"]["4"] * 2**20 == pytest.approx(block)
    assert bars["attention"]["4"] == bars["routed experts"]["4"] == 0
    assert bars["embedding, output, MTP"]["3"] == 0


def test_quiet_catches_streams_descriptors_and_children(tmp_path, capfd):
    log = tmp_path / "log"
    with quiet(log):
        print("print")
        print("error stream", file=sys.stderr)
        os.write(2, b"descriptor\n")
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
        handler = logging.StreamHandler(sys.stdout)
    print("after")
    handler.emit(logging.makeLogRecord({"msg": "a logger that kept the stream"}))
    assert capfd.readouterr() == ("after\n", "")
    assert sorted(log.read_text().splitlines()) == [
        "a logger that kept the stream",
        "child",
        "descriptor",
        "error stream",
        "print",
    ]


def test_quiet_restores_after_an_exception(tmp_path, capfd):
    with pytest.raises(RuntimeError, match="passes through"), quiet(tmp_path / "log"):
        raise RuntimeError("it passes through")
    os.write(1, b"visible\n")
    assert capfd.readouterr().out == "visible\n"

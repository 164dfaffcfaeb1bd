"""Large logs: bounded memory. Seconds are the benchmark's affair."""

from pathlib import Path

import pytest

from glm5lab.serving.doctor.bench import KINDS, LIMIT_MB, bench_doctor, bench_text, read, write_log


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_bounded(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    write_log(path, kind, 200_000_000)
    figures = read(path)
    assert figures["mb"] < LIMIT_MB
    assert (figures["verdict"], figures["layer"]) == KINDS[kind][1:]


@pytest.mark.slow
def test_one_endless_line(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("wb") as log:
        for _ in range(200):
            log.write(b"Loading weights 50%\r" * 50_000)
    assert read(path)["mb"] < LIMIT_MB


def test_benchmark() -> None:
    result = bench_doctor(0.002)
    text = bench_text(result)
    for kind, (_, verdict, layer) in KINDS.items():
        log = result["logs"][kind]
        assert (log["verdict"], log["layer"]) == (verdict, layer)
        assert log["bytes"] > 2e6
        assert log["mb"] < LIMIT_MB
        assert kind in text

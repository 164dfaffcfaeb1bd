"""Tiny GLM-5 files that several tests share, written once a session."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5lab.gguf.sample import write_sample

# A shell ignores SIGINT for its background jobs, and every child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the reason, where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _nothing_from_outside() -> Iterator[None]:
    """Tests choose their own proxies, Hub and limits; the user's would lead them elsewhere."""
    ours = {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "GLM5LAB_HEADER_LIMIT"}
    with pytest.MonkeyPatch.context() as environment:
        for name in list(os.environ):
            if name in ours or name.lower().endswith("_proxy"):
                environment.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is derived from samples stays out of the user's cache, in child processes too."""
    os.environ["GLM5LAB_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def sample_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One F32 file with an indexer on every layer; its HF twin lies in `hf` beside it."""
    return write_sample(tmp_path_factory.mktemp("full"), "full", "f32", hf=True)


@pytest.fixture(scope="session")
def sample_share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One F32 file with IndexShare; its HF twin lies in `hf` beside it."""
    return write_sample(tmp_path_factory.mktemp("share"), "share", "f32", hf=True)


@pytest.fixture(scope="session")
def sample_mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, the first without tensors, of mixed K, IQ and legacy types; HF twin too."""
    folder = tmp_path_factory.mktemp("mix")
    return write_sample(folder, "full", "mix", shards=3, metadata_first_shard=True, hf=True)


@pytest.fixture(scope="session")
def sample_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One F16 file with a multi-token prediction layer; its HF twin lies in `hf` beside it."""
    return write_sample(tmp_path_factory.mktemp("mtp"), "mtp", "f16", hf=True)

"""A prepared folder's model, opened and reconciled once for building layers and filling them."""

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.prepare import MARKER, open_prepared
from glm5lab.loading.reconcile import Reconciliation, require_complete

# What tells one state of a folder from another: its marker, and each shard's size and time.
Stamp = tuple[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Opened:
    """A model and what its headers say.

    Attributes:
        model: the opened file.
        config: its HF configuration.
    """

    model: GgufModel
    config: dict[str, Any]

    @cached_property
    def complete(self) -> Reconciliation:
        """The names of a complete GLM-5; InputError where it is none."""
        return require_complete(self.model, self.config)


def opened(folder: str | Path) -> Opened:
    """The model of a prepared folder; the same object while its files stay as they are.

    Raises:
        InputError: as `prepare.open_prepared`.
    """
    return _opened(str(folder), _stamp(Path(folder)))


def forget() -> None:
    """Let the last one go: a large vocabulary takes some 100 MB."""
    _opened.cache_clear()


@lru_cache(maxsize=1)
def _opened(folder: str, stamp: Stamp) -> Opened:
    model = open_prepared(folder)
    return Opened(model, hf_config(model))


def _stamp(folder: Path) -> Stamp:
    marker = folder / MARKER
    if not marker.is_file():
        return "", ()  # open_prepared says what is wrong, here and below
    text = marker.read_text(encoding="utf-8")
    try:
        stats = [Path(name).stat() for name in json.loads(text)["gguf"]]
    except (OSError, ValueError, KeyError, TypeError):
        return text, ()
    return text, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)

"""The folder that takes a GGUF file's place for vLLM: config, tokenizer, pointer to the weights."""

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from glm5lab import __version__
from glm5lab.env import cache_root
from glm5lab.errors import InputError
from glm5lab.gguf.chat import require_safe_template
from glm5lab.gguf.config import config_conflicts, generation_config, hf_config
from glm5lab.gguf.reader import GgufModel, open_gguf, require_glm5
from glm5lab.gguf.tokenizer import tokenizer_files, write_files
from glm5lab.gguf.url import local_path
from glm5lab.loading.reconcile import require_complete

MARKER = "glm5lab.json"


def find_gguf(path: str | Path) -> bool:
    """Whether a path is a GGUF file, or a folder that holds some and no config.json."""
    path = Path(path)
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"


def is_prepared(path: str | Path) -> bool:
    """Whether a path is a folder that `prepare` wrote."""
    return (Path(path) / MARKER).is_file()


def pointer(model: GgufModel) -> dict[str, Any]:
    """What the marker file says: the shards, and enough to notice that they have changed."""
    shards = [shard.resolve() for shard in model.files]
    return {
        "glm5lab": __version__,
        "gguf": [str(shard) for shard in shards],
        "bytes": [shard.stat().st_size for shard in shards],
        "modified_ns": [shard.stat().st_mtime_ns for shard in shards],
    }


def prepare(source: str | Path | GgufModel, folder: str | Path | None = None) -> Path:
    """Write config.json, generation_config.json, tokenizer files and the pointer to the weights.

    Args:
        source: any shard of a GLM-5 GGUF model, its folder, or the model when it is open.
        folder: where to write; None for a folder in the cache, which is reused while the shards
            stay as they are.

    Returns:
        The folder; vLLM and transformers take it as a model (transformers without weights).

    Raises:
        InputError: the file cannot be read, is not GLM-5, or is incomplete; its chat template is
            not safe; or the folder cannot be written.
    """
    model = source if isinstance(source, GgufModel) else open_gguf(local_path(source, "prepare"))
    require_glm5(model)
    files = {
        "config.json": hf_config(model),
        "generation_config.json": generation_config(model),
        # The marker comes last: a folder that has it is complete.
        MARKER: pointer(model),
    }
    for conflict in config_conflicts(model):
        logging.getLogger(__name__).warning("%s: IndexShare conflict: %s", model.path, conflict)
    try:
        return _write_cached(model, files) if folder is None else _write(model, files, folder)
    except OSError as error:
        raise InputError(
            folder or cache_root(),
            f"cannot be written: {error.strerror or error}",
            "name a folder that can" if folder else "point GLM5LAB_CACHE to a folder that can",
        ) from error


def _write_cached(model: GgufModel, files: dict[str, Any]) -> Path:
    # Contents are part of the key: another glm5lab may write others for the same shards.
    key = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    target = cache_root() / "prepared" / f"{model.path.stem}-{key}"
    if not is_prepared(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may prepare the same file: each writes apart, the first rename wins.
        work = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=target.parent))
        try:
            _write(model, files, work)
            work.rename(target)
        except OSError:
            if not is_prepared(target):
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _write(model: GgufModel, files: dict[str, Any], folder: str | Path) -> Path:
    folder = Path(folder)
    require_complete(model, files["config.json"])
    if folder.exists() and not folder.is_dir():
        raise InputError(folder, "is a file", "name a folder to write to")
    tokenizer = tokenizer_files(model)  # before the template, whose trials take its tokens
    require_safe_template(model)
    folder.mkdir(parents=True, exist_ok=True)
    write_files(tokenizer, folder)
    for name, value in files.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def open_prepared(folder: str | Path) -> GgufModel:
    """The model that a prepared folder points to.

    Raises:
        InputError: the folder was not prepared, or its shards have moved or changed.
    """
    path = Path(folder) / MARKER
    if not path.is_file():
        raise InputError(folder, f"has no {MARKER}", "make it with `glm5lab prepare FILE FOLDER`")
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        shards = list(zip(marker["gguf"], marker["bytes"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        fix = "run `glm5lab prepare` again"
        raise InputError(path, f"is damaged ({type(error).__name__}: {error})", fix) from error
    for name, size in shards:
        shard = Path(name)
        if not shard.is_file() or shard.stat().st_size != size:
            raise InputError(
                shard,
                f"is not the {size} byte file that {folder} was prepared from",
                "run `glm5lab prepare` again on the file where it is now",
            )
    return open_gguf(marker["gguf"][0])

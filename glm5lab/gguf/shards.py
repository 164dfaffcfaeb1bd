"""Which files belong to a GGUF model: NAME.gguf, or NAME-00001-of-00003.gguf and its sisters."""

import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath

from glm5lab.errors import InputError
from glm5lab.gguf.header import parse_header
from glm5lab.gguf.source import FileSource
from glm5lab.gguf.split import check_count

SHARD = re.compile(r"(?P<base>.*)-(?P<no>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)
MAX_LISTED = 8
# The largest published set has 1,524 files; a name may claim 99,999 of them.
MAX_SHARDS = 4096


def find_shards(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` names, the first shard first.

    Args:
        path: a single file, any shard of a set, or a folder that holds exactly one set.

    Raises:
        InputError: nothing there, several models in the folder, or shards missing.
    """
    path = path.expanduser()
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if SHARD.fullmatch(path.name) and isinstance(error, FileNotFoundError):
            sisters = _sisters(path)
            if any(os.path.exists(s) for s in sisters):
                return _complete(path, sisters)
        raise InputError(
            path,
            _why(path, error),
            "check the path: name a .gguf file, any of its shards, or the folder",
        ) from error
    if stat.S_ISDIR(mode):
        return _in_folder(path)
    if not stat.S_ISREG(mode):
        raise InputError(path, "not a regular file (a pipe or device)", "save it as a file first")
    if SHARD.fullmatch(path.name):
        return _complete(path, _sisters(path))
    return (path,)


def shard_name(base: str, index: int, total: int) -> str:
    """File name of shard `index` (from 0); file names count from 1."""
    return f"{base}-{index + 1:05d}-of-{total:05d}.gguf"


def _why(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        if path.is_symlink():
            return f"a link to {os.readlink(path)}, which is not there"
        return "no such file or folder"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def sister_names(name: str, place: str | PurePath) -> tuple[str, ...]:
    """File names of all shards of the set that a shard's name belongs to, () for a single file.

    Args:
        name: the shard's file name.
        place: what an error names: its path or URL.
    """
    match = SHARD.fullmatch(name)
    if match is None:
        return ()
    total, number = int(match["total"]), int(match["no"])
    if not 1 <= number <= total:
        raise InputError(
            place,
            f"shard {number} of {total} cannot be (file names count from 1)",
            "give the file its original name",
        )
    if total > MAX_SHARDS:
        cause = f"its name says {total} shards, above the limit of {MAX_SHARDS}"
        raise InputError(place, cause, "give the file its original name")
    suffix = name[-5:]
    return tuple(shard_name(match["base"], i, total)[:-5] + suffix for i in range(total))


def missing_shards(
    place: str | PurePath, missing: Sequence[str], total: int, fix: str, why: str = ""
) -> InputError:
    """The error for a set that is not complete; `missing` are file names, `why` how it shows."""
    shown = ", ".join(missing[:MAX_LISTED])
    more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
    verb = "is" if len(missing) == 1 else "are"
    cause = f"{len(missing)} of its {total} shards {verb} missing{why}: {shown}{more}"
    return InputError(place, cause, fix)


def one_model(paths: Iterable[str], place: str | PurePath, show: Callable[[str], object]) -> str:
    """The first file of the one model that `paths` hold.

    Args:
        paths: files of a folder (or below it), with / between folders.
        place: the folder, for messages.
        show: how a message names one of the files.

    Raises:
        InputError: files of several models.
    """
    sets: dict[str, str] = {}
    for path in paths:
        match = SHARD.fullmatch(path)
        key = f"{match['base']}-*-of-{match['total']}.gguf" if match else path
        sets[key] = min(path, sets.get(key, path))
    if len(sets) == 1:
        return next(iter(sets.values()))
    shown = ", ".join(list(sets)[:MAX_LISTED])
    more = f" and {len(sets) - MAX_LISTED} more" if len(sets) > MAX_LISTED else ""
    raise InputError(
        place,
        f"the folder holds {len(sets)} models: {shown}{more}",
        f"name one of them, e.g. {show(next(iter(sets.values())))}",
    )


def _sisters(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(name) for name in sister_names(path.name, path))


def _complete(path: Path, sisters: tuple[Path, ...]) -> tuple[Path, ...]:
    missing = [s.name for s in sisters if not os.path.exists(s)]
    if missing:
        _compare_count(sisters)
        them = "it" if len(missing) == 1 else "them"
        raise missing_shards(path, missing, len(sisters), f"put {them} into {path.parent}")
    return sisters


def _compare_count(sisters: Sequence[Path]) -> None:
    """InputError where the first shard there says that the set has another number of them.

    The missing ones never were, then: the file was renamed.
    """
    there = next(s for s in sisters if os.path.exists(s))
    try:
        with FileSource(there) as source:
            header = parse_header(source)
    except InputError:
        return  # the shards that are missing are the plainer fault
    check_count(there, header, sisters.index(there), len(sisters))


def _in_folder(folder: Path) -> tuple[Path, ...]:
    try:
        names = sorted(n for n in os.listdir(folder) if n.lower().endswith(".gguf"))
    except OSError as error:
        raise InputError(
            folder, f"cannot be read: {error.strerror or error}", "check its permissions"
        ) from error
    if not names:
        raise InputError(folder, "the folder holds no .gguf file", _look_below(folder))
    return find_shards(folder / one_model(names, folder, lambda name: folder / name))


def _look_below(folder: Path) -> str:
    """Repositories often keep each quantization in a folder of its own: name those."""
    below = sorted({p.parent.name for p in folder.glob("*/*.gguf")})
    if below:
        return f"name one of its subfolders that do: {', '.join(below[:MAX_LISTED])}"
    return "name a .gguf file, or the folder that holds its shards"

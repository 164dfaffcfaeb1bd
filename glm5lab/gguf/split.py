"""Do the files of a set belong together? What is harmless is a warning, the rest an InputError.

llama.cpp's splitter numbers shards from 0 in `split.no` and from 1 in file names, writes
`split.count` and `split.tensors.count` into each, and all other metadata into the first alone.
Publishers' own tools deviate: they count from 1, write 0 or a wrong total.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from glm5lab.errors import InputError, brief
from glm5lab.gguf.header import Header
from glm5lab.gguf.not_gguf import DOWNLOAD_AGAIN
from glm5lab.gguf.tensors import Tensor


def check_numbers(shards: Sequence[PurePath], headers: Sequence[Header]) -> list[str]:
    """Compare split.count and split.no with the file names, and the shards' architectures.

    Returns:
        Warnings, a sentence each.

    Raises:
        InputError: a shard that is renamed, swapped, there twice or of another model.
    """
    warnings = _check_counts(shards, headers)
    numbers = [_integer(path, h, "split.no") for path, h in zip(shards, headers, strict=True)]
    if len(shards) > 1 and numbers == list(range(1, len(shards) + 1)):
        warnings.append("split.no counts from 1; llama.cpp counts from 0")
        numbers = list(range(len(shards)))
    for index, (path, number) in enumerate(zip(shards, numbers, strict=True)):
        if number is not None and number != index:
            raise _renamed(shards, index, number, numbers.count(number) > 1)
        _check_architecture(path, shards[0], headers[index], headers[0])
    return warnings


def _check_counts(shards: Sequence[PurePath], headers: Sequence[Header]) -> list[str]:
    zero: list[str] = []
    for index, (path, header) in enumerate(zip(shards, headers, strict=True)):
        if check_count(path, header, index, len(shards)) == 0 and len(shards) > 1:
            zero.append(path.name)
    if not zero:
        return []
    return [f"split.count is 0 in {', '.join(zero[:3])}; its file name says {len(shards)} shards"]


def check_count(path: PurePath, header: Header, index: int, total: int) -> int | None:
    """The header's split.count.

    Args:
        path: the shard.
        header: its header.
        index: the shard's number by its file name, from 0.
        total: how many there are by its file name.

    Raises:
        InputError: the metadata has another number of shards (0 is none) than the file name.
    """
    count = _integer(path, header, "split.count")
    if count in (None, 0, total):
        return count
    number = _integer(path, header, "split.no")
    of = f"shard {number + 1} of {count}" if number is not None else f"one of {count} shards"
    raise InputError(
        path,
        f"its metadata says it is {of}, its file name says {index + 1} of {total}",
        f"name the shards NAME-00001-of-{count:05d}.gguf and so on, all in one folder",
    )


def _integer(path: PurePath, header: Header, key: str) -> int | None:
    value = header.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise InputError(path, f"{key} is {brief(value)}, not a number of shards", DOWNLOAD_AGAIN)
    return value


def _renamed(shards: Sequence[PurePath], index: int, number: int, twice: bool) -> InputError:
    says = (
        f"its metadata says shard {number + 1} (split.no {number}, counted from 0), "
        f"its file name says {index + 1} of {len(shards)}"
    )
    if twice and number < len(shards):
        says += f": the set holds {shards[number].name} twice"
    return InputError(
        shards[index],
        says,
        "the shard is renamed or swapped: download it again under its own name",
    )


def _check_architecture(path: PurePath, first: PurePath, header: Header, head: Header) -> None:
    ours = head.metadata.get("general.architecture")
    found = header.metadata.get("general.architecture", ours)
    if found != ours:
        raise InputError(
            path,
            f"a shard of another model: its architecture is {found!r}, "
            f"that of {first.name} is {ours!r}",
            DOWNLOAD_AGAIN,
        )
    if header.byte_order != head.byte_order:
        raise InputError(
            path,
            f"a shard of another model: {header.byte_order}-endian, {first.name} is "
            f"{head.byte_order}-endian",
            DOWNLOAD_AGAIN,
        )


def merge(shards: Sequence[PurePath], located: Sequence[list[Tensor]]) -> dict[str, Tensor]:
    """All shards' tensors by name, in file order; InputError where a name occurs twice."""
    tensors: dict[str, Tensor] = {}
    for path, found in zip(shards, located, strict=True):
        for t in found:
            if t.name in tensors:
                other = tensors[t.name].path.name
                place = f"twice in {other}" if other == path.name else f"in {other} and {path.name}"
                cause = f"tensor {t.name!r} occurs {place}"
                if other != path.name:
                    cause += ": one of them is there twice or of another model"
                raise InputError(path, cause, DOWNLOAD_AGAIN)
            tensors[t.name] = t
    return tensors


def check_total(shards: Sequence[PurePath], headers: Sequence[Header], total: int) -> list[str]:
    """Compare split.tensors.count with the `total` of tensors there.

    Shards that agree on a wrong number come from a careless tool: a warning. Shards that disagree,
    none of whose numbers is right, were not written together.
    """
    if len(shards) < 2:
        return []
    stated = {
        p: h.metadata.get("split.tensors.count") for p, h in zip(shards, headers, strict=True)
    }
    counts = {p: n for p, n in stated.items() if isinstance(n, int)}
    if not counts or set(counts.values()) == {total}:
        return []
    usual = Counter(counts.values()).most_common(1)[0][0]
    if len(set(counts.values())) > 1 and total not in counts.values():
        odd = next(p for p, n in counts.items() if n != usual)
        raise InputError(
            odd,
            f"a shard of another model: it announces {counts[odd]} tensors for the whole set "
            f"(split.tensors.count), the others {usual}; there are {total}",
            DOWNLOAD_AGAIN,
        )
    wrong = [p.name for p, n in counts.items() if n != total]
    number = next(n for n in counts.values() if n != total)
    return [
        f"split.tensors.count is {number} in {', '.join(wrong[:3])}"
        f"{' and more' if len(wrong) > 3 else ''}; the set holds {total} tensors"
    ]

"""Ways to damage a GGUF file, or a set of them.

A mutation changes drafts in place (structure), or a header's bytes (anything). All randomness comes
from the given generator, so a case is its seed and its number.
"""

import struct
from collections.abc import Callable
from random import Random

from glm5lab.fuzz.draft import Draft, Info, Key
from glm5lab.gguf.cursor import TYPE_ARRAY, TYPE_STRING

EXTREMES = (
    0, 1, 2, 0x7F, 0xFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1,
)  # fmt: skip
SCALAR_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True))
BAD_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88", b"a\0b", b"\x1b[2J\n\r", b"../" * 40)


def truncate(drafts: list[Draft], rng: Random) -> None:
    """Cut anywhere: most often inside the header, else inside the weights."""
    draft = rng.choice(drafts)
    head = len(draft.encode())
    draft.size = rng.randrange(head + 64 if rng.random() < 0.8 else head + draft.data + 1)


def counts(drafts: list[Draft], rng: Random) -> None:
    """Wrong numbers of keys or tensors."""
    draft = rng.choice(drafts)
    if rng.random() < 0.5:
        draft.n_keys = rng.choice((*EXTREMES, len(draft.keys) + rng.choice((-1, 1))))
    else:
        draft.n_tensors = rng.choice((*EXTREMES, len(draft.tensors) + rng.choice((-1, 1))))


def nested_arrays(drafts: list[Draft], rng: Random) -> None:
    """Arrays in arrays: deep, wide, or lying about both."""
    depth = rng.choice((1, 2, 4, 5, 100, 5000))
    width = rng.choice((1, 1, 3, 1 << 20, 1 << 63))
    inner = struct.pack(
        "<IQ", rng.choice((4, TYPE_STRING, TYPE_ARRAY, 77)), rng.choice((0, *EXTREMES))
    )
    value = struct.pack("<IQ", TYPE_ARRAY, width) * depth + inner + bytes(rng.randrange(64))
    _put(drafts[0], rng, rng.choice(drafts[0].keys).name, TYPE_ARRAY, value)


def bad_text(drafts: list[Draft], rng: Random) -> None:
    """Text that is not UTF-8, or that a terminal or a path would obey."""
    draft, bad = rng.choice(drafts), rng.choice(BAD_UTF8)
    place = rng.choice(("key", "tensor", "value"))
    texts = [k for k in draft.keys if k.kind == TYPE_STRING]
    if place == "tensor" and draft.tensors:
        rng.choice(draft.tensors).name = bad * rng.choice((1, 3))
    elif place == "value" and texts:
        rng.choice(texts).value = struct.pack("<Q", len(bad)) + bad
    else:
        rng.choice(draft.keys).name += bad


def offsets(drafts: list[Draft], rng: Random) -> None:
    """Tensors that overlap, lie outside of the file or off the alignment."""
    infos = _infos(drafts, rng)
    info, other = rng.choice(infos), rng.choice(infos)
    info.offset = rng.choice((other.offset, other.offset + 32, info.offset + 1, *EXTREMES))


def dimensions(drafts: list[Draft], rng: Random) -> None:
    """Shapes of no size, of too many dimensions, or that overflow."""
    info = rng.choice(_infos(drafts, rng))
    choice = rng.randrange(4)
    if choice == 0:
        info.ne = [rng.choice(EXTREMES) for _ in range(rng.randrange(1, 6))]
    elif choice == 1:
        info.ne = []
    elif choice == 2:
        info.ne = list(reversed(info.ne))
    else:
        info.ne = [*info.ne[1:], rng.choice(EXTREMES)]


def twice(drafts: list[Draft], rng: Random) -> None:
    """Keys or names that occur twice, in one shard or two."""
    draft = rng.choice(drafts)
    if rng.random() < 0.5:
        draft.keys.insert(rng.randrange(len(draft.keys) + 1), rng.choice(draft.keys))
    else:
        rng.choice(_infos(drafts, rng)).name = rng.choice(_infos(drafts, rng)).name


def types(drafts: list[Draft], rng: Random) -> None:
    """GGML types that are unknown, removed or only in forks; unknown value types."""
    if rng.random() < 0.7:
        for info in rng.sample(_infos(drafts, rng), 2):
            info.type_id = rng.choice((rng.randrange(300), 1 << 31, (1 << 32) - 1))
    else:
        rng.choice(rng.choice(drafts).keys).kind = rng.choice((13, 77, (1 << 32) - 1))


def values(drafts: list[Draft], rng: Random) -> None:
    """Keys whose value is absurd, or of another type than anybody expects."""
    key = rng.choice(drafts[0].keys)
    kind = rng.choice((key.kind, *SCALAR_CODES)) if key.kind in SCALAR_CODES else 4
    choice = rng.randrange(4)
    if choice == 0:
        key.kind, key.value = TYPE_STRING, struct.pack("<Q", 3) + b"abc"
    elif choice == 1:
        count = rng.choice((0, 1, 5))
        key.kind, key.value = TYPE_ARRAY, struct.pack("<IQ", 4, count) + rng.randbytes(4 * count)
    else:
        size = struct.calcsize(SCALAR_CODES[kind])
        extreme = rng.choice(EXTREMES).to_bytes(8, "little")[:size]
        key.kind, key.value = kind, rng.choice((extreme, rng.randbytes(size), b"\xff" * size))


def tokenizer(drafts: list[Draft], rng: Random) -> None:
    """Vocabularies and merges that do not fit one another; long and missing templates."""
    names = ("tokens", "token_type", "merges", "model", "pre", "eos_token_id")
    name = b"tokenizer.ggml." + rng.choice(names).encode()
    texts = [rng.choice((b"", b"a", b"a b", b"\xff", b"<|user|>")) for _ in range(rng.randrange(9))]
    items = b"".join(struct.pack("<Q", len(t)) + t for t in texts)
    array = struct.pack("<IQ", TYPE_STRING, len(texts)) + items
    numbers = struct.pack("<IQ", 5, 512) + rng.randbytes(2048)
    long_text = rng.choice((b"{{ 1 }}", b"x", b"{% for i in range(9) %}")) * rng.choice(
        (1, 100_000)
    )
    choice = rng.randrange(4)
    if choice == 0:
        drafts[0].keys = [k for k in drafts[0].keys if k.name != name]
    elif choice == 1:
        value = struct.pack("<Q", len(long_text)) + long_text
        _put(drafts[0], rng, b"tokenizer.chat_template", TYPE_STRING, value)
    else:
        _put(drafts[0], rng, name, TYPE_ARRAY, array if choice == 2 else numbers)


def alignment(drafts: list[Draft], rng: Random) -> None:
    """Alignments that are no power of two, huge, or no number."""
    value = rng.choice((0, 1, 3, 8, 24, 64, 4096, 1 << 31, (1 << 32) - 1))
    _put(rng.choice(drafts), rng, b"general.alignment", 4, struct.pack("<I", value))


def split(drafts: list[Draft], rng: Random) -> None:
    """Shards missing, swapped, doubled, of another model, or with wrong numbers."""
    choice = rng.randrange(5)
    if choice == 0 and len(drafts) > 1:
        drafts.pop(rng.randrange(len(drafts)))
    elif choice == 1 and len(drafts) > 1:
        a, b = rng.sample(drafts, 2)
        a.name, b.name = b.name, a.name
    elif choice == 2 and len(drafts) > 1:
        a, b = rng.sample(drafts, 2)
        a.keys, a.tensors, a.data = b.keys, b.tensors, b.data
    elif choice == 3:
        drafts[0].name = rng.choice(("m-00001-of-00099.gguf", "m-00000-of-00000.gguf", "m.GGUF"))
    else:
        name = rng.choice((b"split.no", b"split.count", b"split.tensors.count"))
        kind, code = rng.choice(list(SCALAR_CODES.items()))
        _put(rng.choice(drafts), rng, name, kind, rng.randbytes(struct.calcsize(code)))


def version(drafts: list[Draft], rng: Random) -> None:
    """Other versions, and the other byte order for the counts and lengths."""
    draft = rng.choice(drafts)
    if rng.random() < 0.5:
        draft.order = ">"
    else:
        draft.version = rng.choice((0, 1, 2, 4, 0x03000000, 0xFFFFFFFF))


def flip(head: bytearray, _: list[int], rng: Random) -> None:
    """Some bytes changed, anywhere."""
    for _i in range(rng.choice((1, 1, 2, 8, 64))):
        head[rng.randrange(len(head))] = rng.randrange(256)


def lengths(head: bytearray, places: list[int], rng: Random) -> None:
    """A length, count or offset of 2^63 and the like."""
    at = rng.choice(places)
    if at + 8 <= len(head):
        head[at : at + 8] = rng.choice(EXTREMES).to_bytes(8, "little")


def splice(head: bytearray, _: list[int], rng: Random) -> None:
    """A piece removed, doubled, or replaced by noise."""
    at, count = rng.randrange(len(head)), rng.choice((1, 4, 8, 100, 5000))
    piece = rng.choice((b"", bytes(head[at : at + count]) * 2, rng.randbytes(count), bytes(count)))
    head[at : at + count] = piece


def noise(head: bytearray, _: list[int], rng: Random) -> None:
    """Nothing but noise, behind the magic or without it."""
    magic = rng.choice((b"", b"GGUF", b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"))
    head[:] = magic + rng.randbytes(rng.choice((0, 1, 30, 5000)))


STRUCTURE: tuple[Callable[[list[Draft], Random], None], ...] = (
    truncate, counts, nested_arrays, bad_text, offsets, dimensions, twice, types, values, values,
    tokenizer, alignment, split, version,
)  # fmt: skip
BYTES: tuple[Callable[[bytearray, list[int], Random], None], ...] = (flip, lengths, splice, noise)


def _put(draft: Draft, rng: Random, name: bytes, kind: int, value: bytes) -> None:
    """Set a key, in place or at a random place."""
    key = draft.find(name)
    if key is None:
        draft.keys.insert(rng.randrange(len(draft.keys) + 1), Key(name, kind, value))
    else:
        key.kind, key.value = kind, value


def _infos(drafts: list[Draft], rng: Random) -> list[Info]:
    """The tensors of some shard that has two or more; twins of nothing where no shard does."""
    lists = [d.tensors for d in drafts if len(d.tensors) > 1]
    return rng.choice(lists) if lists else [Info(b"", [1], 0, 0), Info(b"", [1], 0, 0)]

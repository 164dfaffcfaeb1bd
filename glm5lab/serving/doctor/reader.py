"""Lines of a log with their numbers: files, pipes, gzip; never more than a block in memory."""

import codecs
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from glm5lab.errors import InputError

PIPE = "-"
BLOCK = 1 << 20
# A line is kept to this length: progress bars and dumped tensors make lines of any size.
LONGEST = 1 << 16
GZIP = b"\x1f\x8b"
UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
FIX = "name a readable log of vLLM, or - for standard input"

# Escape sequences of a terminal: colours, titles, cursor movements.
ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
# What docker's json-file driver puts around a line.
DOCKER, DOCKER_END = b'{"log":', b'","stream":"'


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines: `text` has a line break after each, `numbers` the number of each.

    Pieces of a line that a progress bar wrote over have the same number.
    """

    numbers: Sequence[int]
    text: bytes


class LineSplitter:
    """Cuts blocks of bytes behind their last line, and numbers lines as `grep -n` does.

    A line beyond LONGEST that does not end in its block loses its middle, so that memory stays
    bounded.
    """

    def __init__(self) -> None:
        self.number = 1
        self._rest = b""

    def feed(self, block: bytes) -> Lines:
        """The lines that `block` completes."""
        text = self._rest + block
        end = text.rfind(b"\n") + 1
        self._rest = cut(text[end:])
        text = text[:end]
        numbers = range(self.number, self.number + text.count(b"\n"))
        self.number = numbers.stop
        return _plain(numbers, text)

    def end(self) -> Lines:
        """The last line, where the log does not end with a line break."""
        rest, self._rest = self._rest, b""
        return _plain([self.number], rest + b"\n") if rest else Lines([], b"")


def _plain(numbers: Sequence[int], text: bytes) -> Lines:
    """Lines without escape sequences, carriage returns and docker's JSON around them."""
    if DOCKER in text:
        lines = text[:-1].split(b"\n")
        text = b"\n".join(_logged(line) for line in lines) + b"\n"
    if b"\x1b" in text:
        text = ESCAPE.sub(b"", text)
    if b"\r" not in text:
        return Lines(numbers, text)
    found_numbers: list[int] = []
    found: list[bytes] = []
    for number, line in zip(numbers, text[:-1].split(b"\n"), strict=True):
        pieces = line.rstrip(b"\r").split(b"\r")
        if len(pieces) > 1:
            pieces = [piece for piece in pieces if piece]
        found_numbers += [number] * len(pieces)
        found += pieces
    return Lines(found_numbers, b"\n".join(found) + b"\n")


def _logged(line: bytes) -> bytes:
    """The message in a line of docker's json-file driver."""
    if not line.startswith(DOCKER):
        return line
    # Nearly always only quotes are escaped, and the decoder takes long.
    begin, end = len(DOCKER), line.rfind(DOCKER_END)
    text = line[begin + 1 : end].removesuffix(b"\\n").replace(b'\\"', b'"')
    if line.startswith(b'"', begin) and end > 0 and b"\\" not in text:
        return text
    try:
        message = json.loads(line)["log"].rstrip("\n")
        # It has no line break of its own, which would move the numbers of all later lines.
        return bytes(message.replace("\n", " ").encode("utf-8", "replace"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return line


def cut(line: bytes) -> bytes:
    """A line without the middle of a very long one."""
    half = LONGEST // 2
    return line if len(line) <= LONGEST else line[:half] + line[-half:]


def read_lines(name: str) -> Iterator[Lines]:
    """Lines of a file, or of standard input for `-`, a block at a time.

    Raises:
        InputError: it cannot be read, or holds nothing.
    """
    splitter, empty = LineSplitter(), True
    for block in blocks(name):
        empty = empty and not block.strip()
        yield splitter.feed(block)
    yield splitter.end()
    if empty:
        raise InputError(name, "is empty", FIX)


def blocks(name: str) -> Iterator[bytes]:
    """Contents in blocks, as UTF-8 or an encoding of which ASCII is a part.

    Raises:
        InputError: the file is missing, a folder, not readable or damaged gzip.
    """
    try:
        if name == PIPE:
            yield from _decoded(sys.stdin.buffer)
            return
        with Path(name).open("rb") as stream:
            yield from _decoded(stream)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        why = getattr(error, "strerror", None) or error
        raise InputError(name, f"cannot be read: {why}", FIX) from error


def _decoded(stream: BinaryIO | IO[bytes]) -> Iterator[bytes]:
    """Blocks without compression, without UTF-16 (as PowerShell writes it)."""
    first = _read(stream)
    if first.startswith(GZIP):
        yield from _gunzip(first, stream)
        return
    encoding = UTF16.get(first[:2])
    if encoding is None:
        yield first.removeprefix(codecs.BOM_UTF8)
        while block := _read(stream):
            yield block
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    block = first[2:]
    while block:
        yield decoder.decode(block).encode("utf-8", "replace")
        block = _read(stream)


def _read(stream: BinaryIO | IO[bytes]) -> bytes:
    """What there is, at most a block: a pipe must not wait until a whole block has come."""
    read1 = getattr(stream, "read1", None)
    return read1(BLOCK) if read1 is not None else stream.read(BLOCK)


def _gunzip(first: bytes, stream: BinaryIO | IO[bytes]) -> Iterator[bytes]:
    """Several members one after another, as rotated logs are, and one that ends early."""
    unpack, block = zlib.decompressobj(wbits=31), first
    while block:
        out = unpack.decompress(block, BLOCK)
        if out:
            yield out
        if unpack.eof:
            block = unpack.unused_data or _read(stream)
            unpack = zlib.decompressobj(wbits=31)
        else:
            block = unpack.unconsumed_tail or _read(stream)


def is_log_name(names: Iterable[str]) -> None:
    """InputError for the first name that is no file: asked before hours of reading the others."""
    for name in names:
        if name == PIPE:
            continue
        path = Path(name)
        try:
            if path.is_dir():
                raise InputError(name, "is a folder, not a log", FIX)
            path.open("rb").close()
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            why = getattr(error, "strerror", None) or error
            raise InputError(name, f"cannot be read: {why}", FIX) from error

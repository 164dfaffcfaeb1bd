"""Lines of a log with their numbers: files, pipes, gzip; never more than a block in memory."""

import codecs
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
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
ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
DOCKER = b'{"log":'

# Numbers of lines, and as many lines without their line breaks; pieces of a line that a progress
# bar wrote over have the same number.
Numbered = tuple[Sequence[int], list[bytes]]


class LineSplitter:
    """Cuts blocks of bytes into lines, numbered as `grep -n` numbers them.

    A line beyond LONGEST loses its middle, so that memory stays bounded.
    """

    def __init__(self) -> None:
        self.number = 1
        self._rest = b""

    def feed(self, block: bytes) -> Numbered:
        """The lines that `block` completes."""
        text = self._rest + block
        lines = text.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LONGEST:
            self._rest = _cut(self._rest)
        if lines and len(lines) < len(text) // 1000:
            lines = [_cut(line) for line in lines]
        numbers = range(self.number, self.number + len(lines))
        self.number += len(lines)
        odd = b"\r" in text or b"\x1b" in text or DOCKER in text
        return _plain(numbers, lines) if odd else (numbers, lines)

    def end(self) -> Numbered:
        """The last line, where the log does not end with a line break."""
        rest, self._rest = self._rest, b""
        return _plain([self.number], [rest]) if rest else ([], [])


def _plain(numbers: Sequence[int], lines: list[bytes]) -> Numbered:
    """Lines without escape sequences, carriage returns and docker's JSON around them."""
    found_numbers: list[int] = []
    found: list[bytes] = []
    for number, line in zip(numbers, lines, strict=True):
        if b"\x1b" in line:
            line = ESCAPE.sub(b"", line)
        if line.startswith(DOCKER):
            line = _logged(line)
        pieces = line.rstrip(b"\r").split(b"\r")
        if len(pieces) > 1:
            pieces = [piece for piece in pieces if piece]
        found_numbers += [number] * len(pieces)
        found += pieces
    return found_numbers, found


def _logged(line: bytes) -> bytes:
    """The message in a line of docker's json-file driver."""
    try:
        text = json.loads(line)["log"].rstrip("\n")
        return ESCAPE.sub(b"", text.encode("utf-8", "replace"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return line


def _cut(line: bytes) -> bytes:
    """A line without the middle of a very long one."""
    half = LONGEST // 2
    return line if len(line) <= LONGEST else line[:half] + line[-half:]


def read_lines(name: str) -> Iterator[Numbered]:
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

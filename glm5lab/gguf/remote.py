"""Headers of remote GGUF files: only the first bytes of each shard travel, the weights stay there.

    with remote_sources("hf://owner/repo/GLM-5-Q4_K_M-00001-of-00012.gguf") as sources: ...

Servers that know ranges are asked for growing parts from the front. From one that ignores them the
whole file is on its way: it is read as far as the header goes, and then the connection is cut.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from glm5lab.errors import InputError
from glm5lab.gguf.cursor import FIRST_READ
from glm5lab.gguf.http import Answer, Client, PassingError, joined, patiently
from glm5lab.gguf.http_errors import TRY_AGAIN
from glm5lab.gguf.shards import one_model, sister_names
from glm5lab.gguf.source import header_limit
from glm5lab.gguf.url import HubPath, RemoteFile, is_plain, parse_url, web_page_fix

REMOTE_LIMIT_MIB = 48
# An attempt that brings fewer bytes than this before it breaks is a failed one.
PROGRESS = 1 << 14
MAX_LISTING_BYTES, MAX_LISTING_PAGES = 1 << 24, 50
MISSING = "answers 404"


class HttpSource:
    """The front of a remote file; what has arrived stays in memory until `close`.

    Args:
        file: where it is.
        client: connections; shared between shards, not closed here.
        arrived: called with the number of bytes of each piece that arrives.

    Raises:
        InputError: no such host or file, no permission, a web page, an unknown size, ...
    """

    def __init__(
        self, file: RemoteFile, client: Client, arrived: Callable[[int], object] = lambda _: None
    ) -> None:
        self.name, self.size = file.name, -1
        self.header_limit = header_limit(REMOTE_LIMIT_MIB)
        self._file, self._client, self._arrived = file, client, arrived
        self._bytes = bytearray()
        self._answer: Answer | None = None
        self._url = self._content_type = ""
        self._version = ("", "")
        self._fill(min(FIRST_READ, self.header_limit))
        self._refuse_web_page()

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`, fewer where the file ends; InputError past the limit."""
        end = min(offset + count, self.size)
        if end > self.header_limit:
            mib = self.header_limit / (1 << 20)
            cause = f"asked for byte {end}, beyond the {mib:g} MiB that are read of a remote file"
            raise InputError(self.name, cause, "set GLM5LAB_HEADER_LIMIT (in MiB) higher")
        self._fill(end)
        return bytes(self._bytes[offset:end])

    def close(self) -> None:
        """Cut what is still on its way and forget the bytes."""
        self._drop()
        self._bytes = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fill(self, end: int) -> None:
        """Have the first `end` bytes (fewer if the file is shorter), over broken connections."""
        while self.size < 0 or len(self._bytes) < min(end, self.size):
            patiently(self._file, lambda: self._attempt(end))

    def _attempt(self, end: int) -> None:
        """Read up to `end`; a break after some progress is none, so that long reads get on."""
        before = len(self._bytes)
        try:
            if self._answer is None or self._answer.closed:
                self._answer = self._ask(end)
            while len(self._bytes) < min(end, self.size):
                piece = self._answer.read(min(end, self.size) - len(self._bytes))
                if not piece:
                    raise PassingError("the server sends less than it was asked for")
                self._bytes += piece
                self._arrived(len(piece))
            if self._answer.left == 0:
                self._drop()
        except PassingError:
            self._drop()
            self._url = ""
            if len(self._bytes) - before < PROGRESS:
                raise
        except BaseException:
            self._drop()
            raise

    def _ask(self, end: int) -> Answer:
        """An answer whose next byte is the one behind those that are here."""
        start = len(self._bytes)
        headers = {"Range": f"bytes={start}-{end - 1}"}
        try:
            answer = self._client.get(self._file, headers, self._url)
        except InputError:
            if not self._url:
                raise
            self._url = ""  # the address that a redirect named has run out: ask for it again
            answer = self._client.get(self._file, headers)
        try:
            self._check(answer, start)
            while answer.start < start:  # no ranges: what is here already comes again
                piece = answer.read(start - answer.start)
                if not piece:
                    raise PassingError("the answer ended too early")
                answer.start += len(piece)
        except BaseException:
            answer.close()
            raise
        self._url = answer.url if answer.url != self._file.url else ""
        return answer

    def _check(self, answer: Answer, start: int) -> None:
        """Sizes and version, at first and on every further answer."""
        if answer.status == 416 and answer.total != 0:
            raise InputError(
                self.name, f"the server has nothing at byte {start} (HTTP 416)", TRY_AGAIN
            )
        if answer.total is None:
            raise InputError(
                self.name, "the server does not say how long the file is", "download it first"
            )
        if answer.status == 206 and (answer.start != start or (answer.left or 0) <= 0):
            cause = f"the server sends bytes from {answer.start} on, asked was for {start}"
            raise InputError(self.name, cause, "download the file first")
        # Mirrors name the same file's versions differently: compare those of one address only.
        url, version = self._version
        changed = url == answer.url and version != answer.version
        if self.size >= 0 and (answer.total != self.size or changed):
            raise InputError(self.name, "the file changed while it was being read", "try again")
        self.size, self._version = answer.total, (answer.url, answer.version)
        self._content_type = answer.content_type

    def _refuse_web_page(self) -> None:
        start = bytes(self._bytes[:512]).lstrip().lower()
        if start.startswith((b"<!doctype html", b"<html")) or (
            "text/html" in self._content_type and not start.startswith(b"gguf")
        ):
            self.close()
            fix = web_page_fix(self.name, self._file.url)
            raise InputError(self.name, "this is a web page (HTML), not a GGUF file", fix)

    def _drop(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()


@contextmanager
def remote_sources(url: str | Path) -> Iterator[list[HttpSource]]:
    """The shards of a remote model, in order, each opened when the iteration reaches it.

    Args:
        url: any shard, a single file, or an hf:// folder that holds one model.

    Raises:
        InputError: not there, several models, missing shards, or whatever HttpSource refuses.
    """
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        place = parse_url(url)
        if isinstance(place, HubPath):
            _refuse_offline(place)
            place = place if place.path.lower().endswith(".gguf") else _in_folder(place, client)
            file = place.file()
        else:
            file = place
        files = [file.sister(n) for n in sister_names(file.file_name, file.name)] or [file]
        bar = stack.enter_context(_progress(len(files)))
        yield _open_all(files, client, stack, bar)


def _open_all(
    files: list[RemoteFile], client: Client, stack: ExitStack, bar: Any
) -> list[HttpSource]:
    """All shards; those that the server does not have are named together."""
    sources: list[HttpSource] = []
    missing: list[str] = []
    for number, file in enumerate(files, 1):
        bar.set_description(f"header {number} of {len(files)}")
        try:
            sources.append(stack.enter_context(HttpSource(file, client, bar.update)))
        except InputError as error:
            if len(files) == 1 or MISSING not in error.cause:
                raise
            missing.append(file.file_name)
    if missing and not sources:
        raise InputError(
            files[0].name,
            f"the server answers 404 for all {len(files)} shards",
            "check the address",
        )
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        raise InputError(
            sources[0].name,
            f"{len(missing)} of its {len(files)} shards are missing (404): {shown}",
            "name a complete set",
        )
    return sources


def _refuse_offline(place: HubPath) -> None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise InputError(str(place), "HF_HUB_OFFLINE is set", "unset it, or name a local file")


def _in_folder(place: HubPath, client: Client) -> HubPath:
    """The one model in a folder of a repository, or below it."""
    paths = [p for p in _listing(place, client) if p.lower().endswith(".gguf")]
    if not paths:
        raise InputError(str(place), "the folder holds no .gguf file", "name a .gguf file")
    return place.at(one_model(paths, str(place), lambda path: str(place.at(path))))


def _listing(place: HubPath, client: Client) -> list[str]:
    """Paths of all files in and below a folder."""
    listing, page = place.listing(), ""
    paths: list[str] = []
    for _ in range(MAX_LISTING_PAGES):
        body, page = patiently(listing, partial(_body, listing, client, page))
        try:
            entries = json.loads(body)
            if not isinstance(entries, list):
                raise TypeError("not a list")
            paths += [e["path"] for e in entries if e["type"] == "file"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            cause = "the server's list of files is not what the Hub's is (HF_ENDPOINT?)"
            raise InputError(str(place), cause, "name a .gguf file") from error
        if not page:
            break
    return [p for p in paths if isinstance(p, str) and is_plain(p)]


def _body(listing: RemoteFile, client: Client, page: str) -> tuple[bytes, str]:
    """One page of a list, and the address of the next one."""
    body = bytearray()
    answer = client.get(listing, {}, page)
    try:
        while piece := answer.read(1 << 16):
            body += piece
            if len(body) > MAX_LISTING_BYTES:
                raise InputError(listing.name, "its list of files is endless", "name a .gguf file")
    finally:
        answer.close()
    page = answer.next_page
    return bytes(body), joined(listing, answer.url, page) if page else ""


def _progress(files: int) -> Any:
    """A bar of bytes on stderr, on terminals only."""
    import sys

    from tqdm import tqdm

    return tqdm(
        desc=f"header 1 of {files}",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=not sys.stderr.isatty(),
        file=sys.stderr,
    )

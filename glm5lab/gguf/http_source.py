"""The front of one remote file, as far as its header goes.

Servers that know ranges are asked for growing parts from the front. From one that ignores them the
whole file is on its way: it is read as far as the header goes, and then the connection is cut.
"""

from collections.abc import Callable

from glm5lab.errors import InputError
from glm5lab.gguf.http import Answer, Client, patiently
from glm5lab.gguf.http_errors import TRY_AGAIN, PassingError
from glm5lab.gguf.source import FIRST_READ, Closing, header_limit
from glm5lab.gguf.url import RemoteFile, web_page_fix

REMOTE_LIMIT_MIB = 48
# An attempt that brings fewer bytes than this before it breaks is a failed one.
PROGRESS = 1 << 14


class HttpSource(Closing):
    """The front of a remote file; what has arrived stays in memory until `close`.

    Args:
        file: where it is.
        client: connections; shared between shards, not closed here.
        arrived: called with the number of bytes of each piece that arrives.
        first_read: as in `Source`.

    Raises:
        InputError: no such host or file, no permission, a web page, an unknown size, ...
    """

    def __init__(
        self,
        file: RemoteFile,
        client: Client,
        arrived: Callable[[int], object] = lambda _: None,
        first_read: int = FIRST_READ,
    ) -> None:
        self.name, self.size, self.first_read = file.name, -1, first_read
        self.header_limit = header_limit(REMOTE_LIMIT_MIB)
        self._file, self._client, self._arrived = file, client, arrived
        self._bytes = bytearray()
        self._answer: Answer | None = None
        self._url = self._content_type = ""
        self._version = ("", "")
        self._fill(min(first_read, self.header_limit))
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

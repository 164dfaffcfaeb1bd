"""Parts of files over HTTP: redirects, retries, time limits, and errors with a fix.

`requests` does the work (the gguf package needs it anyway): proxies, certificates and connections
that stay open between requests are its business. Redirects are followed here, because a secret must
not travel to another origin, and netrc files are not looked at.
"""

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urljoin

from glm5lab.errors import InputError
from glm5lab.gguf.http_errors import (
    TRY_AGAIN,
    PassingError,
    StatusError,
    explain,
    fix_for_status,
    network_errors,
    reason,
)
from glm5lab.gguf.http_session import Watch, open_session
from glm5lab.gguf.source import Closing
from glm5lab.gguf.url import RemoteFile, origin, shown

if TYPE_CHECKING:
    import requests

MAX_REDIRECTS = 10
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Answers that may be better a moment later.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
ATTEMPTS = 4
FIRST_PAUSE_S, MAX_WAIT_S = 0.5, 10.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 20.0
# A whole request: connecting, redirects and headers.
ANSWER_S = 60.0
# Slower than this for a whole SLOW_S is taken for a broken connection.
SLOW_S, SLOWEST_BYTES_PER_S = 30.0, 1024
PIECE = 1 << 16
T = TypeVar("T")


class Answer:
    """The answer to one GET request, its body not yet read.

    Attributes:
        file: what was asked for.
        url: where the redirects led.
        status: 200, 206 or 416; everything else is an error before.
        start: offset of the body's first byte in the file.
        total: bytes of the whole file, None when the server does not say.
        left: bytes of the body still to come, None when the server does not say.
        version: the file's ETag, "" when the server names none.
        closed: nothing more comes.
    """

    def __init__(
        self, file: RemoteFile, url: str, response: "requests.Response", watch: Watch
    ) -> None:
        self.file, self.url, self._response, self._watch = file, url, response, watch
        self.status = response.status_code
        headers = response.headers
        self.version = headers.get("ETag", "").removeprefix("W/")
        self.content_type = headers.get("Content-Type", "").lower()
        self.next_page = response.links.get("next", {}).get("url", "")
        self.start, self.total = 0, _number(headers.get("Content-Length"))
        self.left = self.total
        if self.status in (206, 416):
            found = re.fullmatch(
                r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)",
                headers.get("Content-Range", "").strip(),
            )
            self.total = _number(found[3]) if found else None
            if found and found[1]:
                self.start, self.left = int(found[1]), int(found[2]) + 1 - int(found[1])
        self.closed = False
        self._mark, self._since = time.monotonic(), 0

    def read(self, count: int) -> bytes:
        """The next bytes of the body, at most `count`; b"" at its end.

        Raises:
            PassingError: the connection broke, or became too slow.
        """
        count = min(count, PIECE) if self.left is None else min(count, PIECE, self.left)
        if count <= 0:
            return b""
        try:
            with self._watch.limit(SLOW_S):  # chunks' lengths may drip, too
                piece: bytes = self._response.raw.read1(count, decode_content=False)
        except network_errors() as error:
            early = type(error).__name__ == "ProtocolError" and self.left
            cause = f"the connection ended {self.left} bytes too early"
            raise PassingError(cause if early else explain(error)[0]) from error
        if not piece and self.left:
            raise PassingError(f"the connection ended {self.left} bytes too early")
        if self.left is not None:
            self.left -= len(piece)
        self._check_pace(len(piece))
        return piece

    def close(self) -> None:
        """Leave the connection to the next request if the body is read, else cut it."""
        self.closed = True
        if self.left == 0 and self._response.raw.closed:  # its end is read, too
            self._response.raw.release_conn()
        else:
            self._response.close()

    def _check_pace(self, count: int) -> None:
        now, self._since = time.monotonic(), self._since + count
        if now - self._mark > SLOW_S:
            if self._since < SLOWEST_BYTES_PER_S * (now - self._mark):
                raise PassingError(f"it sent {self._since} bytes in {now - self._mark:.0f} s")
            self._mark, self._since = now, 0


class Client(Closing):
    """Connections that stay open between the requests for one model; one answer at a time.

    A new request closes the answer before: a server that serves one connection only would never
    come to the next shard while it still wants to send the weights of the last one.
    """

    def __init__(self) -> None:
        self._watch = Watch()
        self._session = open_session(self._watch)
        self._last: Answer | None = None

    def get(self, file: RemoteFile, headers: dict[str, str], url: str = "") -> Answer:
        """Ask for a file, following redirects.

        Args:
            file: what to ask for.
            headers: of the request (a Range).
            url: another address, where earlier redirects led.

        Raises:
            InputError: an answer that no attempt will change (404, 401, no such host, ...).
            PassingError: one that may be better the next time.
        """
        if self._last is not None:
            self._last.close()
        with self._watch.limit(ANSWER_S):
            return self._follow(file, headers, url or file.url)

    def close(self) -> None:
        """Close all connections."""
        if self._last is not None:
            self._last.close()
        self._session.close()
        self._watch.close()

    def _follow(self, file: RemoteFile, headers: dict[str, str], at: str) -> Answer:
        """The answer at the end of the redirects."""
        authorization = file.authorization if origin(at) == origin(file.url) else ""
        for _ in range(MAX_REDIRECTS):
            response = self._ask(file, at, headers, authorization)
            target = response.headers.get("Location", "")
            if response.status_code not in REDIRECTS or not target:
                return self._checked(file, at, response, bool(authorization))
            _discard(response)
            after = joined(file, at, target)
            if origin(after) != origin(at):
                authorization = ""
            at = after
        raise InputError(file.name, f"more than {MAX_REDIRECTS} redirects", "check the address")

    def _ask(
        self, file: RemoteFile, url: str, headers: dict[str, str], authorization: str
    ) -> "requests.Response":
        """One request, no redirect followed."""
        sent = {"User-Agent": "glm5lab", "Accept-Encoding": "identity", **headers}
        if authorization:
            sent["Authorization"] = authorization
        try:
            return self._session.get(
                url,
                headers=sent,
                stream=True,
                allow_redirects=False,
                auth=lambda request: request,  # keeps netrc's passwords out
                timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
            )
        except network_errors() as error:
            cause, fix = explain(error)
            if fix:
                raise InputError(file.name, cause, fix) from error
            raise PassingError(cause) from error

    def _checked(
        self, file: RemoteFile, url: str, response: "requests.Response", authorized: bool
    ) -> Answer:
        """The answer, if it is one that holds the file."""
        answer = self._last = Answer(file, url, response, self._watch)
        if answer.status in (200, 206, 416):
            if response.headers.get("Content-Encoding", "identity") in ("identity", ""):
                return answer
            answer.close()
            raise InputError(file.name, "the server sends it compressed", TRY_AGAIN)
        cause = f"the server answers {answer.status} {reason(response)}".rstrip()
        wait_s = _number(response.headers.get("Retry-After")) or 0
        answer.close()
        if answer.status in PASSING and wait_s <= MAX_WAIT_S:
            raise PassingError(cause, wait_s)
        fix = fix_for_status(file, answer.status, authorized)
        raise StatusError(file.name, cause, fix, answer.status)


def joined(file: RemoteFile, base: str, target: str) -> str:
    """The address that an answer from `base` leads to; InputError unless it is http or https."""
    try:
        address = urljoin(base, target)
        if origin(address)[0] not in ("http", "https"):
            raise ValueError("another scheme")
    except ValueError as error:
        cause = f"the server redirects to {shown(target)!r}, which is no web address"
        raise InputError(file.name, cause, TRY_AGAIN) from error
    return address


def patiently(file: RemoteFile, action: Callable[[], T]) -> T:
    """Run `action` until it works, ATTEMPTS times at most, with growing pauses.

    Raises:
        InputError: from the action, or with the cause of its last PassingError.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except PassingError as error:
            if attempt == ATTEMPTS:
                cause = f"{error.cause} ({ATTEMPTS} attempts)"
                raise InputError(file.name, cause, TRY_AGAIN) from error
            time.sleep(max(error.wait_s, FIRST_PAUSE_S * 2 ** (attempt - 1)))
    raise AssertionError("unreachable")


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,19}", text, re.ASCII) else None


def _discard(response: "requests.Response") -> None:
    """Read a redirect's short body to its end, which keeps the connection; cut a long one."""
    length = _number(response.headers.get("Content-Length"))
    try:
        if length is not None and length <= PIECE:
            response.raw.read(PIECE, decode_content=False)
    except network_errors():
        pass
    finally:
        response.close()

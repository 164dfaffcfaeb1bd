"""What a failed connection or a refusing server means, in words that leave secrets out."""

import os
import socket
import ssl
from typing import TYPE_CHECKING

from glm5lab.errors import InputError
from glm5lab.gguf.url import RemoteFile

if TYPE_CHECKING:
    import requests

TRY_AGAIN = "try again, or download the file and name it here"


class PassingError(Exception):
    """Something that the next attempt may cure.

    Attributes:
        cause: for the user.
        wait_s: how long the server wants to be left alone.
    """

    def __init__(self, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(cause)
        self.cause, self.wait_s = cause, wait_s


class StatusError(InputError):
    """The server refuses, or has no such file; `status` is the HTTP status."""

    def __init__(self, file: str, cause: str, fix: str, status: int = 0) -> None:
        super().__init__(file, cause, fix)
        self.status = status


def explain(error: BaseException) -> tuple[str, str]:
    """Cause and fix of a failed connection; no fix where another attempt may help.

    The libraries' own texts are left out: they repeat the address with its query, and headers.
    """
    chain = _chain(error)
    names = " ".join(type(link).__name__ for link in chain)
    if "ProxyError" in names:
        return "the proxy does not connect", "check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    for link in chain:
        if isinstance(link, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {link.verify_message}", (
                "check the address; behind a proxy with its own certificates, "
                "point REQUESTS_CA_BUNDLE to them"
            )
        if isinstance(link, socket.gaierror):
            return "no such host (or no network)", "check the address and the network"
        if isinstance(link, ConnectionRefusedError):
            return "the connection is refused", "check host and port; is the server running?"
    if "Invalid" in names or "LocationParseError" in names or "UnicodeError" in names:
        return "not a valid address", "write https://HOST/PATH"
    if any(isinstance(link, ssl.SSLError) for link in chain):
        return "no TLS connection (is it http:// on this port?)", "check scheme, host and port"
    if "Timeout" in names or any(isinstance(link, TimeoutError) for link in chain):
        return "no answer in time", ""
    for link in chain:
        if isinstance(link, OSError) and link.errno:
            return f"the connection failed: {os.strerror(link.errno)}", ""
    return f"the connection broke ({type(chain[-1]).__name__})", ""


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it wraps: causes, and the errors in its arguments."""
    chain: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting and len(chain) < 32:
        link = waiting.pop(0)
        if isinstance(link, BaseException) and link not in chain:
            chain.append(link)
            waiting += [link.__cause__, link.__context__, getattr(link, "reason", None), *link.args]
    return chain


def network_errors() -> tuple[type[BaseException], ...]:
    """Whatever a request or a read raises when the network or the server is at fault."""
    from http.client import HTTPException

    from requests import RequestException
    from urllib3.exceptions import HTTPError

    return RequestException, HTTPError, HTTPException, OSError, UnicodeError


def fix_for_status(file: RemoteFile, status: int, authorized: bool) -> str:
    """What to do about an answer's status; `authorized`: a token or password was sent."""
    hub = file.name.startswith("hf:") or "/resolve/" in file.url
    if status == 404:
        return "check the address: repository, revision, folder and file name"
    if status in (401, 403):
        if not hub:
            return "check that the address is open to you (a signed address may have run out)"
        if authorized:
            return (
                "accept the model's terms on its page, or set HF_TOKEN to a token that may read it"
            )
        return "check the name; if it is gated or private, accept its terms and set HF_TOKEN"
    return TRY_AGAIN


def reason(response: "requests.Response") -> str:
    """The server's words for its status, as one short line."""
    text = response.headers.get("X-Error-Message") or response.reason or ""
    return "".join(c if c.isprintable() else " " for c in str(text))[:160].strip()

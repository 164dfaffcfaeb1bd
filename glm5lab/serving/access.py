"""Who may ask a server: anybody on this machine, and from elsewhere only with a key."""

import ipaddress
import secrets
import socket
from dataclasses import dataclass

from glm5lab.errors import InputError

VARIABLE = "VLLM_API_KEY"  # vLLM reads its key there; on a command line everybody would see it
# What vLLM asks a key for (AuthenticationMiddleware); all else is open, /tokenize and /metrics too.
GUARDED = "/v1, /v2 and /inference"
KEY_BYTES = 24


@dataclass(frozen=True)
class Access:
    """The key in force.

    Attributes:
        key: what requests must carry; None for none.
        generated: whether it was made here and has to be shown.
        lines: what the user should know about it.
    """

    key: str | None
    generated: bool = False
    lines: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """The environment variable that tells vLLM; empty where no key is wanted."""
        return {VARIABLE: self.key or ""}


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address; False where that cannot be told."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)
    except (OSError, ValueError):
        return False


def access(host: str, key: str | None, no_auth: bool) -> Access:
    """The rule: an address beyond this machine takes a key, unless none is wanted explicitly.

    Args:
        host: address to bind.
        key: given by the user (option or VLLM_API_KEY); None or "" for none.
        no_auth: whether --no-auth was given.

    Raises:
        InputError: a key and --no-auth, or a key that no header can carry.
    """
    if key and no_auth:
        raise InputError("--no-auth", f"is given with an API key (or {VARIABLE})", "leave one out")
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        fix = "take letters, digits and punctuation, or leave it out: one is generated"
        raise InputError("--api-key", "holds blanks or characters no header can carry", fix)
    local = is_local(host)
    if not key and not local and not no_auth:
        key = secrets.token_urlsafe(KEY_BYTES)
        shown = f"API key, generated and shown only here: {key}"
        return Access(key, True, (shown, _open_paths(host)))
    if key:
        return Access(key, False, () if local else (_open_paths(host),))
    if local:
        return Access(None)
    return Access(None, False, (f"no API key: everybody who reaches {host} may use the server",))


def _open_paths(host: str) -> str:
    return f"vLLM asks for the key on {GUARDED}; other paths answer everybody who reaches {host}"

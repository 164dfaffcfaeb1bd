"""Names of remote files: https://..., and hf://owner/repo/path[@revision] for Hugging Face."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from glm5lab.errors import InputError

DEFAULT_ENDPOINT = "https://huggingface.co"
HUB_FORM = "hf://OWNER/REPO/PATH.gguf, or hf://OWNER/REPO/PATH.gguf@REVISION"
# pathlib turns "https://host" into "https:/host"; both mean the same.
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://|(?P<bent>https?|hf):/(?!/)")


@dataclass(frozen=True)
class RemoteFile:
    """One file on a server.

    Attributes:
        name: what messages call it; without the query and the password, which may be secret.
        url: what is asked for.
        authorization: value of that header, "" for none; only for the URL's own origin.
    """

    name: str
    url: str
    authorization: str = ""

    def __repr__(self) -> str:
        return f"RemoteFile({self.name!r})"

    @property
    def file_name(self) -> str:
        """The last part of its path, decoded."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def sister(self, file_name: str) -> "RemoteFile":
        """Another file in the same folder, asked for in the same way."""
        parts = urlsplit(self.url)
        path = parts.path.rpartition("/")[0] + "/" + quote(file_name)
        url = urlunsplit(parts._replace(path=path))
        before, _, after = self.name.rpartition(self.file_name)
        name = before + file_name + after if self.name.startswith("hf:") else shown(url)
        return RemoteFile(name, url, self.authorization)


@dataclass(frozen=True)
class HubPath:
    """A file or folder of a model repository on the Hub; `path` is "" for the repository itself."""

    repo: str
    path: str
    revision: str = "main"

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf://{self.repo}" + (f"/{self.path}" if self.path else "") + at

    def at(self, path: str) -> "HubPath":
        """Another path of the same repository and revision."""
        return HubPath(self.repo, path, self.revision)

    def file(self) -> RemoteFile:
        """Where the Hub serves the file."""
        url = f"{endpoint()}/{self.repo}/resolve/{quote(self.revision, safe='')}/{quote(self.path)}"
        return RemoteFile(str(self), url, _hub_authorization())

    def listing(self) -> RemoteFile:
        """Where the Hub lists the folder, all files below it included, as JSON."""
        path = "/" + quote(self.path) if self.path else ""
        url = f"{endpoint()}/api/models/{self.repo}/tree/{quote(self.revision, safe='')}{path}"
        return RemoteFile(str(self), url + "?recursive=true", _hub_authorization())


def is_url(file: object) -> bool:
    """Whether a FILE argument names something on a server, of whatever scheme."""
    return URL.match(str(file)) is not None


def local_path(file: str | Path, purpose: str) -> Path:
    """The argument as a path.

    Args:
        file: what the user named.
        purpose: what needs the weights ("serve").

    Raises:
        InputError: it is a URL.
    """
    if not is_url(file):
        return Path(file)
    name = str(parse_url(file)) if str(file).startswith("hf:") else shown(_straight(file))
    raise InputError(
        name,
        f"is a URL; {purpose} needs the weights on this machine",
        "download it first (all of its shards), then name the file; "
        "inspect, map and plan read URLs as they are",
    )


def parse_url(file: str | Path) -> RemoteFile | HubPath:
    """What a URL names.

    Raises:
        InputError: an unknown scheme, no host, or an incomplete hf:// name.
    """
    text = _straight(file)
    scheme = text.partition("://")[0].lower()
    if scheme == "hf":
        return _hub_path(text)
    if scheme not in ("http", "https"):
        fix = "name the path itself" if scheme == "file" else "use https:// or hf://"
        raise InputError(shown(text), f"{scheme}:// is not supported", fix)
    return _http_file(text)


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: a secret goes no further than these. ValueError for a bad port."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, parts.hostname or "", port


def shown(url: str) -> str:
    """A URL without user, password, query, fragment, and what a terminal would obey."""
    url = "".join(c if c.isprintable() else "\ufffd" for c in url)
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("?")[0]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def endpoint() -> str:
    """The Hub's address, HF_ENDPOINT or the public one, without a slash at the end."""
    value = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT
    try:
        value.encode()  # the environment may hold bytes that are no text
        if origin(value)[0] not in ("http", "https") or not origin(value)[1]:
            raise ValueError("no scheme or host")
    except ValueError as error:
        fix = "unset it, or use https://HOST"
        raise InputError("HF_ENDPOINT", f"{value!r} is no URL", fix) from error
    return value


def is_plain(path: str) -> bool:
    """Whether a path within a repository stays there, and can be shown on a terminal."""
    return path.isprintable() and not {"", ".", ".."} & set(path.split("/"))


def web_page_fix(name: str, url: str) -> str:
    """What to name instead of a URL that brings a web page."""
    if "/blob/" in url:
        return f"replace /blob/ by /resolve/: {shown(url).replace('/blob/', '/resolve/', 1)}"
    match = re.fullmatch(r"/([^/]+/[^/]+?)(?:/tree/([^/]+)(?:/(.*))?)?/?", urlsplit(url).path)
    if match and not name.startswith("hf:") and origin(url) == origin(endpoint()):
        hub = HubPath(match[1], (match[3] or "").strip("/"), match[2] or "main")
        return f"name the repository or folder as {hub}"
    if urlsplit(url).path.lower().endswith(".gguf"):
        return "name the address of the file itself (the target of its download button)"
    return "name a .gguf file's own address; folders are listed as hf://OWNER/REPO/FOLDER only"


def _straight(file: str | Path) -> str:
    """The URL with the two slashes that pathlib makes one of."""
    match = URL.match(str(file))
    if match and match["bent"]:
        return f"{match['bent']}://{str(file)[match.end() :]}"
    return str(file)


def _http_file(text: str) -> RemoteFile:
    try:
        text.encode()  # an argument may hold bytes that are no text
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeError) else error
        raise InputError(shown(text), f"not a URL: {why}", "write https://HOST/PATH") from error
    if not has_host or any(c.isspace() or not c.isprintable() for c in parts.netloc):
        raise InputError(shown(text), "not a URL: no host in it", "write https://HOST/PATH")
    user, at, host = parts.netloc.rpartition("@")
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~") or "/"
    url = urlunsplit((parts.scheme.lower(), host, path, parts.query, ""))
    authorization = _basic(unquote(user)) if at else ""
    if not authorization and origin(url) == origin(endpoint()):
        authorization = _hub_authorization()
    return RemoteFile(shown(text), url, authorization)


def _basic(user_and_password: str) -> str:
    import base64

    return "Basic " + base64.b64encode(user_and_password.encode()).decode()


def _hub_path(text: str) -> HubPath:
    """The revision stands at the end, or as the Hub has it: hf://owner/repo@revision/path."""
    rest = text.partition("://")[2].strip("/")
    parts = rest.split("/")
    if len(parts) < 2 or not is_plain(rest):
        raise InputError(shown(text), "not a file on the Hub", f"write {HUB_FORM}")
    owner, repo, path = parts[0], parts[1], "/".join(parts[2:])
    repo, _, revision = repo.partition("@")
    if not revision and "@" in path:
        before, _, after = path.rpartition("@")
        if not after.lower().endswith(".gguf"):  # an @ within the file's name
            path, revision = before, after
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", f"{owner}/{repo}", re.ASCII):
        raise InputError(shown(text), f"{owner}/{repo} is no repository name", f"write {HUB_FORM}")
    return HubPath(f"{owner}/{repo}", path, revision or "main")


def _hub_authorization() -> str:
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and not re.fullmatch(r"[\x21-\x7e]+", token):
        raise InputError("HF_TOKEN", "is no token: it holds blanks or other signs", "set it again")
    return f"Bearer {token}" if token else ""

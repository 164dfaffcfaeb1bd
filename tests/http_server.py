"""A real HTTP server on this machine, with the faults that real ones have."""

import io
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Server:
    """Files of a folder, and how they are served.

    Attributes:
        ranges: whether Range is understood.
        etag: of every file, or None; a function of the number of requests so far.
        cut_after: bytes after which connections break, or None.
        cuts: how many do.
        dribble_s: pause between single bytes, 0 for none.
        dribble_head: whether headers come like that, too.
        latency_s: pause before each answer.
        length: whether answers say how long they are.
        answer: status, headers and body for a path; None for the file itself.
        requests: path and headers of each request so far.
        connections: how many there were.
        open: how many there are.
        sent: bytes of bodies so far.
    """

    folder: Path
    ranges: bool = True
    etag: Callable[[int], str] | None = None
    cut_after: int | None = None
    cuts: int = 1 << 30
    dribble_s: float = 0.0
    dribble_head: bool = False
    latency_s: float = 0.0
    length: bool = True
    answer: Callable[[str, dict[str, str]], tuple[int, dict[str, str], bytes] | None] = (
        lambda path, headers: None
    )
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    sent: int = 0
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as real servers; else each answer waits 40 ms
    settings: Server
    _headers_buffer: list[bytes]

    def setup(self):
        super().setup()
        self.settings.connections += 1
        self.settings.open += 1

    def finish(self):
        super().finish()
        self.settings.open -= 1

    def flush_headers(self):
        """Send them, byte by byte if so wanted."""
        if not self.settings.dribble_head:
            super().flush_headers()
            return
        head, self._headers_buffer = b"".join(self._headers_buffer), []
        for at in range(len(head)):
            self.wfile.write(head[at : at + 1])
            time.sleep(self.settings.dribble_s)

    def log_message(self, *_):
        pass

    def do_GET(self):
        s = self.settings
        s.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        special = s.answer(self.path, dict(self.headers))
        if special is not None:
            status, headers, body = special
            self.reply(status, {"Content-Length": str(len(body)), **headers}, body)
            return
        path = s.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self.reply(404, {"Content-Length": "0"}, b"")
            return
        size = path.stat().st_size
        headers = {"ETag": s.etag(len(s.requests))} if s.etag else {}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found and s.ranges:
            start, end = int(found[1]), min(int(found[2]) + 1, size)
            if start >= size:
                head = {"Content-Range": f"bytes */{size}", "Content-Length": "0"}
                self.reply(416, head, b"")
                return
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            self.reply(206, headers | {"Content-Length": str(end - start)}, path, start, end)
            return
        if s.length:
            headers["Content-Length"] = str(size)
        else:
            headers["Connection"] = "close"
            self.close_connection = True
        self.reply(200, headers, path, 0, size)

    def reply(self, status, headers, body, start=0, end=None):
        """Send bytes, or a part of a file."""
        s = self.settings
        end = len(body) if end is None else end
        time.sleep(s.latency_s)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        try:
            self.end_headers()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            return
        if s.cut_after is not None and s.cuts and end - start > s.cut_after:
            s.cuts -= 1
            end, self.close_connection = start + s.cut_after, True
        step = 1 if s.dribble_s else 1 << 14
        try:
            with io.BytesIO(body) if isinstance(body, bytes) else body.open("rb") as source:
                source.seek(start)
                while start < end and (piece := source.read(min(step, end - start))):
                    self.wfile.write(piece)
                    start += len(piece)
                    s.sent += len(piece)
                    time.sleep(s.dribble_s)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


class OneConnection(HTTPServer):
    def handle_error(self, *_):
        """Clients that leave are expected here."""


class Threads(OneConnection, ThreadingHTTPServer):
    """Any number of connections."""


@contextmanager
def serving(folder: Path, *, threads: bool = True, tls=None, **settings):
    """A running server; ended with the context.

    Args:
        folder: what it serves.
        threads: False for one that knows one connection at a time.
        tls: an `ssl.SSLContext`, for https.
        settings: of `Server`.
    """
    s = Server(folder, **settings)
    kind = type("Bound", (Handler,), {"settings": s})
    server = (Threads if threads else OneConnection)(("127.0.0.1", 0), kind)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    s.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield s
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def hub(repository: Path, owner_and_name: str):
    """`answer` of a Hugging Face Hub with one repository, whose files another path serves.

    The list holds two entries a page, and names the next page in a Link header as the Hub does.
    """

    def answer(path, headers):
        parts = urlsplit(path)
        files = re.fullmatch(rf"/{owner_and_name}/resolve/([^/]+)/(.*)", parts.path)
        if files:
            return 302, {"Location": f"/{unquote(files[2])}?signed=1"}, b""
        tree = re.fullmatch(rf"/api/models/{owner_and_name}/tree/([^/]+)/?(.*)", parts.path)
        if not tree:
            return None
        found = sorted(p for p in (repository / unquote(tree[2])).rglob("*"))
        entries = [
            {
                "type": "directory" if p.is_dir() else "file",
                "path": p.relative_to(repository).as_posix(),
                "size": 0,
                "oid": "0",
            }
            for p in found
        ]
        at = int(parse_qs(parts.query).get("cursor", ["0"])[0])
        head = {"Content-Type": "application/json"}
        if at + 2 < len(entries):
            home = f"http://{headers['Host']}{parts.path}"
            head["Link"] = f'<{home}?recursive=true&cursor={at + 2}>; rel="next"'
        return 200, head, json.dumps(entries[at : at + 2]).encode()

    return answer

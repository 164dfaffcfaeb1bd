"""An OpenAI endpoint that answers as a test wants, for clients and watchers."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = Callable[["Request"], None]


class Request(http.server.BaseHTTPRequestHandler):
    """One request; tests write the answer with `say`, `event`, or not at all."""

    answer: Answer

    def say(self, content: Any, status: int = 200) -> None:
        """A whole answer: text as it is, anything else as JSON."""
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def event(self, content: Any) -> None:
        """A piece of a stream."""
        text = content if isinstance(content, str) else json.dumps(content)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def body(self) -> dict[str, Any]:
        """What was posted."""
        found: dict[str, Any] = json.loads(
            self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"
        )
        return found

    def do_GET(self) -> None:
        """Answered as the test wants."""
        if self.path == "/v1/models":
            self.say({"data": [{"id": "tiny"}]})
        else:
            type(self).answer(self)

    def do_POST(self) -> None:
        """Answered as the test wants."""
        type(self).answer(self)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def openai(answer: Answer) -> Iterator[str]:
    """The URL of a server that answers every request but /v1/models by `answer(request)`."""
    handler = type("Handler", (Request,), {"answer": staticmethod(answer)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()

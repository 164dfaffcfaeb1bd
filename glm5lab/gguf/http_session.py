"""Connections that a time limit can cut, whatever the server does.

The timeouts of `requests` start anew with every byte: a server that drips its headers would never
be left. Here each connection is known by name, and a thread shuts down what takes too long.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from glm5lab.gguf.http_errors import PassingError

if TYPE_CHECKING:
    import requests

LOOK_EVERY_S = 0.1


class Watch:
    """Connections, and the moment at which all of them are cut."""

    def __init__(self) -> None:
        self._opening: Any = None
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.Lock()
        self._deadline = float("inf")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """What happens inside ends after that time; PassingError then."""
        deadline = self._deadline = time.monotonic() + seconds
        try:
            yield
        except Exception as error:
            if time.monotonic() > deadline:
                raise PassingError("no answer in time") from error
            raise
        finally:
            self._deadline = float("inf")
        # A cut in the middle of headers looks to http.client like their end.
        if time.monotonic() > deadline:
            raise PassingError("no answer in time")

    @contextmanager
    def opening(self, connection: Any) -> Iterator[None]:
        """What happens inside connects it; a proxy answers, and TLS is agreed upon."""
        self._opening = connection
        try:
            yield
            # The socket, since a connection forgets it while an answer is still being read.
            with self._lock:
                self._sockets.add(connection.sock)
        finally:
            self._opening = None

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            if time.monotonic() > self._deadline:
                with self._lock:
                    sockets: list[Any] = [*self._sockets, getattr(self._opening, "sock", None)]
                for s in sockets:
                    # TypeError: not connected yet, or TLS within TLS, which is no socket.
                    with suppress(OSError, TypeError):
                        socket.socket.shutdown(s, socket.SHUT_RDWR)


def _watched(kind: Any, watch: Watch) -> Any:
    """A class of urllib3's connections that tells `watch` of each."""

    class Watched(kind):
        watched = True

        def connect(self) -> None:
            with watch.opening(self):
                super().connect()

    return Watched


def open_session(watch: Watch) -> "requests.Session":
    """A session whose connections are made by `watch`."""
    import requests
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
            """The pool of connections to a host, directly or over a proxy."""
            pool = super().get_connection_with_tls_context(*args, **options)
            if not hasattr(pool.ConnectionCls, "watched"):
                pool.ConnectionCls = _watched(pool.ConnectionCls, watch)
            return pool

    class Session(requests.Session):
        def get_redirect_target(self, resp: requests.Response) -> None:
            """None; else requests reads the body to its end, even where it does not follow."""

        def close(self) -> None:
            """At once; urllib3 leaves it to the garbage collector, which an error keeps away."""
            for adapter in self.adapters.values():
                assert isinstance(adapter, HTTPAdapter)
                for manager in (adapter.poolmanager, *adapter.proxy_manager.values()):
                    for key in list(manager.pools.keys()):
                        manager.pools[key].close()
            super().close()

    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    return session

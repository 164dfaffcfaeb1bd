"""vLLM's OpenAI server over a GGUF file: its command line, its start, its end.

with Server.of_file("GLM-5-Q4_K_M-00001-of-00010.gguf") as server:
    server.wait_ready()
    Client(server.url).chat([{"role": "user", "content": "Hello"}])

vLLM runs in a process of its own; nothing here imports it.
"""

import errno
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from glm5lab.env import engine_distribution, engine_platform, find_gpus
from glm5lab.errors import Glm5labError, InputError
from glm5lab.serving.client import Client
from glm5lab.serving.process import LoggedProcess
from glm5lab.vllm_plugin import BACKEND

LOCAL = "127.0.0.1"
ANYWHERE = {"0.0.0.0": LOCAL, "::": "::1"}
POLL_S = 0.25
SAY_S = 30.0


class ServerError(Glm5labError):
    """The server did not start, or ended by itself (exit code 1)."""


def platform() -> str:
    """The platform that vLLM takes here, "cuda" or "cpu"; ServerError when it is missing."""
    kind = engine_platform(engine_distribution(), find_gpus())
    if kind == "none":
        raise ServerError("vLLM is not installed; run `make setup`")
    return kind


def command(
    file: str | Path, host: str = LOCAL, port: int = 8000, options: Sequence[str] = ()
) -> list[str]:
    """The command that serves a file: `vllm serve`, run by this Python.

    Args:
        file: any shard of a GGUF file, its folder, or a prepared folder.
        host: address to bind.
        port: port to bind.
        options: further options of `vllm serve`; they come last and so win over ours.

    Raises:
        InputError: the options bind another address (only host and port may) or ask for TLS.
        ServerError: vLLM is not installed.
    """
    given = {option.partition("=")[0] for option in options}
    for name in sorted({"--host", "--port", "--uds"} & given):
        raise InputError(name, "is among vLLM's own options", "give --host and --port before `--`")
    for name in sorted(option for option in given if option.startswith("--ssl-")):
        raise InputError(name, "is not supported here", "run `vllm serve FILE` itself for TLS")
    line = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(file)]
    line += ["--host", host, "--port", str(port)]
    if platform() == "cpu" and "--dtype" not in given:
        line += ["--dtype", "float32"]
    return [*line, *options]


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to add for the server; those that are set already stay."""
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    return {name: value for name, value in wanted.items() if name not in environment}


def selected_backend(lines: Iterable[str]) -> str | None:
    """The line in which vLLM says that it takes TRITON_MLA_SPARSE, as it is; None without it."""
    wanted = f"Using {BACKEND} attention backend"
    return next((line for line in lines if wanted in line), None)


def url(host: str, port: int) -> str:
    """Where a client on this machine finds a server that is bound to `host`."""
    host = ANYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def usable_port(host: str, port: int) -> int:
    """The port itself, or a free one for 0.

    Raises:
        InputError: the port is in use, may not be bound, or the host is not this machine's.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = "stop what listens there, or choose another with --port (0: any free port)"
            raise InputError(f"port {port}", f"is in use on {host}", fix) from error
        fix = "choose another with --host and --port"
        raise InputError(
            f"{host}:{port}", f"cannot be bound: {error.strerror or error}", fix
        ) from error


class Server(LoggedProcess):
    """A running server; inside its context the process lives, outside nothing of it does.

    Args:
        command: program and arguments.
        url: where it will answer, without /v1.
        log: file that gets its output.
        settings: environment variables beside those of this process.
        echo: called with every line of output, in another thread.

    Attributes:
        backend: the line in which the engine names TRITON_MLA_SPARSE, once it has.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log: Path,
        settings: Mapping[str, str] | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(command, log, settings, echo)
        self.url = url
        self.backend: str | None = None

    @classmethod
    def of_file(
        cls,
        file: str | Path,
        host: str = LOCAL,
        port: int = 0,
        options: Sequence[str] = (),
        log: Path | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> Self:
        """A server for a GGUF file, not yet started; port 0 takes a free one.

        Raises:
            InputError: the port cannot be bound.
            ServerError: vLLM is not installed.
        """
        port = usable_port(host, port)
        line = command(file, host, port, options)
        log = log or Path(tempfile.mkdtemp(prefix="glm5lab-serve-")) / "server.log"
        return cls(line, url(host, port), log, settings(os.environ), echo)

    def saw(self, line: str) -> None:
        """Note the backend's line."""
        if self.backend is None:
            self.backend = selected_backend([line])

    def wait_ready(
        self, timeout_s: float | None = 1800.0, say: Callable[[str], None] | None = None
    ) -> float:
        """Wait until the server answers requests.

        Args:
            timeout_s: seconds to wait at most; None for no limit.
            say: called every half minute with a line that says how long it has been.

        Returns:
            Seconds waited.

        Raises:
            ServerError: it ended, or was not ready in time; the message has the first error.
        """
        began = said = time.monotonic()
        probe = Client(self.url, timeout_s=5.0)
        while not probe.healthy():
            if self.exit_code is not None:
                code = self.wait()
                raise ServerError(self._failure(f"ended with code {code} before it was ready"))
            now = time.monotonic()
            if timeout_s is not None and now - began > timeout_s:
                raise ServerError(self._failure(f"was not ready after {now - began:.0f} s"))
            if say is not None and now - said > SAY_S:
                said = now
                say(f"the server is not ready yet after {now - began:.0f} s")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def _failure(self, what: str) -> str:
        return f"the server {what}: {self.first_error()}; its whole output: {self.log}"


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT interrupt inside the context (main thread), in background jobs too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signum: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def serve(
    file: str | Path, host: str = LOCAL, port: int = 8000, options: Sequence[str] = ()
) -> None:
    """Serve a file until Ctrl-C, SIGTERM, or the end of the server.

    vLLM's output goes to stderr; the command and the endpoint go to stdout.

    Raises:
        InputError: the file or the port cannot be used; nothing was started.
        ServerError: the server failed.
    """
    from glm5lab.gguf.url import local_path
    from glm5lab.loading.prepare import is_prepared, open_prepared, prepare

    file = local_path(file, "serve")
    if is_prepared(file):
        open_prepared(file)
    else:
        prepare(file)
    server = Server.of_file(file, host, port, options, echo=_to_stderr)
    assignments = [f"{name}={value}" for name, value in server.settings.items()]
    print(shlex.join([*assignments, *server.command]), flush=True)
    try:
        with interruptible(), server:
            seconds = server.wait_ready(timeout_s=None, say=_to_stderr)
            print(
                f"ready after {seconds:.0f} s: {server.url}/v1 (OpenAI API); Ctrl-C stops it",
                flush=True,
            )
            code = server.wait()
            raise ServerError(server._failure(f"ended with code {code}"))
    except KeyboardInterrupt:
        shutil.rmtree(server.log.parent, ignore_errors=True)
        print("stopped", flush=True)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

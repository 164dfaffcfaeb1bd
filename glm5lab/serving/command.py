"""The command line of a server: `vllm serve`, its options, the address that it binds.

vLLM runs in a process of its own; nothing here imports it.
"""

import errno
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from glm5lab.env import engine_distribution, engine_platform, find_gpus
from glm5lab.errors import Glm5labError, InputError
from glm5lab.vllm_plugin import BACKEND

LOCAL = "127.0.0.1"
ANYWHERE = {"0.0.0.0": LOCAL, "::": "::1"}
# Options of vLLM that `glm5lab serve` has itself, and ours.
OURS = {
    "--host": "--host",
    "--port": "--port",
    "--uds": "--host and --port",
    "--api-key": "--api-key",
    "--nnodes": "--nodes",
    "--node-rank": "--node-rank",
    "--master-addr": "--head",
    "--headless": "--nodes and --node-rank",
}


class ServerError(Glm5labError):
    """The server did not start, or ended by itself (exit code 1)."""


def platform() -> str:
    """The platform that vLLM takes here, "cuda" or "cpu"; ServerError when it is missing."""
    kind = engine_platform(engine_distribution(), find_gpus())
    if kind == "none":
        raise ServerError("vLLM is not installed; run `make setup`")
    return kind


def option_value(options: Sequence[str], *names: str) -> str | None:
    """The value of an option of vLLM among others, the last one given; None without it.

    Args:
        options: as typed: `--name value`, `--name=value`; vLLM takes `_` for `-` too.
        names: the option's spellings, such as "--tensor-parallel-size", "-tp".
    """
    found = None
    for number, word in enumerate(options):
        name, equals, value = word.partition("=")
        if spelled(name) in names:
            found = value if equals else next(iter(options[number + 1 :]), "")
    return found


def spelled(name: str) -> str:
    """An option's name as vLLM documents it: `--max_model_len` is `--max-model-len`."""
    return name.replace("_", "-") if name.startswith("--") else name


def require_free(options: Sequence[str]) -> None:
    """InputError for options of vLLM that glm5lab has itself, or that it cannot follow (TLS)."""
    given = sorted({spelled(option.partition("=")[0]) for option in options})
    for name in given:
        if name in OURS:
            fix = f"give {OURS[name]} before `--`"
            raise InputError(name, "is among vLLM's own options", fix)
        if name.startswith("--ssl-"):
            raise InputError(name, "is not supported here", "run `vllm serve FILE` itself for TLS")


def command(
    file: str | Path,
    host: str = LOCAL,
    port: int = 8000,
    options: Sequence[str] = (),
    planned: Sequence[str] = (),
    kind: str | None = None,
) -> list[str]:
    """The command that serves a file: `vllm serve`, run by this Python.

    Args:
        file: any shard of a GGUF file, its folder, or a prepared folder.
        host: address to bind.
        port: port to bind.
        options: the user's of `vllm serve`; they come last and so win over ours.
        planned: our further ones.
        kind: "cpu" or "cuda", where it will run; None for this machine's.

    Raises:
        InputError: the options bind another address (only host and port may) or ask for TLS.
        ServerError: vLLM is not installed.
    """
    require_free(options)
    line = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(file)]
    line += ["--host", host, "--port", str(port)]
    if (kind or platform()) == "cpu" and option_value(options, "--dtype") is None:
        line += ["--dtype", "float32"]
    return [*line, *planned, *options]


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

"""`glm5lab serve`: plan, start, wait, one request, the endpoint; and one end for all of it."""

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from glm5lab.errors import InputError
from glm5lab.gguf.reader import GgufModel
from glm5lab.serving.access import VARIABLE, Access, access
from glm5lab.serving.client import Client
from glm5lab.serving.command import (
    LOCAL,
    ServerError,
    command,
    platform,
    require_free,
    settings,
    url,
    usable_port,
)
from glm5lab.serving.nodes import Nodes
from glm5lab.serving.planning import Layout, Wanted, layout
from glm5lab.serving.server import Server, interruptible
from glm5lab.serving.smoke import smoke
from glm5lab.serving.watch import hold


@dataclass(frozen=True)
class ServeOptions:
    """What the user asks of `serve`, beside the layout.

    Attributes:
        host, port: to bind; port 0 takes a free one.
        api_key: demanded of requests; None for none, or for a generated one.
        no_auth: whether an address beyond this machine may go without.
        nodes: the machines.
        wanted: the layout.
        stall_s: seconds without a sign of progress after which the server counts as stuck; None
            for never.
        log: file for vLLM's output; None for one that a good end removes.
        dry_run: whether only plan and command are shown.
        smoke: whether a request is made before the endpoint is announced.
        verbose: whether vLLM's output goes to stderr, too.
    """

    host: str = LOCAL
    port: int = 8000
    api_key: str | None = None
    no_auth: bool = False
    nodes: Nodes = field(default_factory=Nodes)
    wanted: Wanted = field(default_factory=Wanted)
    stall_s: float | None = 600.0
    log: Path | None = None
    dry_run: bool = False
    smoke: bool = True
    verbose: bool = False


def serve(file: str | Path, options: ServeOptions) -> bool:
    """Serve a file until Ctrl-C, SIGTERM, or the end of the server.

    Plan, command and endpoint go to stdout; progress goes to stderr.

    Returns:
        Whether the server was ready when it was interrupted.

    Raises:
        InputError: the file, the port or an option cannot be used; nothing was started.
        NoFitError: the file does not fit.
        ServerError: the server failed, or is stuck.
    """
    require_free(options.wanted.options)
    # Other machines than the first bind nothing.
    answers = options.nodes.answers
    who = access(options.host, options.api_key, options.no_auth) if answers else Access(None)
    model = open_for_serving(file)
    here = platform()
    plan = layout(model, here, options.wanted)
    if plan.platform != here and not options.dry_run:
        raise InputError("--gpus", "no GPU is here to serve on", "add --dry-run, or leave it out")
    binds = answers and not options.dry_run
    port = usable_port(options.host, options.port) if binds else options.port
    print(f"plan: {plan.summary}")
    keyed = who.key is not None
    lines = [command_line(file, options, plan, port, n, keyed) for n in shown_ranks(options)]
    told = who.lines[who.generated :] if options.dry_run else who.lines
    print("\n".join([*lines, *told]), flush=True)
    if options.dry_run:
        return True
    return run(file, options, plan, port, who)


def open_for_serving(file: str | Path) -> GgufModel:
    """The model, with all that vLLM needs of it prepared."""
    from glm5lab.gguf.url import local_path
    from glm5lab.loading.prepare import is_prepared, open_prepared, prepare

    file = local_path(file, "serve")
    return open_prepared(file if is_prepared(file) else prepare(file))


def shown_ranks(options: ServeOptions) -> list[int]:
    """The machines whose command is shown: a dry run shows all, other runs their own."""
    nodes = options.nodes
    return list(range(1 if nodes.ray else nodes.count)) if options.dry_run else [nodes.rank]


def words(file: str | Path, options: ServeOptions, plan: Layout, port: int, rank: int) -> list[str]:
    """The command on one machine."""
    planned = [*plan.options, *options.nodes.options(rank)]
    given = options.wanted.options
    return command(file, options.host, port, given, planned, plan.platform)


def variables(options: ServeOptions, plan: Layout, who: Access) -> dict[str, str]:
    """The environment variables of the server beside those that are set."""
    return {**settings(os.environ), **plan.environment, **who.settings}


def command_line(
    file: str | Path, options: ServeOptions, plan: Layout, port: int, rank: int, keyed: bool
) -> str:
    """The command as text for a shell; the API key is never part of it."""
    shown = {**settings(os.environ), **plan.environment}
    parts = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
    # The shell ends with an error where the variable is not set: no server without its key.
    parts += [f'{VARIABLE}="${{{VARIABLE}:?}}"'] if keyed else []
    return " ".join([*parts, shlex.join(words(file, options, plan, port, rank))])


def run(file: str | Path, options: ServeOptions, plan: Layout, port: int, who: Access) -> bool:
    """Start the server and hold it; whether it was ready when it was interrupted."""
    folder = log_folder() if options.log is None else None
    log = options.log or Path(folder or "") / "server.log"
    line = words(file, options, plan, port, options.nodes.rank)
    echo = to_stderr if options.verbose else None
    added = variables(options, plan, who)
    server = Server(line, url(options.host, port), log, added, echo)
    to_stderr(f"vLLM's output: {log}")
    client = Client(server.url, api_key=who.key) if options.nodes.answers else None
    ready = False
    try:
        with interruptible(), server:
            if client is not None:
                announce(server, client, options)
            else:
                where = f"the endpoint is on {options.nodes.head}; Ctrl-C stops it"
                print(f"machine {options.nodes.rank} runs; {where}", flush=True)
            ready = True
            hold(server, client, options.stall_s, to_stderr)
    except KeyboardInterrupt:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        print("stopped", flush=True)
        return ready


def announce(server: Server, client: Client, options: ServeOptions) -> None:
    """Wait until the server is ready and has answered, and say where it is."""
    seconds = server.wait_ready(timeout_s=None, say=to_stderr, stall_s=options.stall_s)
    if options.smoke:
        try:
            to_stderr(smoke(client))
        except ServerError as error:
            raise server.unsound(error) from error
    if server.log_error:
        to_stderr(f"{server.log}: {server.log_error}; the log goes no further")
    print(
        f"ready after {seconds:.0f} s: {server.url}/v1 (OpenAI API, model "
        f"{client.model}); Ctrl-C stops it",
        flush=True,
    )


def log_folder() -> str:
    """A new folder for the log; InputError where there is no room."""
    try:
        return tempfile.mkdtemp(prefix="glm5lab-serve-")
    except OSError as error:
        cause = f"takes no log: {error.strerror or error}"
        raise InputError(tempfile.gettempdir(), cause, "give --log FILE, or set TMPDIR") from error


def to_stderr(line: str) -> None:
    """A line of progress; a terminal that has gone is no reason to end."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)

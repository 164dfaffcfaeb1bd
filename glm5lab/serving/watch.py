"""Watches a server that is ready: it ends, or it goes on, or it is stuck, which says nothing.

vLLM's /health answers as long as its HTTP process lives, also where the engine stands still. So
the counters of processed tokens are read, and where they do not move, a request for one token is
made. A queue that is long keeps the counters moving.
"""

import time
from collections.abc import Callable
from typing import NoReturn

from glm5lab.serving.client import Client, ClientError
from glm5lab.serving.server import POLL_S, Server

# Counters that grow in every step of the engine, a long prompt's too.
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens")
MOST_CHECK_S = 30.0
ANSWER_S = 10.0


def metrics(client: Client) -> list[str]:
    """The lines of a server's metrics; none where it does not answer."""
    try:
        return client.text("/metrics").splitlines()
    except ClientError:
        return []


def values(lines: list[str], names: str | tuple[str, ...]) -> tuple[float, ...]:
    """The values of the metrics whose lines begin so."""
    wanted = [line for line in lines if line.startswith(names) and "_created" not in line]
    return tuple(float(line.rpartition(" ")[2]) for line in wanted)


def counters(client: Client, names: tuple[str, ...] = COUNTERS) -> tuple[float, ...]:
    """The counters of these names; empty where the server has none or does not answer."""
    return values(metrics(client), names)


def answers(client: Client) -> bool:
    """Whether the engine gives a token in time; a server that refuses the request answers too."""
    try:
        client.completion([1], max_tokens=1)
    except ClientError as error:
        return error.status is not None and error.status < 500
    return True


class Watch:
    """Tells when a server has last shown that it works.

    Args:
        client: for the server.
        stall_s: seconds without a sign after which it counts as stuck.
        clock: seconds; for tests.
    """

    def __init__(
        self, client: Client, stall_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.client, self.stall_s, self.clock = client, stall_s, clock
        self.every_s = min(MOST_CHECK_S, stall_s / 4)
        self.seen = clock()
        self.last = counters(client)
        # Without counters a long queue would look like a stuck engine.
        self.able = bool(self.last)

    def check(self) -> bool:
        """Ask; whether the server works, or has not been silent for long enough."""
        wait = min(ANSWER_S, self.every_s)
        impatient = Client(self.client.url, self.client.model, wait, self.client.api_key)
        found = counters(impatient)
        moved = bool(found) and found != self.last
        if moved or answers(impatient):
            self.last, self.seen = found or self.last, self.clock()
        return self.clock() - self.seen <= self.stall_s


def hold(
    server: Server,
    client: Client | None,
    stall_s: float | None,
    say: Callable[[str], None] = lambda _line: None,
) -> NoReturn:
    """Wait for the end of a server.

    Args:
        server: ready.
        client: for it; None where the endpoint is on another machine, which watches all of them.
        stall_s: seconds without a sign of work after which it counts as stuck; None for never.
        say: gets a line where that cannot be told.

    Raises:
        ServerError: it ended by itself, or is stuck.
    """
    watch = None if stall_s is None or client is None else Watch(client, stall_s)
    if watch is not None and not watch.able:
        say("the server counts no tokens: an engine that stands still would not be noticed")
    checked = time.monotonic()
    while server.exit_code is None:
        time.sleep(POLL_S)
        if watch is None or not watch.able or time.monotonic() - checked < watch.every_s:
            continue
        works = watch.check()
        checked = time.monotonic()
        if not works and server.exit_code is None:
            raise server.halted(
                f"is stuck: for {watch.clock() - watch.seen:.0f} s no token was processed, "
                "and a request for one was not answered"
            )
    raise server.failed("while it was serving")

"""Whatever happens to a server, it goes on or ends soon, says why, and leaves nothing behind.

Fifty runs in all; `make test` does two of them, `make test-all` the rest. GLM5LAB_FAULT_SEED
draws other processes and moments.
"""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from faults import END_S, Stream, Victim, pause, victim

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ROLES = ("engine", "worker0", "api", "leash", "glm5lab")
SEED = int(os.environ.get("GLM5LAB_FAULT_SEED", "0"))
# Longer than a start is silent where nothing computes, on a busy machine, too.
STALL_S = 20.0


@dataclass(frozen=True)
class Fault:
    """What happens: a signal to a role at a moment, some seconds into it."""

    signum: signal.Signals
    role: str
    moment: str
    after_s: float

    def __str__(self) -> str:
        return f"{self.signum.name}-{self.role}-{self.moment}-{self.after_s:.1f}s"


def drawn() -> Iterator[Fault]:
    """The runs of `make test-all`; the seed decides who is hit and when."""
    chance = random.Random(SEED)
    for number in range(14):
        yield Fault(KILL, chance.choice(ROLES) if number > 4 else ROLES[number], "loading",
                    chance.uniform(0, 20))  # fmt: skip
    for number in range(6):
        yield Fault(KILL, ROLES[number % len(ROLES)], "idle", chance.uniform(0, 2))
    for number in range(9):
        yield Fault(KILL, ROLES[number % len(ROLES)], "stream", chance.uniform(0, 2))
    for role in ("engine", "worker0", "api"):
        yield Fault(STOP, role, "loading", chance.uniform(0, 3))
        yield Fault(STOP, role, "idle", chance.uniform(0, 2))
        yield Fault(STOP, role, "stream", chance.uniform(0, 2))
    yield Fault(STOP, "leash", "idle", 0.5)


def strike(server: Victim, fault: Fault) -> Stream | None:
    """Wait for the moment and let it happen; the stream that was under way."""
    stream = None
    if fault.moment != "loading":
        server.wait_ready()
        stream = Stream(server.client) if fault.moment == "stream" else None
    else:
        server.victim(fault.role)
    pause(fault.after_s, server)
    server.hit(fault.role, fault.signum)
    return stream


def require_named_end(server: Victim, fault: Fault, stream: Stream | None, stall_s: float) -> None:
    """It ends in time, with a code and a cause, and leaves nothing."""
    code = server.end(END_S + (stall_s if fault.signum == STOP else 0))
    text = server.text()
    if fault.role == "glm5lab":
        assert code == -KILL
    else:
        assert code == 1, text
        last = text.splitlines()[-1]
        assert last.startswith("glm5lab: the server "), text
        if fault.signum == STOP:
            assert "is stuck" in last
            assert "is stopped by a signal" in last
        if fault.role in ("api", "leash") and fault.signum == KILL:
            assert "was killed by SIGKILL" in last
        assert "whole output" in last
    if stream is not None:
        assert stream.ended(END_S)
        assert stream.error is not None
        assert "pieces" in str(stream.error)
    assert server.leftovers() == []


def run(file, fault: Fault) -> None:
    with victim(file, 120.0 if fault.signum == KILL else STALL_S) as server:
        stream = strike(server, fault)
        if (fault.signum, fault.role) == (STOP, "leash"):
            pause(STALL_S + 2, server)
            assert server.works()
            assert server.interrupt() == 0
            assert server.leftovers() == []
        else:
            require_named_end(server, fault, stream, STALL_S)


def disconnects(server: Victim, times: int) -> None:
    """Clients that leave in the middle of an answer; the next one is answered as before."""
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = server.client.completion([4, 5, 6], **options)
    for number in range(times):
        stream = server.client.stream_completion([7, 7, number + 5], max_tokens=2000)
        for _ in range(1 + number % 3):
            next(stream)
        stream.close()
        assert server.client.completion([4, 5, 6], **options) == expected


@pytest.mark.slow
def test_full_disk_clients_that_leave_and_a_killed_worker(sample_f32, tmp_path):
    """One server: its log's disk is full, clients leave; then a worker is killed mid-stream."""
    log = tmp_path / "full"
    log.symlink_to("/dev/full")
    with victim(sample_f32, log=log) as server:
        server.wait_ready()
        assert "No space left on device; the log goes no further" in server.text()
        disconnects(server, 8)
        fault = Fault(KILL, "worker0", "stream", 0.0)
        stream = Stream(server.client)
        server.hit(fault.role, fault.signum)
        require_named_end(server, fault, stream, 0.0)
        assert "the log is not complete: No space left on device" in server.text()


@pytest.mark.slow
def test_a_stopped_engine_is_found_and_ended(sample_f32):
    run(sample_f32, Fault(STOP, "engine", "idle", 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("fault", drawn(), ids=str)
def test_every_fault_ends_well(sample_f32, fault):
    run(sample_f32, fault)


def test_there_are_fifty_runs():
    """The drawn ones, eight clients, the full disk, the killed worker and the stopped engine."""
    assert len(list(drawn())) + 8 + 3 == 50

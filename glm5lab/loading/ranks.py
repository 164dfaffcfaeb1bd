"""What the ranks of one model tell each other while they load: failures, and what they took.

Everything goes through the key-value store of torch's process group, never through a collective
call: a rank that fails would leave the others waiting in one.
"""

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from glm5lab.errors import CheckError, Glm5labError, printable

# Between looks at the store, seconds; and how long a rank waits between looks when it is done.
LOOK_S = 0.5
WAIT_S = 0.05

_loads: Counter[tuple[str, tuple[int, ...]]] = Counter()


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: Any) -> None:
        """Put a value."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


class RankError(CheckError):
    """Another rank could not load; its message says why."""


class Ranks:
    """One rank's end of the line.

    Args:
        store: shared by the ranks; None where there is only this one.
        rank: this one's number.
        members: the numbers of all of them.
        key: the same on all of them, and for this load only.
    """

    def __init__(
        self, store: Store | None, rank: int = 0, members: Sequence[int] = (0,), key: str = ""
    ) -> None:
        self.store = store if len(members) > 1 else None
        self.rank, self.members, self.key = rank, tuple(members), f"glm5lab/{key}"
        self._looked = 0.0

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of them."""
        return self.rank == min(self.members)

    def fail(self, error: BaseException) -> None:
        """Let the others know why this rank stops; the first one's message stays."""
        if self.store is None or isinstance(error, RankError):
            return
        fatal = isinstance(error, Glm5labError)
        text = str(error) if fatal else f"{type(error).__name__}: {error}"
        self.store.set(f"{self.key}/failed/{self.rank}", printable(text))
        if not self.store.check([f"{self.key}/failed"]):
            self.store.set(f"{self.key}/failed", str(self.rank))

    def look(self, now: bool = False) -> None:
        """Raise RankError if another rank has failed; asks the store twice a second at most."""
        if self.store is None or (not now and time.monotonic() - self._looked < LOOK_S):
            return
        self._looked = time.monotonic()
        if self.store.check([f"{self.key}/failed"]):
            rank = self.store.get(f"{self.key}/failed").decode()
            message = self.store.get(f"{self.key}/failed/{rank}").decode()
            raise RankError(f"rank {rank} could not load: {message}")

    def exchange(self, value: Any) -> list[Any]:
        """What every rank gives, in the order of `members`; waits until all have given theirs.

        Raises:
            RankError: a rank failed meanwhile.
        """
        if self.store is None:
            return [value]
        self.store.set(f"{self.key}/done/{self.rank}", pickle.dumps(value))
        keys = [f"{self.key}/done/{member}" for member in self.members]
        while not self.store.check(keys):
            self.look()
            time.sleep(WAIT_S)
        return [pickle.loads(self.store.get(key)) for key in keys]


def ranks_of(members: Sequence[int], what: str) -> Ranks:
    """This process among the ranks that load the same model.

    Args:
        members: their numbers in torch's default process group.
        what: names the model, for ranks that load several.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not dist.is_initialized() or len(members) < 2:
        return Ranks(None)
    _loads[what, tuple(members)] += 1
    key = f"{what}/{'-'.join(map(str, members))}/{_loads[what, tuple(members)]}"
    return Ranks(_get_default_store(), dist.get_rank(), members, key)

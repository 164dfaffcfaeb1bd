"""More than one machine: vLLM's own options for it, which glm5lab plans for and passes through."""

from dataclasses import dataclass

from glm5lab.errors import InputError

PORT = 29501  # vLLM's default --master-port


@dataclass(frozen=True)
class Nodes:
    """Machines that serve together.

    Attributes:
        count: how many.
        rank: this one's number; the endpoint is on number 0.
        head: address of number 0, as the others reach it.
        port: where they meet there.
        ray: whether Ray, already running on all of them, starts the workers.
    """

    count: int = 1
    rank: int = 0
    head: str | None = None
    port: int = PORT
    ray: bool = False

    def __post_init__(self) -> None:
        """InputError for counts and addresses that contradict each other."""
        if not 0 <= self.rank < self.count:
            cause = f"{self.rank}: expected 0 to {self.count - 1} with --nodes {self.count}"
            raise InputError("--node-rank", cause, "number the machines from 0")
        if self.ray and self.rank:
            cause = f"{self.rank}: Ray starts the workers of other machines itself"
            raise InputError("--node-rank", cause, "run serve on one machine of the Ray cluster")
        if self.count > 1 and not self.ray and not self.head:
            cause = f"is missing with --nodes {self.count}"
            raise InputError("--head", cause, "give the address of machine 0, the same on all")
        if self.count == 1 and (self.ray or self.head):
            name = "--ray" if self.ray else "--head"
            raise InputError(name, "is for several machines", "give --nodes, or leave it out")

    def options(self, rank: int | None = None) -> list[str]:
        """Options of vLLM on one machine; None for this one."""
        if self.count == 1:
            return []
        if self.ray:
            return ["--distributed-executor-backend", "ray"]
        rank = self.rank if rank is None else rank
        words = ["--nnodes", str(self.count), "--node-rank", str(rank)]
        words += ["--master-addr", str(self.head), "--master-port", str(self.port)]
        return [*words, "--headless"] if rank else words

    @property
    def answers(self) -> bool:
        """Whether the endpoint is on this machine."""
        return self.rank == 0

"""How far a starting server is, read from what it writes."""

import re
import time
from collections.abc import Callable

from glm5lab.serving.process import message

# What vLLM writes when a stage begins, in the order of the stages; one may be skipped.
STAGES = (
    ("imports", re.compile(r"(?!)")),
    ("engine", re.compile(r"Initializing a V\d LLM engine")),
    ("workers", re.compile(r"world_size=\d+ rank=\d+|rank \d+ in world size")),
    ("weights", re.compile(r"Starting to load model|^(Loading|Dequantizing)[^:]*:\s+\d+%")),
    ("profiling", re.compile(r"Model loading took|Dynamo bytecode transform|Memory profiling")),
    ("cache", re.compile(r"Available KV cache memory|KV cache size:|for KV cache on node")),
    ("graphs", re.compile(r"^(Capturing|Profiling) [^:]*:\s+\d+%")),
    ("http", re.compile(r"Starting vLLM server on")),
)
# A progress bar: "Dequantizing:  37%|###", "Capturing CUDA graphs (mixed prefill-decode):  3%|".
BAR = re.compile(r"^(?P<what>[A-Z][^:|]*):\s+(?P<percent>\d+)%\|")
LONGEST = 100
PROCESS = re.compile(r"^\((?P<name>[\w. -]+) pid=(?P<pid>\d+)\)")


class Progress:
    """The stage of a start, and for how long nothing has been heard.

    Args:
        clock: seconds; for tests.

    Attributes:
        stage: name of the stage, one of STAGES.
        last: the last line that said something.
        names: what the log calls each process, by id.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = self.since = self.heard = clock()
        self.number, self.percent, self.last = 0, "", ""
        self.names: dict[int, str] = {}

    @property
    def stage(self) -> str:
        """The latest stage that any process has reached."""
        return STAGES[self.number][0]

    @property
    def quiet_s(self) -> float:
        """Seconds since the last line."""
        return self.clock() - self.heard

    def see(self, line: str) -> bool:
        """Take in a line of output; whether a new stage began with it."""
        text = message(line).strip()
        now = self.clock()
        self.heard = now
        if text:
            self.last = text[:LONGEST]
        if (process := PROCESS.match(line)) and int(process["pid"]) not in self.names:
            self.names[int(process["pid"])] = process["name"]
        later = [n for n in range(self.number + 1, len(STAGES)) if STAGES[n][1].search(text)]
        if later:
            self.number, self.since, self.percent = later[-1], now, ""
        if bar := BAR.match(text):
            self.percent = f" {bar['percent']} %"
        return bool(later)

    def where(self) -> str:
        """The stage, how far, and since when: "weights 37 %, for 12 s"."""
        return f"{self.stage}{self.percent}, for {self.clock() - self.since:.0f} s"

    def waiting(self) -> str:
        """A line for somebody who waits."""
        line = f"{self.clock() - self.began:.0f} s: {self.where()}"
        return line if self.quiet_s < 5 else f"{line}; nothing written for {self.quiet_s:.0f} s"

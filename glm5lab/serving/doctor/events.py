"""What a scan of a log keeps of it: few things, however long the log."""

import re
from collections import deque
from dataclasses import dataclass, field

from glm5lab.serving.doctor.lines import Line, title
from glm5lab.serving.doctor.rules import Rule

KEPT_EVENTS = 400  # in a run, of one rule at most KEPT_OF_A_RULE
KEPT_OF_A_RULE = 40
KEPT_FRAMES = 12
KEPT_PROCESSES = 4096

# The last line of a traceback.
EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Failure|NotFound|Empty"
    r"|OutOfResources|Timeout)(?:: |:?$)"
)
FRAME = re.compile(rb' File "(?P<file>[^"]*)", line \d+(?:, in (?P<function>[^\r]*))?')
HEAD = b"Traceback (most recent call last)"
CHAIN = re.compile(
    r"^(?:The above exception was the direct cause of|During handling of the above exception)"
)
PROCESS_HEAD = re.compile(r"^Process (?P<name>[A-Za-z][\w.:-]*?):$")
# Files whose records name no process in old versions, and who writes them.
WRITERS = {"core.py": "EngineCore", "core_client.py": "APIServer", "async_llm.py": "APIServer",
           "api_server.py": "APIServer", "launcher.py": "APIServer"}  # fmt: skip
# Frames that only the front end's process has.
FRONT_END = (b"entrypoints/", b"bin/vllm", b"core_client.py", b"v1/engine/utils.py")


@dataclass(slots=True, eq=False)
class Trace:
    """A traceback of one process, with those that it names as its causes.

    Attributes:
        start: number of its first line.
        last: number of its last line so far.
        raw: the lines of its innermost frames.
        open: its exception has not come yet.
        linked: a line said that another traceback follows from this one.
        owner: the process that it belongs to, where the lines themselves do not say.
        front_end: it has frames of the front end's process.
        used: an event may rest on it.
    """

    start: int
    last: int
    raw: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT_FRAMES))
    open: bool = True
    linked: bool = False
    owner: str = ""
    front_end: bool = False
    used: bool = False

    @property
    def frames(self) -> str:
        """`file in function`, one a line, the innermost last."""
        found = []
        for raw in self.raw:
            if frame := FRAME.search(raw):
                words = (frame["file"], b" in ", frame["function"] or b"")
                found.append(b"".join(words).decode("utf-8", "replace").rstrip())
        return "\n".join(found).replace("\\", "/")


@dataclass(slots=True, eq=False)
class Event:
    """A line that says something about a failure.

    Attributes:
        rule: what matched; None for an exception, or an error, that no rule knows.
        exception: the line names an exception.
        groups: the rule's groups, "" for those that took no part.
        stage: how far the start had come, or what the traceback was doing.
    """

    line: Line
    rule: Rule | None
    stage: str
    groups: dict[str, str]
    frames: str
    exception: bool = False
    trace: Trace | None = None

    @property
    def number(self) -> int:
        """The line's number."""
        return self.line.number

    @property
    def key(self) -> str:
        """What it is counted by."""
        return self.rule.id if self.rule is not None else f"?{self.exception}"

    @property
    def layer(self) -> str | None:
        """The rule's layer; None for symptoms and where no rule knows it."""
        return self.rule.layer if self.rule is not None else None

    @property
    def role(self) -> str:
        """The rule's role, or `unknown`."""
        return self.rule.role if self.rule is not None else "unknown"


@dataclass(slots=True, eq=False)
class Run:
    """One start of the server; a log holds several where it was restarted.

    Attributes:
        rank: index of the stage reached, -1 before any.
        marks: the last line of each stage, by its name.
        fatal: number of the last line that says the engine has failed, 0 without.
        ready: number of the line that says it answers, 0 without.
        advanced: number of the line that reached the latest stage.
        progress: number of the last line that shows tokens being made.
        posts: number of the last request that was answered with 200.
        shutdown: number of the line with which a shutdown began that somebody asked for.
        running: the last report of the engine has requests; None without a report.
        stalls: of each engine: how many reports in a row showed no tokens for running requests,
            the first of them, and how full the cache was.
        waits: lines that say nothing goes on, the last 20 of them.
    """

    events: list[Event] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    rank: int = -1
    stage: str = ""
    marks: dict[str, Line] = field(default_factory=dict)
    fatal: int = 0
    ready: int = 0
    advanced: int = 0
    progress: int = 0
    posts: int = 0
    shutdown: int = 0
    running: bool | None = None
    stalls: dict[bytes, tuple[int, Line, float]] = field(default_factory=dict)
    waits: deque[Line] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def failed(self) -> bool:
        """Something failed in it that was not asked to stop."""
        return any(e.role in ("root", "late", "weak", "unknown", "symptom") for e in self.events)

    def has_enough(self, exception: bool) -> bool:
        """Exceptions (or mere errors) that no rule knows would only be counted from here on."""
        return self.counts.get(f"?{exception}", 0) >= KEPT_OF_A_RULE

    def add(self, event: Event) -> None:
        """Keep an event, or only count it."""
        key = event.key
        if event.rule is not None and event.rule.fatal:
            self.fatal = event.number
        seen = self.counts[key] = self.counts.get(key, 0) + 1
        if seen > KEPT_OF_A_RULE:  # the first and the last ones tell most
            same = [e for e in self.events if e.key == key]
            self.events.remove(same[len(same) // 2])
        if len(self.events) < KEPT_EVENTS:
            self.events.append(event)


@dataclass(slots=True, eq=False)
class Scan:
    """All that was kept of one log.

    Attributes:
        file: its name.
        names: by process id, the most telling name that the log has for it.
        ranks: process id by rank.
        lines: number of lines.
        tail: the last lines; the very last has the number `lines`.
        sparse: the model has sparse attention; dense: the line that names a dense backend.
    """

    file: str
    runs: list[Run] = field(default_factory=lambda: [Run()])
    names: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    lines: int = 0
    tail: list[bytes] = field(default_factory=list)
    sparse: bool = False
    dense: Line | None = None

    @property
    def run(self) -> Run:
        """The current run."""
        return self.runs[-1]

    def know(self, line: Line) -> None:
        """Note the names and ranks of processes."""
        if line.pid is None or not line.name or len(self.names) >= KEPT_PROCESSES:
            return
        known = self.names.get(line.pid)
        if known is None or (known == "Worker" and line.name != "Worker"):
            self.names[line.pid] = line.name
        if "rank=" in line.text and (found := re.search(r"world_size=\d+ rank=(\d+)", line.text)):
            self.ranks[int(found[1])] = line.pid

    def process(self, event: Event) -> tuple[str | None, int | None]:
        """Name and process id of whom an event is about, as the log has them."""
        groups = event.groups
        if event.rule is not None and event.rule.whom:
            return event.rule.whom, self._pid_of(event.rule.whom)
        named, text = _first(groups, "proc"), _first(groups, "pid")
        if text.isdigit():
            pid = int(text)
            return title(self.names.get(pid, ""), pid), pid
        if named:
            return named, self._pid_of(named)
        if event.line.name:
            return title(event.line.name, event.line.pid), event.line.pid or self._pid_of(
                event.line.name
            )
        if event.line.pid:
            return title(self.names.get(event.line.pid, ""), event.line.pid), event.line.pid
        if event.line.source in WRITERS:
            return WRITERS[event.line.source], None
        if event.trace is not None and event.trace.owner:
            return event.trace.owner, self._pid_of(event.trace.owner)
        if event.trace is not None and event.trace.front_end:
            return "APIServer", self._pid_of("APIServer")
        return None, None

    def _pid_of(self, name: str) -> int | None:
        """The process id of a name, or of the rank at its end (VllmWorker-1, rank3)."""
        pids = [pid for pid, known in self.names.items() if known == name]
        if len(pids) == 1:
            return pids[0]
        rank = re.fullmatch(r"(?:VllmWorker-|rank)(\d+)", name)
        return self.ranks.get(int(rank[1])) if rank else None


def _first(groups: dict[str, str], name: str) -> str:
    """The first group called `name`, or `name` and a digit, that found something."""
    numbered = (group for group in groups if group.rstrip("0123456789") == name)
    return next((groups[group] for group in numbered if groups[group]), "")

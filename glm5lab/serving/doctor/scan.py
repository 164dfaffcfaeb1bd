"""One pass over a log: most lines are dropped after a glance, the telling ones are kept."""

import re
from collections.abc import Iterable, Sequence

from glm5lab.serving.doctor import events
from glm5lab.serving.doctor.events import Event, Run, Scan, Trace
from glm5lab.serving.doctor.lines import Line, parse
from glm5lab.serving.doctor.reader import Numbered
from glm5lab.serving.doctor.rules import FOLD, Book, Rule, book
from glm5lab.serving.doctor.sieve import PREFIX, Sieve

QUIET = frozenset({"DEBUG", "INFO", "WARNING"})
LONGEST = 6_000  # characters of a line that patterns are tried on
STALE = 60  # lines after which a traceback without a process name is over
TAIL = 40
MOST_TRACES = 512  # tracebacks open at the same time
MOST_REPORTS = 1000  # reports of speed that are taken apart for more than that
THROUGHPUT = b"Avg generation throughput: "
NOTHING = b"Avg generation throughput: 0.0 tokens/s"
NO_PROMPT = b"Avg prompt throughput: 0.0 tokens/s"
IDLE = b"Running: 0 reqs"
USAGE = re.compile(rb"cache usage: (\d+\.\d+)%")
OK = b'HTTP/1.1" 200'
READY = b"Application startup complete"
START = b"non-default args"
WAITING = re.compile(
    r"no new (?:lines|output|log)|no output (?:for|since)|still (?:waiting|hanging|stuck)"
    r"|Waiting for (?:\d+ local, \d+ remote )?core engine|Waiting for creating a placement group"
    r"|No available .*block found in \d+ second",
    re.IGNORECASE,
)
WAIT_WORDS = frozenset({b"new", b"output", b"still", b"waiting", b"available"})
# Somebody asked for the end; a process that ended by itself makes others shut down, too.
SHUTDOWN = re.compile(
    r"^Shutting down$|\[shutdown\] API server: shutdown triggered"
    r"|\[shutdown\] EngineCore: trigger received signal|Received (?:KeyboardInterrupt|SIG\w+)"
    r"|^KeyboardInterrupt\b|Stopping (?:the )?(?:vllm|glm)|: Deactivated successfully",
)
SPARSE = re.compile(r"Resolved architecture: \w*(?:Dsa|V32)\w*")
DENSE = re.compile(r"Using (?P<name>\w+) attention backend")


class Scanner:
    """Reads the lines of one log, in order; `scan` is what it found so far."""

    def __init__(self, file: str, rules: Book | None = None) -> None:
        self.book = rules or book()
        self.scan = Scan(file)
        self._traces: dict[bytes, Trace] = {}
        self._owner = self._time = ""
        self._reports = 0
        self._sieve = Sieve(self.book)

    def read(self, blocks: Iterable[Numbered]) -> None:
        """Take more lines."""
        for numbers, lines in blocks:
            start = 0
            while start < len(lines):
                glance = self._glance if self._settled() else self._read
                start += glance(numbers[start:], lines[start:] if start else lines)
            if lines:
                self.scan.lines = numbers[-1]
                self.scan.tail = [*self.scan.tail, *lines[-TAIL:]][-TAIL:]

    def _settled(self) -> bool:
        """An earlier run has its cause: of the later ones it only matters whether they work."""
        return len(self.scan.runs) > 1 and any(
            e.role == "root" and e.number > run.ready
            for run in self.scan.runs[:-1]
            for e in run.events
        )

    def _glance(self, numbers: Sequence[int], lines: list[bytes]) -> int:
        """Look for starts, readiness and requests only; the number of lines read."""
        for number, raw in zip(numbers, lines, strict=True):
            if THROUGHPUT in raw:
                self._throughput(number, raw)
            elif READY in raw or START in raw:
                self._line(number, raw, self.book.keys.intersection(raw.translate(FOLD).split()))
            elif OK in raw and b"POST /v1" in raw:
                self.scan.run.posts = number
        return len(lines)

    def _read(self, numbers: Sequence[int], lines: list[bytes]) -> int:
        """Look at every line; ends at a new run. This loop is the doctor's speed."""
        sieve, traces, runs = self._sieve, self._traces, len(self.scan.runs)
        for count, (number, raw) in enumerate(zip(numbers, lines, strict=True), 1):
            head = raw[:PREFIX]
            if b" INFO" in head or head[:4] == b"INFO":
                if THROUGHPUT in raw:
                    self._throughput(number, raw)
                    continue
                if OK in raw:
                    if b"POST /v1" in raw:
                        self.scan.run.posts = number
                    continue
                if b" NCCL INFO " in head:
                    continue
                words = sieve.quiet(raw, head)
            elif b'File "' in raw:
                key = _key(raw)
                trace = traces.get(key)
                if trace is not None:
                    trace.raw.append(raw)
                    trace.last = number
                    if not trace.front_end and not key:
                        trace.front_end = any(part in raw for part in events.FRONT_END)
                continue
            elif events.HEAD in raw:
                self._opens(number, raw)
                continue
            elif (
                (raw[:4] == b"    " or b"     " in head)
                and b"rror: " not in raw
                and b"atal" not in raw
                and b"WARN" not in raw
            ):
                continue  # code in a traceback
            else:
                words = sieve.loud(raw, head)
            if words is not None:
                sieve.told(self._line(number, raw, words))
                if len(self.scan.runs) != runs:
                    return count
        return len(lines)

    def _throughput(self, number: int, raw: bytes) -> None:
        """A report of the engine's speed: progress, nothing to do, or a stall."""
        run = self.scan.run
        begin = raw.find(b"Engine ")
        engine = raw[begin : begin + 11] if begin >= 0 else b""
        running = IDLE not in raw
        if NOTHING not in raw or NO_PROMPT not in raw:
            run.progress = number
            run.stalls.pop(engine, None)
        elif not running:
            run.stalls.pop(engine, None)
        else:
            used = float(found[1]) if (found := USAGE.search(raw)) else 0.0
            count, start, before = run.stalls.get(engine) or (0, parse(number, raw), used)
            if used > before:  # a long prompt: its tokens are counted when the last is done
                count, start, run.progress = 0, parse(number, raw), number
            run.stalls[engine] = (count + 1, start, used)
        run.running = running
        run.ready = run.ready or run.progress
        run.stage = "serving"
        if (b"Corrupted: " in raw and b"Corrupted: 0" not in raw) or b"Preemptions: " in raw:
            self._reports += 1
            if self._reports <= MOST_REPORTS:
                self._line(number, raw, frozenset({b"corrupted", b"preemptions"}))

    def _line(self, number: int, raw: bytes, words: frozenset[bytes]) -> bool:
        """Take a line apart that may matter; whether it did."""
        line = parse(number, raw)
        self.scan.know(line)
        line.time = self._time = line.time or self._time
        waits = bool(words & WAIT_WORDS) and WAITING.search(line.text) is not None
        if waits:
            self.scan.run.waits.append(line)
        key = _key(raw)
        trace = self._traces.get(key)
        if trace is not None and not line.name and line.number - trace.last > STALE:
            del self._traces[key]
            trace = None
        if self._in_traceback(line, key, trace):
            return True
        line.text = line.text[:LONGEST]
        mark = (line.level in QUIET or not line.level) and self._milestone(line, words)
        return self._judge(line, words, trace) or mark or waits

    def _opens(self, number: int, raw: bytes) -> None:
        """A traceback begins, or the next one of a chain."""
        key = _key(raw)
        trace = self._traces.get(key)
        if trace is not None and trace.linked:
            trace.linked, trace.open, trace.last = False, True, number
            trace.raw.clear()
        else:
            if len(self._traces) >= MOST_TRACES:
                self._traces.clear()
            self._traces[key] = Trace(number, number, owner=self._owner)
        self._owner = ""

    def _in_traceback(self, line: Line, key: bytes, trace: Trace | None) -> bool:
        """Assemble tracebacks; True for a line of one that is not its exception."""
        text = line.text
        if process := events.PROCESS_HEAD.match(text):
            self._owner = process["name"]
            return True
        if trace is None:
            return False
        if events.CHAIN.match(text):
            trace.linked = True
            return True
        return trace.open and text.startswith("    ")

    def _milestone(self, line: Line, words: frozenset[bytes]) -> bool:
        """Stages of a start, a new start, and a shutdown that somebody asked for."""
        run, found = self.scan.run, False
        for stage in {s for word in words for s in self.book.stages_by_word.get(word, ())}:
            if not stage.pattern.search(line.text):
                continue
            found = True
            restart = stage.rank == 0 and "platform" not in line.text
            if restart and (run.failed or run.shutdown or run.ready):
                self._traces.clear()
                self._sieve.forget()
                run = Run()
                self.scan.runs = [*self.scan.runs[:1], *self.scan.runs[1:][-6:], run]
            if stage.rank >= run.rank:
                run.rank, run.stage = stage.rank, stage.name
                # Ranks announce themselves in any order; the start of NCCL comes after that.
                if b"nccl" in words or "nccl" not in getattr(run.marks.get(stage.name), "text", ""):
                    run.marks[stage.name] = line
            if stage.name == "ready":
                run.ready = line.number
        if SPARSE.search(line.text):
            self.scan.sparse = True
        elif (backend := DENSE.search(line.text)) and "SPARSE" not in backend["name"].upper():
            self.scan.dense = self.scan.dense or line
        if run.shutdown == 0 and SHUTDOWN.search(line.text) and not run.failed:
            run.shutdown, run.stage, found = line.number, "shutdown", True
        return found

    def _judge(self, line: Line, words: frozenset[bytes], trace: Trace | None) -> bool:
        """Match the rules, else keep exceptions and errors that none knows; whether one did."""
        run, frames, stage = self.scan.run, "", self.scan.run.stage
        quiet = line.level in QUIET
        exception = not quiet and events.EXCEPTION.match(line.text) is not None
        if exception and trace is not None:
            trace.open, trace.last = False, line.number
        if exception and not words and run.has_enough(exception):
            return True
        if trace is not None:
            frames = trace.frames
            stage = self.book.stage_of(frames) or stage
        if found := self._match(line.text, words, frames, stage, quiet):
            rule, match = found
            groups = {name: value or "" for name, value in match.groupdict().items()}
            run.add(Event(line, rule, stage, groups, frames, exception, trace))
            if rule.fatal:
                self._sieve.forget()
            return True
        if exception or (
            line.level in ("ERROR", "CRITICAL")
            and not line.text.startswith("  ")
            and len(line.text) >= 4
        ):
            run.add(Event(line, None, stage, {}, frames, exception, trace))
            return True
        return False

    def _match(
        self, text: str, words: frozenset[bytes], frames: str, stage: str, quiet: bool
    ) -> tuple[Rule, re.Match[str]] | None:
        """The first rule that holds."""
        candidates = {r.order: r for w in words for r in self.book.rules_by_word.get(w, ())}
        small = text.lower()
        for order in sorted(candidates):
            rule = candidates[order]
            if (quiet and not rule.quiet) or (rule.stages and stage not in rule.stages):
                continue
            if rule.literals and not any(part in small for part in rule.literals):
                continue
            match = rule.pattern.search(text)
            if match and (rule.frames is None or rule.frames.search(frames)):
                return rule, match
        return None


def _key(raw: bytes) -> bytes:
    """What tells the lines of one process from those of others: its innermost tag."""
    at = raw.find(b"pid=", 0, PREFIX)
    if at < 0:
        at = raw.find(b"[rank", 0, PREFIX)
        return raw[at : raw.find(b"]", at)] if at >= 0 else b""
    end = raw.find(b")", at)
    while raw[end + 1 : end + 3] == b" (" and (inner := raw.find(b"pid=", end, end + 60)) >= 0:
        at, end = inner, raw.find(b")", inner)
    return raw[at:end]

"""Lines of a log that may matter, one by one: tracebacks, stages, and what the rules say."""

import re

from glm5lab.serving.doctor import events
from glm5lab.serving.doctor.events import Event, Run, Scan, Trace
from glm5lab.serving.doctor.lines import Line, parse
from glm5lab.serving.doctor.rules import Book, Rule
from glm5lab.serving.doctor.sieve import PREFIX, Kept, Sieve

QUIET = frozenset({"DEBUG", "INFO", "WARNING"})
LONGEST = 6_000  # characters of a line that patterns are tried on
STALE = 60  # lines after which a traceback without a process name is over
MOST_TRACES = 512  # tracebacks open at the same time
MOST_REPORTS = 1000  # reports of speed that are taken apart for more than that
NO_EXCEPTION = "NoneType: None"  # what Python logs in place of an exception that there is not
NOTHING = b"Avg generation throughput: 0.0 tokens/s"
NO_PROMPT = b"Avg prompt throughput: 0.0 tokens/s"
IDLE = b"Running: 0 reqs"
USAGE = re.compile(rb"cache usage: (\d+\.\d+)%")
WAITING = re.compile(
    r"no new (?:lines|output|log)|no output (?:for|since)|still (?:waiting|hanging|stuck)"
    r"|Waiting for (?:\d+ (?:local, \d+ remote )?)?core engine"
    r"|Waiting for creating a placement group"
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


class Judge:
    """Takes lines apart and keeps what they tell; `scan` is what was found so far.

    Attributes:
        book: the rules.
        sieve: what decides on the lines that come here.
        traces: the last traceback of each process.
        time: of the last line that had one.
    """

    def __init__(self, file: str, book: Book) -> None:
        self.book, self.sieve = book, Sieve(book)
        self.scan = Scan(file)
        self.traces: dict[bytes, Trace] = {}
        self.time, self._owner = "", ""
        self._reports = 0

    def catch_up(self) -> None:
        """The last of the lines of each sort that only matter as the last one."""
        later, self.sieve.later, now = self.sieve.later, {}, self.time
        for number, raw, self.time in sorted(later.values()):
            self.take(number, raw, self.sieve.words(raw))
        self.time = now

    def throughput(self, number: int, raw: bytes) -> None:
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
                self.take(number, raw, frozenset({b"corrupted", b"preemptions"}))

    def take(self, number: int, raw: bytes, words: frozenset[bytes]) -> Kept:
        """Take a line apart that may matter; what it was good for."""
        line = parse(number, raw)
        self.scan.know(line)
        line.time = self.time = line.time or self.time
        waits = bool(words & WAIT_WORDS) and WAITING.search(line.text) is not None
        if waits:
            self.scan.run.waits.append(line)
        key = key_of(raw)
        trace = self.traces.get(key)
        if trace is not None and not line.name and line.number - trace.last > STALE:
            del self.traces[key]
            trace = None
        if self._in_traceback(line, key, trace):
            return "trace"
        line.text = line.text[:LONGEST]
        mark = (line.level in QUIET or not line.level) and self._milestone(line, words)
        if self._judge(line, words, trace) or mark:
            return "wait" if waits else "event"
        return "wait" if waits else ""

    def opens(self, number: int, raw: bytes) -> None:
        """A traceback begins, or the next one of a chain."""
        key = key_of(raw)
        trace = self.traces.get(key)
        if trace is not None and trace.linked:
            trace.linked, trace.open, trace.last = False, True, number
            trace.raw.clear()
        else:
            if len(self.traces) >= MOST_TRACES:
                self.traces.clear()
            if trace is None or trace.used:
                trace = self.traces[key] = Trace(number, number)
            else:  # of a traceback that no event came from, nothing is needed any more
                trace.raw.clear()
            trace.start = trace.last = number
            trace.open, trace.linked, trace.front_end = True, False, False
            trace.owner = self._owner
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
                self.catch_up()
                self.traces.clear()
                self.sieve.forget()
                run = Run()
                self.scan.runs = [*self.scan.runs[:1], *self.scan.runs[1:][-6:], run]
            if stage.rank > run.rank:
                run.advanced = line.number
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
            frames, trace.used = trace.frames, True
            stage = self.book.stage_of(frames) or stage
        if found := self._match(line.text, words, frames, stage, quiet):
            rule, match = found
            groups = {name: value or "" for name, value in match.groupdict().items()}
            run.add(Event(line, rule, stage, groups, frames, exception, trace))
            if rule.fatal:
                self.sieve.forget()
            return True
        if exception or (
            line.level in ("ERROR", "CRITICAL")
            and not line.text.startswith(("  ", NO_EXCEPTION))
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


def key_of(raw: bytes) -> bytes:
    """What tells the lines of one process from those of others: its innermost tag."""
    at = raw.find(b"pid=", 0, PREFIX)
    if at < 0:
        at = raw.find(b"[rank", 0, PREFIX)
        return raw[at : raw.find(b"]", at)] if at >= 0 else b""
    end = raw.find(b")", at)
    while raw[end + 1 : end + 3] == b" (" and (inner := raw.find(b"pid=", end, end + 60)) >= 0:
        at, end = inner, raw.find(b")", inner)
    return raw[at:end]

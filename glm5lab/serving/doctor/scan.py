"""One pass over a log: most lines are dropped after a glance, the telling ones are kept."""

import re
from collections.abc import Iterable, Iterator

from glm5lab.serving.doctor import events
from glm5lab.serving.doctor.judge import Judge, key_of
from glm5lab.serving.doctor.reader import LONGEST, Lines, cut
from glm5lab.serving.doctor.rules import book
from glm5lab.serving.doctor.sieve import LATER, PREFIX

TAIL, LONGEST_TAIL = 40, 1 << 17  # lines that are kept of the end, bytes they may have
THROUGHPUT = b"Avg generation throughput: "
OK = b'HTTP/1.1" 200'
POST = b'"POST /v1'
CODE = re.compile(rb"[\]):] {5}")  # of a traceback, indented behind whatever stands before it
# What is looked for after a run that has its cause.
GLANCES = (THROUGHPUT, b"Application startup complete", b"non-default args")


class Scanner(Judge):
    """Reads the lines of one log, in order; `scan` is what it found so far."""

    def __init__(self, file: str) -> None:
        super().__init__(file, book())

    def read(self, blocks: Iterable[Lines]) -> None:
        """Take more lines."""
        for block in blocks:
            text, at, index = block.text, 0, 0
            while at < len(text):
                glance = self._glance if self._settled() else self._read
                at, index = glance(block, at, index)
            if text:
                self.catch_up()
                self.scan.lines = block.numbers[-1]
                tail = text[-LONGEST_TAIL:].split(b"\n")[:-1]
                self.scan.tail = [*self.scan.tail, *tail[-TAIL:]][-TAIL:]

    def _settled(self) -> bool:
        """An earlier run has its cause: of the later ones it only matters whether they work."""
        return len(self.scan.runs) > 1 and any(
            e.role == "root" and e.number > run.ready
            for run in self.scan.runs[:-1]
            for e in run.events
        )

    def _glance(self, block: Lines, at: int, index: int) -> tuple[int, int]:
        """Look for starts, readiness and requests only; the offset and index behind the last."""
        text, first = block.text, (at, index)
        found = {text.rfind(b"\n", 0, hit) + 1 for word in GLANCES for hit in _hits(text, word, at)}
        for begin in sorted(found):
            index += text.count(b"\n", at, begin)
            at, number = begin, block.numbers[index]
            raw = cut(text[begin : text.find(b"\n", begin)])
            if THROUGHPUT in raw:
                self.throughput(number, raw)
            else:
                self.take(number, raw, self.sieve.words(raw))
        self._posts(block, *first, len(text))
        return len(text), index

    def _posts(self, block: Lines, at: int, index: int, end: int) -> None:
        """Note the last request that was answered, of lines from `at` with this index on."""
        hit = end
        while (hit := block.text.rfind(POST, at, hit)) >= 0:
            if OK in block.text[hit : block.text.find(b"\n", hit)]:
                behind = index + block.text.count(b"\n", at, hit)
                self.scan.run.posts = block.numbers[behind]
                return

    def _read(self, block: Lines, at: int, index: int) -> tuple[int, int]:
        """Look at every line; ends at a new run. This loop is the doctor's speed."""
        sieve, runs, text, dull = self.sieve, len(self.scan.runs), block.text, True
        size = len(text)
        while at < size:
            # Chatter comes in long runs, which the expression passes over at once.
            if dull and (run := sieve.chatter.match(text, at)):
                at, index = self._passed(block, run, index)
                dull = False
                continue
            end = text.find(b"\n", at)
            raw = text[at:end] if end - at <= LONGEST else cut(text[at:end])
            at, index, head = end + 1, index + 1, raw[:PREFIX]
            dull = b" INFO" in head or head.startswith(b"INFO")
            if dull:
                words = self._info(block.numbers[index - 1], raw, head)
            elif b'File "' in raw:
                at, index = self._frames(block, raw, at, index)
                continue
            elif events.HEAD in raw:
                self.opens(block.numbers[index - 1], raw)
                continue
            elif (
                (head.startswith(b"    ") or (b"     " in head and CODE.search(head)))
                and b"rror: " not in raw
                and b"atal" not in raw
                and b"WARN" not in raw
            ):
                continue
            else:
                words, dull = sieve.loud(raw, head), sieve.tired
                if words is LATER:
                    sieve.later[sieve.shape] = (block.numbers[index - 1], raw, self.time)
                    continue
            if words is not None:
                sieve.told(self.take(block.numbers[index - 1], raw, words))
                sieve.full = self._full()
                if len(self.scan.runs) != runs:
                    break
        return at, index

    def _passed(self, block: Lines, run: re.Match[bytes], index: int) -> tuple[int, int]:
        """What has to be known of chatter: the last request, the last of messages that matter."""
        text, begin, sieve = block.text, run.start(), self.sieve
        self._posts(block, begin, index, run.end())
        for shape, at in sieve.chatter.last(run).items():
            if sieve.is_useful(shape):
                start = text.rfind(b"\n", 0, at) + 1
                number = block.numbers[index + text.count(b"\n", begin, start)]
                sieve.later[shape] = (number, text[start : text.find(b"\n", at)], self.time)
        return run.end(), index + text.count(b"\n", begin, run.end())

    def _info(self, number: int, raw: bytes, head: bytes) -> frozenset[bytes] | None:
        """The words of a line of level INFO that rules look for; None where it is done with."""
        if THROUGHPUT in raw:
            self.throughput(number, raw)
        elif OK in raw:
            if POST in raw:
                self.scan.run.posts = number
        elif b" NCCL INFO " not in head:
            return self.sieve.quiet(raw, head)
        return None

    def _frames(self, block: Lines, raw: bytes, at: int, index: int) -> tuple[int, int]:
        """Frames of a traceback, with the code between them, from the one before `at` on."""
        text, begin = block.text, raw.find(b'  File "')
        tag = raw[: begin + 2] if begin >= 0 else raw
        found = [raw]
        while text.startswith(tag, at):
            end = text.find(b"\n", at)
            if text.startswith(b'File "', at + len(tag)):
                found.append(cut(text[at:end]))
            at, index = end + 1, index + 1
        key = key_of(raw)
        trace = self.traces.get(key)
        if trace is not None:
            trace.raw.extend(found)
            trace.last = block.numbers[index - 1]
            if not trace.front_end and not key:
                trace.front_end = any(part in one for one in found for part in events.FRONT_END)
        return at, index

    def _full(self) -> tuple[bool, bool]:
        """Whether mere errors, and exceptions, that no rule knows would only be counted."""
        return self.scan.run.has_enough(False), self.scan.run.has_enough(True)


def _hits(text: bytes, word: bytes, at: int) -> Iterator[int]:
    """Where a word stands, from `at` on."""
    while (at := text.find(word, at)) >= 0:
        yield at
        at += len(word)

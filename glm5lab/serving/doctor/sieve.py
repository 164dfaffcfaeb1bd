"""Which lines of a log are worth taking apart: nearly none, and finding that out must be cheap.

A rule names words, and its pattern needs certain text (see `literals`). A line goes on if it has a
word and a text of a rule, or looks like an error. What came often enough and said nothing is
skipped: logging statements, messages of one shape, and texts that no pattern ever followed up on.
"""

import re
from typing import Literal

from glm5lab.serving.doctor.chatter import Chatter
from glm5lab.serving.doctor.rules import FOLD, Book

PREFIX = 160  # bytes in which process, level and place stand
# How the name of an exception without a message ends.
ENDS = (b"Error", b"ption", b"rrupt", b"mExit", b"rror:")
DULL = 64  # lines of one logging statement without a word of interest: the next ones are skipped
TIRED = 40  # messages of one shape, after which one is skipped
LEARNED = 80  # and after which it is chatter
VAIN = 2000  # lines with a text that a pattern needs, and no pattern that matched
MOST = 4096  # of what is remembered of each sort, so that no log makes the memory grow
LONGEST = 6_500  # bytes of a line in which words are looked for
SHAPED = 300  # bytes of a message that make its shape: all but digits, as numbers and ids vary
DIGITS = b"0123456789abcdef"
# Bytes that no text has, but for those of progress bars: a line full of them is none.
NO_TEXT = bytes([*range(9), *range(14, 27), 127, *range(0x90, 256)]).translate(None, b"\x96\xe2")
NOTHING: frozenset[bytes] = frozenset()
LATER: frozenset[bytes] = frozenset({b"later"})  # only the last line of this shape matters
USEFUL = -(1 << 60)
QUICK_EXCEPTION = re.compile(
    rb"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Timeout)\b"
)

Texts = dict[bytes, tuple[bytes, ...]]
# What a line was good for: nothing, an event, a step of a traceback, or a sign that time passes.
Kept = Literal["", "event", "trace", "wait"]


class Sieve:
    """Decides on lines; `told` tells it afterwards whether a line was worth it.

    Attributes:
        chatter: what passes over lines that say nothing.
        later: of shapes of which only the last line matters, that line with its number before it
            and the time behind it.
        shape: of the last line that `loud` was asked about; tired: it had come too often.
        full: mere errors, and exceptions, that no rule knows are of no more use.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self.later: dict[bytes, tuple[int, bytes, str]] = {}
        self.shape, self.full, self.tired = b"", (False, False), False
        self._dull: dict[bytes, int] = {}
        self._repeats: dict[bytes, int] = {}
        self._useful: set[bytes] = set()
        self._texts: Texts = dict(book.probes)
        self._quiet_texts: Texts = dict(book.quiet_probes)
        self._vain: dict[bytes, int] = {}
        self._hit, self._forgotten = b"", 0
        self.chatter = Chatter()

    def words(self, raw: bytes) -> frozenset[bytes]:
        """The words of a line that rules look for."""
        return self.book.keys.intersection(raw[:LONGEST].translate(FOLD).split())

    def quiet(self, raw: bytes, head: bytes) -> frozenset[bytes] | None:
        """The words of a line of level INFO that rules look for; None: drop it."""
        self._hit = self.shape = b""
        at = head.find(b".py:")
        place = head[head.rfind(b"[", 0, at) : at + 9] if at >= 0 else b""
        seen = self._dull.get(place, 0)
        if seen > DULL:
            if seen == DULL + 1:
                self.chatter.place(place)
                self._dull[place] = DULL + 2
            return None
        words = self.book.quiet_keys.intersection(raw[:LONGEST].translate(FOLD).split())
        if words and self._probe(self._quiet_texts, words, raw):
            self._dull[place] = USEFUL
            return words
        if place:
            if len(self._dull) > MOST:
                self._dull.clear()
            self._dull[place] = seen + 1
        return None

    def loud(self, raw: bytes, head: bytes) -> frozenset[bytes] | None:
        """The same for other lines; no words for an error that no rule can match."""
        self._hit, self.tired = b"", False
        if (
            not raw.isascii()
            and len(raw.translate(None, NO_TEXT)) < 0.7 * len(raw)
            and b"rror" not in raw
        ):
            return None
        begin = raw.find(b"] ") + 2
        self.shape = shape = raw[begin : begin + SHAPED].translate(None, DIGITS)
        seen = self._repeats.get(shape, 0)
        self.tired = seen > TIRED
        if self.tired:
            if seen <= LEARNED:
                self._repeats[shape] = seen + 1
                if seen == LEARNED:
                    self.chatter.message(shape, raw)
            return LATER if shape in self._useful else None
        words = self.words(raw)
        if not words or not self._probe(self._texts, words, raw):
            if not self._error(raw, head, begin):
                self._saw(shape, seen)
                return None
            words = NOTHING
        self._saw(shape, seen)
        return words

    def is_useful(self, shape: bytes) -> bool:
        """Whether an event came of a message of this shape."""
        return shape in self._useful

    def _saw(self, shape: bytes, seen: int) -> None:
        if len(self._repeats) > MOST:
            self._repeats.clear()
        self._repeats[shape] = seen + 1

    def _error(self, raw: bytes, head: bytes, begin: int) -> bool:
        """It looks like an error, of which there have not been enough."""
        looks = (
            b"ERROR" in head
            or b"rror: " in raw
            or b"xception: " in raw
            or raw[-5:] in ENDS
            or b"CRITICAL" in head
            or head[:8] == b"Process "
            or b") Process " in head
        )
        if not looks or not any(self.full):
            return looks
        return not self.full[QUICK_EXCEPTION.match(raw, begin) is not None]

    def _probe(self, texts: Texts, words: frozenset[bytes], raw: bytes) -> bool:
        """A rule for these words can match: the line has text that its pattern needs."""
        small = raw[:LONGEST].lower()
        for word in words:
            for text in texts[word]:
                if text in small:
                    self._hit = text
                    return True
        return False

    def told(self, kept: Kept) -> None:
        """What the last line that went on was good for."""
        shape, hit = self.shape, self._hit
        if shape and kept == "wait":
            self._repeats[shape] = USEFUL
        elif shape and kept == "event":
            if len(self._useful) > MOST:
                self._useful.clear()
            self._useful.add(shape)
        if not hit:
            return
        count = self._vain[hit] = USEFUL if kept else self._vain.get(hit, 0) + 1
        if count == VAIN:
            for by_word in (self._texts, self._quiet_texts):
                for word, texts in by_word.items():
                    if hit in texts:
                        by_word[word] = tuple(text for text in texts if text != hit)

    def forget(self) -> None:
        """After a failure or a new start, messages seen before may matter again, for some times."""
        self._forgotten += 1
        if self._forgotten <= TIRED:
            self._repeats.clear()
            self.chatter.forget()

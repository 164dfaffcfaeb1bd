"""Which lines of a log are worth taking apart: nearly none, and finding that out must be cheap.

A rule names words, and its pattern needs certain text (see `literals`). A line goes on if it has a
word and a text of a rule, or looks like an error. What came often enough and said nothing is
skipped: logging statements, equal messages, and texts that no pattern ever followed up on.
"""

from glm5lab.serving.doctor.rules import FOLD, Book

PREFIX = 160  # bytes in which process, level and place stand
# How the name of an exception without a message ends.
ENDS = (b"Error", b"ption", b"rrupt", b"mExit", b"rror:")
DULL = 64  # lines of one logging statement without a word of interest: the next ones are skipped
TIRED = 40  # equal messages, after which one is skipped
VAIN = 2000  # lines with a text that a pattern needs, and no pattern that matched
MOST = 4096  # of what is remembered of each sort, so that no log makes the memory grow
NOTHING: frozenset[bytes] = frozenset()
USEFUL = -(1 << 60)

Texts = dict[bytes, tuple[bytes, ...]]


class Sieve:
    """Decides on lines; `told` tells it afterwards whether a line was worth it."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._dull: dict[bytes, int] = {}
        self._repeats: dict[bytes, int] = {}
        self._texts: Texts = dict(book.probes)
        self._quiet_texts: Texts = dict(book.quiet_probes)
        self._vain: dict[bytes, int] = {}
        self._hit, self._forgotten = b"", 0

    def quiet(self, raw: bytes, head: bytes) -> frozenset[bytes] | None:
        """The words of a line of level INFO that rules look for; None: drop it."""
        place = head[head.find(b"[") : head.find(b".py:") + 9]
        if self._dull.get(place, 0) > DULL:
            return None
        words = self.book.quiet_keys.intersection(raw.translate(FOLD).split())
        if words and self._probe(self._quiet_texts, words, raw):
            self._dull[place] = USEFUL
            return words
        if b".py:" in place:
            if len(self._dull) > MOST:
                self._dull.clear()
            self._dull[place] = self._dull.get(place, 0) + 1
        return None

    def loud(self, raw: bytes, head: bytes) -> frozenset[bytes] | None:
        """The same for other lines; no words for an error that no rule can match."""
        self._hit = b""
        message = raw[raw.find(b"] ") + 2 :]
        if self._repeats.get(message, 0) > TIRED:
            return None
        words = self.book.keys.intersection(raw.translate(FOLD).split())
        if not words or not self._probe(self._texts, words, raw):
            if not (
                b"ERROR" in head
                or b"rror: " in raw
                or b"xception: " in raw
                or raw[-5:] in ENDS
                or b"CRITICAL" in head
                or head[:8] == b"Process "
                or b") Process " in head
            ):
                return None
            words = NOTHING
        if len(self._repeats) > MOST:
            self._repeats.clear()
        self._repeats[message] = self._repeats.get(message, 0) + 1
        return words

    def _probe(self, texts: Texts, words: frozenset[bytes], raw: bytes) -> bool:
        """A rule for these words can match: the line has text that its pattern needs."""
        small = raw.lower()
        for word in words:
            for text in texts[word]:
                if text in small:
                    self._hit = text
                    return True
        return False

    def told(self, useful: bool) -> None:
        """Whether the last line that went on was kept."""
        hit = self._hit
        if not hit:
            return
        count = self._vain[hit] = USEFUL if useful else self._vain.get(hit, 0) + 1
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

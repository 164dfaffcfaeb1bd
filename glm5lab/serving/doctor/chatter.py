"""Lines that say nothing, passed over in long runs by one regular expression.

What they are is learned from the log: statements of the logger that never had a word of interest,
and messages that came again and again with other numbers, whole tracebacks before them included.
"""

import re

MOST_PLACES = MOST_MESSAGES = 32
MOST_CHANGES = 200  # a log that teaches more than this is read line by line
LONGEST = 300  # bytes of a message that is learned
NUMBER = re.compile(rb"([0-9a-f]*[0-9][0-9a-f]*)")  # numbers and ids, which vary
TAG = rb"(?:\([\w.-]++\ pid=\d++\)\ )?+"
LOGGED = rb"(?:(?:ERROR|WARNING|DEBUG|CRITICAL)\ ..-..\ ..:..:..\ \[[^\]\n]*+\]\ )?+"
HEAD = re.compile(TAG + LOGGED, re.VERBOSE)
# Requests that were answered and dull statements, as vLLM writes them; messages that are known,
# behind the traceback that ends with them, all of whose lines begin alike; NCCL's own notices, and
# again statements and requests behind what journald, docker and the like add. The whole is not
# possessive: Python 3.11 loses groups then (SystemError).
PATTERN = rb"""(?:
  %(tag)s INFO (?: :\ {5}[^\n]*"\ 200\b | \ ..-..\ ..:..:..\ (?:%(places)s) ) [^\n]*+\n
| (?P<head>%(tag)s%(logged)s)
  (?:Traceback\ \(most\ recent\ call\ last\):\n (?:(?P=head)\ \ [^\n]*+\n)++ (?P=head))?+
  (?:%(messages)s)\n
| [^\[\n]*+ (?:\[\d++\]:\ [^\[\n]*+)?
  (?: \[\d++\]\ NCCL\ INFO\  | (?<=INFO\ ..-..\ ..:..:..\ )(?:%(places)s) ) [^\n]*+\n
| [^\n]*HTTP/1\.1"\ 200\b [^\n]*+\n
)+"""


class Chatter:
    """The expression, and what it was made of.

    Attributes:
        match: of the expression: at an offset of a text, as many lines as say nothing.
    """

    def __init__(self) -> None:
        self._places: list[bytes] = []
        self._messages: dict[bytes, bytes] = {}
        self._changes = 0
        self._compile()

    def _compile(self) -> None:
        never = rb"(?!)"
        fields = {
            b"tag": TAG,
            b"logged": LOGGED,
            b"places": b"|".join(map(re.escape, self._places)) or never,
            b"messages": b"|".join(b"(%s)" % one for one in self._messages.values()) or never,
        }
        self.match = re.compile(PATTERN % fields, re.VERBOSE).match
        self._changes += 1

    def place(self, place: bytes) -> None:
        """Learn a statement of the logger that says nothing, as `[a.py:3] Abc`."""
        if len(self._places) < MOST_PLACES and self._changes < MOST_CHANGES:
            self._places.append(place)
            self._compile()

    def message(self, shape: bytes, raw: bytes) -> None:
        """Learn that a message says nothing any more; its numbers may change.

        Args:
            shape: what `last` calls it by.
            raw: a line with it.
        """
        head = HEAD.match(raw)
        text = raw[head.end() :] if head is not None else raw
        full = len(self._messages) >= MOST_MESSAGES or self._changes >= MOST_CHANGES
        if full or not 0 < len(text) <= LONGEST or text.startswith((b" ", b"Traceback ")):
            return
        pieces = NUMBER.split(text)
        pieces[::2] = map(re.escape, pieces[::2])
        pieces[1::2] = [b"[0-9a-f]*+"] * (len(pieces) // 2)
        self._messages[shape] = b"".join(pieces)
        self._compile()

    def last(self, run: re.Match[bytes]) -> dict[bytes, int]:
        """Of the messages that are in a run: where the last one of each stands."""
        spans = zip(self._messages, run.regs[2:], strict=True)
        return {shape: begin for shape, (begin, _) in spans if begin >= 0}

    def forget(self) -> None:
        """Learn messages anew."""
        if self._messages:
            self._messages.clear()
            self._compile()

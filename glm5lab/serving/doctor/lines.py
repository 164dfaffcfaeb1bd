"""One line of a log taken apart: which process wrote it, how grave it is, what it says."""

import re
from dataclasses import dataclass

# Colours whose escape character was lost on the way.
COLOUR = re.compile(r"\[\d{1,2}(?:;\d{1,3})*m")
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?"
# What journald, syslog, docker, compose, Kubernetes or a quoting mail program put before a line.
OUTER = re.compile(
    rf"""(?:
    [A-Z][a-z]{{2}}\s+\d{{1,2}}\s\d\d:\d\d:\d\d(?:\.\d+)?\s+[\w.-]+\s+[\w@./-]+(?:\[\d+\])?:\s
    |{_STAMP}\s+[\w.-]+\s+(?:[\w@./-]+\[\d+\]|kernel|systemd):\s
    |{_STAMP}\s(?:std(?:out|err)\s[FP]\s)?
    |\[{_STAMP}\]\s
    |[\w./-]+\s{{1,8}}\|\s
    |>\s?
    |\s+(?=\(\w)
    )""",
    re.VERBOSE,
)
TAG = re.compile(
    r"\((?:(?P<name>[A-Za-z][\w.:-]*)(?P<rank> (?:rank=\d+|[A-Z]+\d\w*))? )?"
    r"pid=(?P<pid>\d+)(?P<ip>, ip=[^)]*)?\) ?"
)
RANK = re.compile(r"\[(?:rank|default)(?P<rank>\d+)\]: ?")
HEADER = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? "
    r"(?:\[(?P<source>[^\]:]*):\d+\]|(?P<old>[\w./-]+):\d+\]) ?"
)
UVICORN = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL): {2,5}")
# Python's and Ray's own forms: `2026-11-29 08:08:26,870 - WARNING - jit.py:3 - `, `INFO a.py:3 -- `
LOGGING = re.compile(
    rf"(?:{_STAMP}\s)?(?:- (?:[\w.]+ - )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) - "
    r"|(?P<ray>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w./-]+:\d+ -- )"
)
# glog, as torch's C++ parts write it: [E1129 08:08:26.870112906 ProcessGroupNCCL.cpp:683]
GLOG = re.compile(
    r"\[(?P<level>[IWEF])(?P<month>\d\d?)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.\d+ [^\]]*\] ?"
)
# NCCL's own lines: gpu-node:4123:4187 [3] NCCL WARN ...
NCCL = re.compile(r"[\w.-]+:(?P<pid>\d+):\d+ \[\d+\] (?=.*NCCL )")
GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")


@dataclass(slots=True)
class Line:
    """A line, or a piece of one.

    Attributes:
        number: counted from 1.
        name: the process as the log names it (`Worker_TP3`, `EngineCore`), "" without a tag.
        pid: its process id, where the tag has it.
        level: INFO and so on, "" for output that went past the logger.
        time: `MM-DD HH:MM:SS`, or "".
        source: file that logged it, or "".
        text: the message.
        whole: the line as it stands, without escape sequences.
    """

    number: int
    name: str
    pid: int | None
    level: str
    time: str
    source: str
    text: str
    whole: str


def clean(raw: bytes) -> str:
    """Text without zero bytes, line ends and what is left of colours."""
    text = raw.decode("utf-8", "replace")
    if "m" in text and "[" in text:
        text = COLOUR.sub("", text)
    return text.replace("\x00", "").rstrip()


def parse(number: int, raw: bytes) -> Line:
    """Take a line apart; what is unfamiliar stays in the text."""
    whole = clean(raw)
    at, limit = 0, 4
    while limit and (outer := OUTER.match(whole, at)):
        at, limit = outer.end(), limit - 1
    name, pid, rank = "", None, ""
    while tag := TAG.match(whole, at):
        at = tag.end()
        pid = int(tag["pid"])
        if tag["name"]:
            name = (
                tag["name"] + (tag["rank"] or "") + (f" pid={pid}{tag['ip']}" if tag["ip"] else "")
            )
    if marked := RANK.match(whole, at):
        at, rank = marked.end(), f"rank{marked['rank']}"
    level = time = source = ""
    if header := HEADER.match(whole, at):
        at, level, time = header.end(), header["level"], header["time"]
        source = header["source"] or header["old"] or ""
    elif header := GLOG.match(whole, at):
        at, level = header.end(), GLOG_LEVELS[header["level"]]
        time = f"{int(header['month']):02}-{header['day']} {header['clock']}"
    elif header := NCCL.match(whole, at):
        at, pid = header.end(), pid or int(header["pid"])
    elif header := UVICORN.match(whole, at):
        at, level = header.end(), header["level"]
    elif header := LOGGING.match(whole, at):
        at, level = header.end(), header["level"] or header["ray"]
    # Records of Ray's workers carry the tag of the driver and then their own after the header.
    if tag := TAG.match(whole, at):
        at, pid = tag.end(), int(tag["pid"])
        name = tag["name"] or name
    text = whole[at:]
    if text.endswith("]") or "across cluster]" in text:
        text = REPEATED.sub("", text)
    return Line(number, name or rank, pid, level, time, source.rsplit("/", 1)[-1], text, whole)


def title(name: str, pid: int | None) -> str | None:
    """The process as a reader finds it in the log: a plain `Worker` only by its id."""
    if name in ("Worker", "VllmWorkerProcess", "RayWorkerWrapper", "RayWorkerProc") and pid:
        return f"{name} pid={pid}"
    if not name and pid:
        return f"pid={pid}"
    return name or None

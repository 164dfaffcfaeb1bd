"""One case: damaged files, and everything in this package that reads headers run over them."""

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from glm5lab.errors import Glm5labError
from glm5lab.fuzz.draft import Draft, copy, write_bytes
from glm5lab.fuzz.mutations import BYTES, STRUCTURE

if TYPE_CHECKING:
    from glm5lab.gguf.reader import GgufModel

# Tables and plans take longer than reading: every n-th file that opens is shown, too.
SHOW_EVERY = 8
SLOW_S, STALLED_S = 1.0, 5.0


# Above SLOW_S of processor time a case fails; above STALLED_S by the clock, too.
@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        index: its number.
        kind: the (first) mutation.
        stage: how far it came: open, table, show, config, template, tokenizer, names, or done.
        error: "" when nothing was raised, "InputError" and the like.
        expected: whether the error is one of ours.
        detail: the message, one line.
        seconds: all stages together, wall clock.
        cpu_s: the processor time of the same, which other processes do not change.
        handles: file descriptors left open.
        mb: this process's peak memory so far.
    """

    index: int
    kind: str
    stage: str
    error: str
    expected: bool
    detail: str
    seconds: float
    cpu_s: float
    handles: int
    mb: float

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


def write_case(bases: list[list[Draft]], seed: int, index: int, folder: Path) -> str:
    """Write the files of case `index` into an empty folder; returns the kind of its mutation."""
    rng = Random(f"{seed}:{index}")
    drafts = copy(rng.choice(bases))
    kind = ""
    on_bytes = None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < len(BYTES) / (len(BYTES) + len(STRUCTURE)):
            on_bytes = rng.choice(BYTES)
            kind = kind or on_bytes.__name__
        else:
            change = rng.choice(STRUCTURE)
            change(drafts, rng)
            kind = kind or change.__name__
    victim = rng.randrange(len(drafts))
    for number, draft in enumerate(drafts):
        head = draft.encode()
        if on_bytes is not None and number == victim:
            on_bytes(head, draft.lengths, rng)
        write_bytes(folder / draft.name, head, draft.data, draft.size)
    return kind


def run_case(bases: list[list[Draft]], seed: int, index: int, folder: Path) -> Outcome:
    """Write a case into `folder` and read it in every way.

    A case that is at fault for its time alone runs again and the faster run counts: what is slow
    is slow twice, while a busy machine stalls now and then. No other fault of either run is lost.
    """
    first = _run_once(bases, seed, index, folder)
    if first.seconds <= SLOW_S or _at_fault(first):
        return first
    second = _run_once(bases, seed, index, folder)
    return second if _at_fault(second) else min(first, second, key=lambda o: o.seconds)


def _at_fault(o: Outcome) -> bool:
    """Whether a run failed for another reason than its time."""
    return not o.expected or o.handles > 0


def _run_once(bases: list[list[Draft]], seed: int, index: int, folder: Path) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind = write_case(bases, seed, index, folder)
    before = _handles()
    stages = _Stages(folder, index)
    error: BaseException | None = None
    start, cpu = time.perf_counter(), time.process_time()
    try:
        stages.run()
    except Exception as caught:  # what this is all about
        error = caught
    seconds, left = time.perf_counter() - start, _handles() - before
    return Outcome(
        index,
        kind,
        stages.stage,
        type(error).__name__ if error else "",
        error is None or isinstance(error, Glm5labError),
        f"{error}".replace("\n", " ").replace(str(folder), "")[:200] if error else "",
        round(seconds, 4),
        round(time.process_time() - cpu, 4),
        left,
        peak_mb(),
    )


class _Stages:
    """The readers of a header, one after another; notes where it is."""

    def __init__(self, folder: Path, index: int) -> None:
        self.folder, self.index, self.stage = folder, index, "open"

    def run(self) -> None:
        """All of them; raises what the first that fails raises."""
        from glm5lab.gguf.chat import read_template
        from glm5lab.gguf.config import generation_config, hf_config
        from glm5lab.gguf.reader import open_gguf
        from glm5lab.gguf.tokenizer import write_tokenizer
        from glm5lab.loading.reconcile import reconcile

        # Every other case as `inspect` opens files, the rest as `prepare` does.
        model = open_gguf(self.folder, allow_truncated=self.index % 2 == 0)
        self.stage = "table"
        model.table()
        if self.index % SHOW_EVERY == 0:
            self.stage = "show"
            self._show(model)
        self.stage = "config"
        config = hf_config(model)
        generation_config(model)
        self.stage = "template"
        with suppress(Glm5labError):
            read_template(model)
        self.stage = "tokenizer"
        (self.folder / "hf").mkdir()
        write_tokenizer(model, self.folder / "hf")
        self.stage = "names"
        reconcile(model, config)
        self.stage = "done"

    def _show(self, model: "GgufModel") -> None:
        """What the commands print; `inspect` shows every file that opens."""
        from glm5lab.views.inspection import inspect_json
        from glm5lab.views.names import map_json, map_text
        from glm5lab.views.plan import plan_json, plan_text
        from glm5lab.views.tables import inspect_text

        inspect_text(model)
        json.dumps(inspect_json(model), allow_nan=False)
        for show in (
            lambda: map_text(model, gpu=True),
            lambda: json.dumps(map_json(model, gpu=True), allow_nan=False),
            lambda: plan_text(model, 1, 24.0),
            lambda: json.dumps(plan_json(model, 1, 24.0), allow_nan=False),
        ):
            with suppress(Glm5labError):
                show()


def peak_mb() -> float:
    """This process's own peak of resident memory; ru_maxrss would include its parent's."""
    with open("/proc/self/status", encoding="ascii") as lines:
        kib = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kib) * 1024 / 1e6


def _handles() -> int:
    return len(os.listdir("/proc/self/fd"))

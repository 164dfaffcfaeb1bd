"""`glm5lab demo`: one GLM-5 file through every layer, ending with a served answer.

Each layer prints one line with its figure. The first layer that fails ends the demo with its name,
the cause and the fix. Progress goes to stderr, the engine's own output to log files.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5lab.env import available_memory
from glm5lab.errors import CheckError, Glm5labError
from glm5lab.serving.process import LoggedProcess
from glm5lab.vllm_plugin import BACKEND

if TYPE_CHECKING:
    from glm5lab.gguf.reader import GgufModel

# One prompt below the sample's top-k of 16 and one above it.
CHECK_PROMPTS = (8, 40)
QUESTION = [{"role": "user", "content": "Which layers does a served GLM-5 have?"}]
PROMPT = "GLM-5 is"
ANSWER_TOKENS = 24
# What the check holds at once, in units of the model in float32: the engine, and a referee.
CHECK_COPIES = 2.5
# The engine names its backend at this level, whatever the user's own level is.
LOGGING = {"VLLM_LOGGING_LEVEL": "INFO"}


class DemoError(Glm5labError):
    """A layer failed; the message names it, the exit code is that of the cause."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass
class Work:
    """Where a demo works, and what it has found so far.

    Attributes:
        folder: gets the sample and the logs.
        platform: "cpu" or "cuda".
        sample: whether the file is the random-weights sample.
        file: the file that all layers use.
    """

    folder: Path
    platform: str
    sample: bool
    file: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def backend(self) -> list[str]:
        """The backend to ask the engine for: ours on a GPU, where vLLM may have others."""
        return [BACKEND] if self.platform == "cuda" else []

    def child(self, name: str, *arguments: str, **settings: str) -> LoggedProcess:
        """A part of `demo_children` as a process whose output goes to NAME.log."""
        result = self.folder / f"{name}.json"
        line = [sys.executable, "-P", "-m", "glm5lab.demo_children", name, str(result), *arguments]
        return LoggedProcess(line, self.folder / f"{name}.log", settings)


def run_demo(file: str | Path | None = None) -> None:
    """Run all layers on a file; without one, on a tiny sample written for the occasion.

    Raises:
        DemoError: the first layer that failed.
        InputError: the file is a URL.
    """
    from glm5lab.gguf.url import local_path
    from glm5lab.serving.command import platform
    from glm5lab.serving.server import interruptible

    file = None if file is None else local_path(file, "the demo")

    kind = platform()
    folder = Path(tempfile.mkdtemp(prefix="glm5lab-demo-"))
    work = Work(folder, kind, file is None, file or folder / "sample")
    with ExitStack() as stack:
        stack.enter_context(kept_if_named(folder))
        stack.enter_context(interruptible())
        if work.sample:
            stack.enter_context(sample_cache(folder))
        kernel = stack.enter_context(kernel_process(work))
        model = file_layer(work)
        names_layer(model)
        kernel_layer(kernel)
        backend_layer(work, model)
        server_layer(work)
    print(f"  done in {time.monotonic() - work.began:.0f} s; the engine's output: {folder}")


@contextmanager
def kept_if_named(folder: Path) -> Iterator[None]:
    """Remove the folder after a failure whose message does not send the user to it."""
    try:
        yield
    except BaseException as error:
        if str(folder) not in str(error):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def sample_cache(folder: Path) -> Iterator[None]:
    """Keep what is derived from a passing sample out of the user's cache, and remove both."""
    before = os.environ.get("GLM5LAB_CACHE")
    os.environ["GLM5LAB_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.environ.pop("GLM5LAB_CACHE")
        if before is not None:
            os.environ["GLM5LAB_CACHE"] = before
        for name in ("sample", "cache"):
            shutil.rmtree(folder / name, ignore_errors=True)


@contextmanager
def layer(number: int, name: str, doing: str) -> Iterator[None]:
    """Announce a layer on stderr, and name it in whatever error it ends with."""
    print(f"  [{number}/5] {name}: {doing}", file=sys.stderr, flush=True)
    try:
        yield
    except Glm5labError as error:
        raise DemoError(f"layer {number}, {name}: {error}", error.exit_code) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "GLM5LAB_DEBUG=1 shows the traceback"
        raise DemoError(f"layer {number}, {name}: {text}; {fix}", 1) from error


def show(number: int, name: str, text: str) -> None:
    """Print a layer's line."""
    print(f"{number} {name:<8}  {text}", flush=True)


def file_layer(work: Work) -> "GgufModel":
    """Layer 1: every tensor of the file."""
    from glm5lab.gguf.reader import open_gguf, require_glm5
    from glm5lab.gguf.sample import write_sample

    doing = "writing and reading a sample" if work.sample else f"reading {work.file}"
    with layer(1, "file", doing):
        if work.sample:
            work.file = write_sample(work.file)
        model = open_gguf(work.file)
        require_glm5(model)
        types = Counter(tensor.type for tensor in model.tensors.values())
        blocks = len({t.layer for t in model.tensors.values() if t.layer is not None})
        shards = f" in {len(model.shards)} shards" if len(model.shards) > 1 else ""
        size = f"{len(model.tensors)} tensors, {blocks} layers, {model.nbytes / 1e6:,.1f} MB"
        names = ", ".join(name for name, _ in types.most_common())
        note = " (a sample: random weights)" if work.sample else ""
        show(1, "file", f"{size}{shards}, types {names}{note}")
        return model


def names_layer(model: "GgufModel") -> None:
    """Layer 2: every tensor reaches one vLLM parameter; config and tokenizer from metadata."""
    from glm5lab.gguf.config import hf_config
    from glm5lab.loading.prepare import prepare
    from glm5lab.loading.reconcile import require_complete

    with layer(2, "names", "mapping tensors, writing config and tokenizer"):
        found = require_complete(model, hf_config(model))
        prepare(model.files[0])
        parameters = len({mapping.vllm for mapping in found.loaded})
        counts = f"{len(found.loaded)} tensors fill {parameters} vLLM parameters"
        rest = f"{len(found.dropped)} dropped, 0 unmatched"
        show(2, "names", f"{counts}, {rest}; config and tokenizer from metadata alone")


def kernel_process(work: Work) -> LoggedProcess:
    """The comparison of layer 3, which needs no file; on a CPU, Triton's interpreter runs it."""
    interpreted = {"TRITON_INTERPRET": "1"} if work.platform == "cpu" else {}
    return work.child("kernel", **interpreted)


def kernel_layer(child: LoggedProcess) -> None:
    """Layer 3: the Triton kernel equals the reference."""
    with layer(3, "kernel", "comparing the Triton kernel with the reference"):
        found = result_of(child)
        size = f"{found['tokens']} tokens, {found['heads']} heads, top-k {found['top_k']}"
        figure = f"max |d| {found['largest']:.1e} over {size}"
        show(3, "kernel", f"Triton ({found['where']}) equals the reference: {figure}")


def backend_layer(work: Work, model: "GgufModel") -> None:
    """Layer 4: the engine takes our backend, and its log-probabilities equal the referees'."""
    from glm5lab.check.run import installed_referees
    from glm5lab.serving.command import selected_backend

    referees = installed_referees()
    if reason := too_large(model) or ("" if referees else "none is installed"):
        show(4, "backend", f"no comparison with a referee: {reason}")
        return
    with layer(4, "backend", f"starting the engine and {' and '.join(referees)} (about 30 s)"):
        prompts = ",".join(map(str, CHECK_PROMPTS))
        arguments = (str(work.file), ",".join(referees), prompts, *work.backend)
        with work.child("check", *arguments, **LOGGING) as child:
            found = result_of(child)
        show(4, "backend", f"against {' and '.join(referees)}: {found['summary']}")
        if found["backend"] != BACKEND:
            raise CheckError(f"the engine took {found['backend']}, not {BACKEND}: {child.log}")
        print(f"{'':10}  {selected_backend(child.lines) or BACKEND}", flush=True)
        if not found["ok"]:
            raise CheckError(f"{found['summary']}; {child.log} lists the rows")


def too_large(model: "GgufModel") -> str | None:
    """Why the referees cannot hold the model in float32, or None when they can."""
    from math import prod

    needed = CHECK_COPIES * 4 * sum(prod(tensor.shape) for tensor in model.tensors.values())
    there = available_memory()
    if there is None or needed < there:
        return None
    return f"float32 needs {needed / 2**30:,.0f} GiB of memory, {there / 2**30:,.0f} are free"


def server_layer(work: Work) -> None:
    """Layer 5: an OpenAI endpoint answers."""
    from glm5lab.serving.client import Client
    from glm5lab.serving.leash import members
    from glm5lab.serving.server import Server

    with layer(5, "server", "starting (about 25 s)"):
        options = [word for name in work.backend for word in ("--attention-backend", name)]
        server = Server.of_file(work.file, options=options, log=work.folder / "server.log")
        server.settings |= LOGGING
        with server:
            limit = None if work.platform == "cuda" else 600.0
            seconds = server.wait_ready(limit, say=lambda line: print(f"  {line}", file=sys.stderr))
            if server.backend is None:
                raise CheckError(f"it does not name our backend in its output: {server.log}")
            show(5, "server", f"ready in {seconds:.0f} s at {server.url}")
            print(f"{'':10}  {server.backend}", flush=True)
            client = Client(server.url)
            chat = client.chat(QUESTION, max_tokens=ANSWER_TOKENS, temperature=0)
            text = client.completion(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0)
        left = members(server.group)
        if left:
            raise CheckError(f"stopping it left processes behind: {left}")
        note = " (random weights: it says nothing sensible)" if work.sample else ""
        print(f"{'':10}  chat answered {quoted(chat)}{note}")
        print(f"{'':10}  {PROMPT!r} went on {quoted(text)}")
        print(f"{'':10}  stopped, no process left", flush=True)


def quoted(text: str) -> str:
    """A text in quotes on one line, control characters escaped."""
    return json.dumps(text, ensure_ascii=False)


def result_of(child: LoggedProcess) -> dict[str, Any]:
    """Wait for a child of `demo_children` and read what it found.

    Raises:
        DemoError: it failed; the message is the error it names.
    """
    code = child.wait()
    result = child.log.with_suffix(".json")
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if code == 0 and found:
        return found
    text = found.get("error") or f"{child.first_error()}; its whole output: {child.log}"
    raise DemoError(text, found.get("exit_code", 1))

"""The file's chat template: untrusted code in Jinja, checked before anything else renders it.

transformers and vLLM render it in Jinja's immutable sandbox, and so does this module. On top of
that `prepare` refuses a template that reaches for Python objects or for files, or that does not
end: first by reading it, then by rendering trial conversations in a child process with limits on
time, memory and output (`chat_child.py`).
"""

import builtins
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5lab.errors import InputError, brief
from glm5lab.gguf.chat_child import CPU_SECONDS, environment
from glm5lab.gguf.reader import GgufModel
from glm5lab.gguf.tokenizer import special_ids

if TYPE_CHECKING:
    from jinja2 import nodes

KEY = "tokenizer.chat_template"
MAX_CHARACTERS = 1 << 16  # GLM-5's has about 10,000; reading this many takes up to a second
SECONDS = 20  # wall clock for all trial conversations; the child's own limit is on processor time
INTERNALS = re.compile(r"__\w+__")
# Filters whose first argument is the name of an attribute.
BY_NAME = frozenset({"attr", "selectattr", "rejectattr", "groupby", "sum"})
PYTHONS = frozenset(dir(builtins))
FIX = "do not use this file's template: get the file from a publisher you trust"

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "type": "function",
    "id": "1",
    "function": {"name": "weather", "arguments": {"city": "Bonn"}},
}
# Conversations that take a template through its branches.
TRIALS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": True},
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "hi", "reasoning_content": "a greeting"},
            {"role": "user", "content": "and?"},
        ],
        "add_generation_prompt": True,
        "enable_thinking": False,
    },
    {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": [TOOL],
        "add_generation_prompt": False,
        "reasoning_effort": "high",
    },
)


def template_of(model: GgufModel) -> str | None:
    """The file's chat template, or None."""
    value = model.metadata.get(KEY)
    return value if isinstance(value, str) else None


def template_problem(template: str) -> str | None:
    """Why a template is refused, found by reading it (nothing is rendered); None if nothing is.

    Args:
        template: Jinja source.

    Returns:
        One clause, with the line: "line 3: reaches for the Python attribute '__class__'".
    """
    from jinja2 import TemplateSyntaxError, nodes

    if len(template) > MAX_CHARACTERS:
        return f"has {len(template)} characters, more than {MAX_CHARACTERS}"
    try:
        tree = environment().parse(template)
        own = {n.name for n in tree.find_all(nodes.Name) if n.ctx in ("store", "param")}
        own |= {macro.name for macro in tree.find_all(nodes.Macro)}
        for node in _walk(tree):
            if reason := _reaches(node, own):
                return f"line {node.lineno}: {reason}"
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: is no valid Jinja: {_short(error.message)}"
    except RecursionError:
        return "is nested too deeply"
    except ValueError as error:  # Python's own limit on the digits of a number
        return f"is no valid Jinja: {_short(error)}"
    return None


def _short(message: object) -> str:
    text = str(message)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def read_template(model: GgufModel) -> tuple[str, dict[str, str]] | None:
    """The template, checked by reading it, and the special tokens that it is rendered with.

    Returns:
        None where the file has no template.

    Raises:
        InputError: it reaches for Python objects or files; or a special token's number is wrong.
    """
    template = template_of(model)
    if template is None:
        return None
    if problem := template_problem(template):
        raise refusal(model, problem)
    return template, _special_tokens(model)


def require_safe_template(model: GgufModel) -> None:
    """Read the template and render the trial conversations with limits.

    Raises:
        InputError: it reaches for Python objects or files, or takes too long or too much; named.
    """
    found = read_template(model)
    if found is None:
        return
    template, special = found
    results = _in_child(model, template, [{**special, **trial} for trial in TRIALS])
    if problem := next((r["refused"] for r in results if "refused" in r), None):
        raise refusal(model, problem)


def refusal(model: GgufModel, problem: str) -> InputError:
    """The error for a template with this problem."""
    return InputError(model.path, f"{KEY}: {problem}", FIX)


def render(model: GgufModel, messages: list[dict[str, Any]], **arguments: Any) -> str:
    """One conversation as the file's template writes it, rendered in the child process.

    Args:
        model: its metadata hold the template.
        messages: as OpenAI's API has them.
        arguments: add_generation_prompt, tools, enable_thinking and others of the template's own.

    Raises:
        InputError: no template, one that is refused, or one that rejects these messages.
    """
    found = read_template(model)
    if found is None:
        raise InputError(model.path, f"has no {KEY}", "get a file that has one")
    template, special = found
    result = _in_child(model, template, [{**special, "messages": messages, **arguments}])[0]
    if "refused" in result:
        raise refusal(model, result["refused"])
    if "error" in result:
        raise InputError(model.path, f"{KEY}: {result['error']}", "change the messages")
    return str(result["text"])


def _special_tokens(model: GgufModel) -> dict[str, str]:
    """The texts that transformers passes to every template."""
    ids, value = special_ids(model), model.metadata.get("tokenizer.ggml.tokens")
    tokens = value if isinstance(value, list) else []
    numbers = {"bos_token": ids.bos, "eos_token": next(iter(ids.eos), None), "pad_token": ids.pad}
    texts = {k: tokens[n] for k, n in numbers.items() if n is not None and n < len(tokens)}
    return {k: text for k, text in texts.items() if isinstance(text, str)}


def _walk(node: "nodes.Node") -> Iterator["nodes.Node"]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)


def _reaches(node: "nodes.Node", own: set[str]) -> str | None:
    """What a node reaches for outside of the conversation, or None.

    Args:
        node: one node of the template's syntax tree.
        own: names that the template itself defines.
    """
    from jinja2 import nodes

    if isinstance(node, nodes.Include | nodes.Import | nodes.FromImport | nodes.Extends):
        name = node.template.value if isinstance(node.template, nodes.Const) else "..."
        return f"reaches for the file {brief(name)}"
    if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
        return f"reaches for the Python attribute {brief(node.attr)}"
    if isinstance(node, nodes.Name) and INTERNALS.fullmatch(node.name):
        return f"reaches for the Python object {brief(node.name)}"
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        found = INTERNALS.search(node.value)
        return f"reaches for the Python attribute {brief(found[0])}" if found else None
    if isinstance(node, nodes.Filter):
        named = [k.value for k in node.kwargs or [] if k.key == "attribute"]
        named += node.args[:1] if node.name in BY_NAME else []
        texts = [n.value for n in named if isinstance(n, nodes.Const)]
        hidden = next((p for t in texts for p in str(t).split(".") if p.startswith("_")), None)
        return f"reaches for the Python attribute {brief(hidden)}" if hidden else None
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
        name = node.node.name
        if name in PYTHONS and name not in own and name not in environment().globals:
            return f"calls Python's {name}()"
    return None


def _in_child(model: GgufModel, template: str, calls: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Render in a child process; one result a call: text, error (the template's own) or refused.

    Raises:
        InputError: the system killed the process.
    """
    script = Path(__file__).with_name("chat_child.py")
    # -P: this folder's modules must not stand in for the standard library's.
    command = [sys.executable, "-P", str(script)]
    try:
        run = subprocess.run(
            command,
            input=json.dumps({"template": template, "calls": calls}),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [{"refused": f"does not end: still running after {SECONDS} seconds"}]
    if run.returncode == -signal.SIGXCPU:
        return [{"refused": f"does not end: stopped after {CPU_SECONDS} s of processor time"}]
    if run.returncode == -signal.SIGKILL:
        raise InputError(
            model.path,
            f"{KEY}: the process that renders it was killed from outside, as systems do that run "
            "out of memory",
            "free some memory and try again",
        )
    try:
        results: list[dict[str, str]] = json.loads(run.stdout)
    except ValueError:
        last = run.stderr.strip().splitlines()[-1:] or ["no output"]
        return [{"refused": f"cannot be rendered: {last[0]}"}]
    return results

"""Render a chat template as transformers does, within limits; runs as a process of its own.

Standard input: {"template": str, "calls": [arguments of the template]} as JSON. Standard output: a
JSON list, for each call {"text"}, {"error"} (the template rejects the conversation) or {"refused"}.
Imports nothing of glm5lab: it is started by its path.
"""

import json
import sys
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 3
MEMORY_BYTES = 1 << 29
MAX_OUTPUT = 1 << 22  # characters


@cache
def environment() -> "ImmutableSandboxedEnvironment":
    """Jinja as transformers sets it up for chat templates (utils/chat_template_utils.py).

    The one difference: what the sandbox would turn into an undefined value is an error at once.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; it renders as its content."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"reaches for the Python attribute {attribute!r}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def render_one(template: str, arguments: dict[str, Any]) -> dict[str, str]:
    """One conversation; what the template does wrong comes back as text."""
    from jinja2.exceptions import SecurityError, TemplateError

    values = {"tools": None, "documents": None, "add_generation_prompt": False, **arguments}
    try:
        parts, size = [], 0
        for part in environment().from_string(template).generate(**values):
            parts.append(part)
            size += len(part)
            if size > MAX_OUTPUT:
                return {"refused": f"writes more than {MAX_OUTPUT} characters"}
        return {"text": "".join(parts)}
    except SecurityError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except OverflowError as error:
        return {"refused": f"counts too far: {error}"}
    except TemplateError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # a template can fail in any way that Python has
        return {"error": f"{type(error).__name__}: {error}"}


def limit_resources() -> None:
    """Processor time, memory and files of this process; nothing where the system has no limits."""
    try:
        import resource
    except ImportError:
        return
    # Only where the soft limit on time comes first does SIGXCPU say what ended the process.
    for what, soft, hard in (
        (resource.RLIMIT_CPU, CPU_SECONDS, CPU_SECONDS + 1),
        (resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        try:
            resource.setrlimit(what, (soft, hard))
        except (ValueError, OSError):
            continue


def main() -> None:
    """Read the request, render each call, write the results."""
    request = json.loads(sys.stdin.buffer.read())
    environment()
    limit_resources()
    results = []
    for call in request["calls"]:
        results.append(render_one(request["template"], call))
        if "refused" in results[-1]:
            break
    sys.stdout.buffer.write(json.dumps(results).encode())


if __name__ == "__main__":
    main()

"""Chat templates: rendered as transformers renders them, and refused where they reach out."""

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from glm5lab.errors import InputError
from glm5lab.gguf import chat
from glm5lab.gguf.chat import (
    KEY,
    TRIALS,
    read_template,
    render,
    require_safe_template,
    template_problem,
)
from glm5lab.gguf.config import config_notes
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.gguf.sample_tokenizer import CHAT_TEMPLATE
from glm5lab.gguf.tokenizer import write_tokenizer
from glm5lab.loading.prepare import prepare

# What published templates use: macros, namespaces, loop controls, filters and tests, slices,
# string methods, exceptions, generation marks, special tokens, dates.
RICH = """
{%- macro text(content) -%}
    {%- if content is string %}{{ content }}{% else -%}
    {%- for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- bos_token }}<sop>
{%- set ns = namespace(last=-1, n=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{{ tool.function | tojson(ensure_ascii=False, indent=2) }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('role ' ~ m.role ~ ' is unknown') }}
    {%- endif %}
    {%- if m.role == 'system' and not m.content %}{% continue %}{% endif %}
<|{{ m.role }}|>{{ '\\n' }}
    {%- if m.role == 'assistant' %}{% generation %}
        {%- if loop.index0 > ns.last and m.reasoning_content is defined %}
<think>{{ m.reasoning_content.strip() }}</think>
        {%- endif %}
        {{- text(m.content).split('</think>')[-1].lstrip() }}
        {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
            {%- for k, v in call.function.arguments.items() | list %}
<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>
            {%- endfor %}</tool_call>{% endfor %}
    {% endgeneration %}
    {%- else %}{{ text(m.content) | trim }}{% endif %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{{- messages | map(attribute='role') | join(',') | upper }} {{ messages[::-1][0].role }}
{%- if add_generation_prompt %}<|assistant|>{{ '<think></think>' if enable_thinking is defined
    and not enable_thinking else '<think>' }}{% endif %}
"""


@pytest.fixture(scope="module")
def model(sample_f32: Path) -> GgufModel:
    return open_gguf(sample_f32)


def using(model: GgufModel, template: Any) -> GgufModel:
    return dataclasses.replace(model, metadata=model.metadata | {KEY: template})


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, RICH], ids=["sample", "rich"])
@pytest.mark.parametrize("trial", range(len(TRIALS)))
def test_renders_as_transformers(
    model: GgufModel, tmp_path: Path, template: str, trial: int
) -> None:
    from transformers import AutoTokenizer

    changed = using(model, template)
    write_tokenizer(changed, tmp_path)
    arguments = dict(TRIALS[trial])
    messages = arguments.pop("messages")
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, **arguments
    )
    assert len(expected) > 30
    assert render(changed, messages, **arguments) == expected
    require_safe_template(changed)


@pytest.mark.parametrize("text", ["你好 🙂", "line\r\nline\u2028", '</script> & "quotes"', ""])
def test_any_text(model: GgufModel, tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(using(model, RICH), tmp_path)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, tools=[{"function": text}])
    assert render(using(model, RICH), messages, tools=[{"function": text}]) == expected


def test_the_templates_own_refusal(model: GgufModel) -> None:
    """A template may reject a conversation; that is no reason to refuse the template."""
    changed = using(model, RICH)
    with pytest.raises(InputError, match="TemplateError: role judge is unknown; change the mess"):
        render(changed, [{"role": "judge", "content": ""}])
    require_safe_template(using(model, "{{ raise_exception('never') }}"))
    require_safe_template(using(model, "{{ messages[99].content.nothing }}"))


ATTRIBUTE = "reaches for the Python attribute"
READ = {
    "class": ("{{ ''.__class__.__mro__ }}", f"line 1: {ATTRIBUTE} '__"),
    "item": ("x\n{{ ''['__class__'] }}", f"line 2: {ATTRIBUTE} '__class__'"),
    "globals": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", f"{ATTRIBUTE} '__"),
    "self": ("{{ self._TemplateReference__context }}", f"{ATTRIBUTE} '_Temp"),
    "attr": ("{{ messages | attr('_x') }}", f"{ATTRIBUTE} '_x'"),
    "map": ("{{ messages | map(attribute='role._x') | list }}", f"{ATTRIBUTE} '_x'"),
    "select": ("{{ messages | selectattr('_x') | list }}", f"{ATTRIBUTE} '_x'"),
    "format": ("{{ '{0.__class__}'.format(messages) }}", f"{ATTRIBUTE} '__class__'"),
    "builtins": ("{{ __builtins__ }}", "reaches for the Python object '__builtins__'"),
    "open": ("{{ open('/etc/passwd').read() }}", "calls Python's open()"),
    "import": ("{% if 0 %}{{ __import__('os') }}{% endif %}", "calls Python's __import__()"),
    "eval": ("{% set x = eval('1') %}", "calls Python's eval()"),
    "include": ("{% include '/etc/passwd' %}", "reaches for the file '/etc/passwd'"),
    "importing": ("{% import 'os' as os %}", "reaches for the file 'os'"),
    "from": ("{% from 'os' import system %}", "reaches for the file 'os'"),
    "extends": ("{% extends base %}", "reaches for the file '...'"),
    "syntax": ("ok\n{% if %}", "line 2: is no valid Jinja"),
    "long": ("x" * 300000, "has 300000 characters, more than 65536"),
    "digits": ("{{ " + "1" * 5000 + " }}", "is no valid Jinja: Exceeds the limit (4300 digits)"),
    "sum": ("{{ " + "+".join(["1"] * 30000) + " }}", "is nested too deeply"),
    "deep": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "is nested too deeply"),
}


@pytest.mark.parametrize("name", READ)
def test_refused_by_reading(model: GgufModel, tmp_path: Path, name: str) -> None:
    template, cause = READ[name]
    problem = template_problem(template)
    assert problem is not None
    assert cause in problem
    assert len(problem) < 300
    changed = using(model, template)
    assert any(cause in note for note in config_notes(changed))
    with pytest.raises(InputError, match="do not use this file's template"):
        require_safe_template(changed)
    with pytest.raises(InputError, match=KEY):
        render(changed, [])
    with pytest.raises(InputError, match=KEY):
        prepare(changed, tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


RUN = {
    "built": ("{{ ''['__cl' ~ 'ass__'] }}", f"{ATTRIBUTE} '__class__'"),
    "filter": ("{% set n = '__cl' ~ 'ass__' %}{{ '' | attr(n) }}", f"{ATTRIBUTE} '__class__'"),
    "frame": ("{{ strftime_now[('__glo' ~ 'bals__')] }}", f"{ATTRIBUTE} '__globals__'"),
    "change": ("{{ messages.append(1) }}", "append"),
    "endless": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "does not end: stopped after 3 s",
    ),
    "power": ("{{ 9 ** (9 ** (9 ** 9)) }}", "does not end"),
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}", "counts too far: Range too big"),
    "memory": ("{{ 'x' * 10 ** 12 }}", "more than 512 MiB of memory"),
    "output": (
        "{% for i in range(9999) %}{{ 'xxxxxxxx' * 999 }}{% endfor %}",
        "writes more than 4194304 characters",
    ),
}


@pytest.mark.parametrize("name", RUN)
def test_refused_by_trying(model: GgufModel, tmp_path: Path, name: str) -> None:
    template, cause = RUN[name]
    assert template_problem(template) is None
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        prepare(using(model, template), tmp_path / "prepared")
    assert cause in caught.value.cause
    assert time.monotonic() - start < 60
    assert not (tmp_path / "prepared").exists()


def test_long_names_are_cut() -> None:
    for template in (f"{{{{ a._{'x' * 9999} }}}}", f"{{% include '{'x' * 9999}' %}}", "{% x" * 999):
        problem = template_problem(template)
        assert problem is not None
        assert len(problem) < 300


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "was killed from outside, as systems do that run out of mem"),
        (r"os.write(2, b'\xff\n')", "cannot be rendered: \ufffd; do not use"),
    ],
)
def test_what_ended_the_child(
    model: GgufModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, cause: str
) -> None:
    """Killed for lack of memory is not "does not end"; what it wrote may be no UTF-8."""
    child = tmp_path / "chat_child.py"
    child.write_text(f"import os, sys\nsys.stdin.read()\n{code}\n")
    monkeypatch.setattr(chat, "__file__", str(tmp_path / "chat.py"))
    with pytest.raises(InputError) as caught:
        require_safe_template(model)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("tokens", 5, "tokens is missing or no array of str"),
        ("bos_token_id", -1, "bos_token_id is -1, the vocabulary has"),
        ("eos_token_id", True, "eos_token_id is True, the vocabulary has"),
        ("padding_token_id", 512, "padding_token_id is 512, the vocabulary has"),
    ],
)
def test_wrong_special_tokens(
    model: GgufModel, tmp_path: Path, key: str, value: Any, cause: str
) -> None:
    metadata = model.metadata | {f"tokenizer.ggml.{key}": value}
    changed = dataclasses.replace(model, metadata=metadata)
    with pytest.raises(InputError, match=cause):
        prepare(changed, tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


def test_no_vocabulary_to_check_against(model: GgufModel) -> None:
    metadata = model.metadata | {"tokenizer.ggml.tokens": 5, "tokenizer.ggml.bos_token_id": 9999}
    found = read_template(dataclasses.replace(model, metadata=metadata))
    assert found is not None
    assert found[1] == {}
    wrong = dataclasses.replace(model, metadata=metadata | {"tokenizer.ggml.bos_token_id": -1})
    with pytest.raises(InputError, match="bos_token_id is -1"):
        read_template(wrong)


def test_ordinary_words_are_no_attack(model: GgufModel) -> None:
    """Names of Python's functions as variables, filters and keys, and underscores in text."""
    template = (
        "{% set type = 'a' %}{% macro format(x) %}{{ x }}{% endmacro %}{{ format(type) }}"
        "__init__ {{ messages | length }}{{ [3, 1] | max }}{{ dict(a=1).a }}{{ range(3) | list }}"
        "{{ messages | map(attribute='role') | map('replace', 'u', '_') | join('_') }}{{ id }}"
    )
    assert template_problem(template) is None
    text = render(using(model, template), [{"role": "user", "content": ""}])
    assert text == "a__init__ 131[0, 1, 2]_ser"


def test_no_template(model: GgufModel) -> None:
    require_safe_template(using(model, None))
    require_safe_template(using(model, ["no", "text"]))
    with pytest.raises(InputError, match=r"has no tokenizer\.chat_template"):
        render(using(model, None), [])


def test_nothing_of_this_folder_shadows_the_standard_library() -> None:
    """The child runs from glm5lab/gguf, whose modules include a config.py and a header.py."""
    import sys

    from glm5lab.gguf import chat_child

    run = subprocess.run(
        [sys.executable, "-P", str(chat_child.__file__)],
        input='{"template": "{{ messages }}", "calls": [{"messages": 1}]}',
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == '[{"text": "1"}]'

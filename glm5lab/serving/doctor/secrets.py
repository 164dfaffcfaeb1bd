"""Keys and tokens in a log never reach the doctor's output."""

import re

MASK = "***"
_VALUE = r"""(?:"[^"\s]*"|'[^'\s]*'|[^\s,;'"&)\]}]+)"""
# Names of secrets; of tokens only those that let somebody in, not those that a model counts.
_NAME = (
    r"""(?:[\w-]{0,40}?(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|credential|signature)s?"""
    r"""|[\w-]{0,40}?(?:hf|hub|face|api|auth|access|bearer|refresh|github|gitlab|session|user)"""
    r"""[_-]?token|token)"""
)
# Names begin there: a search that may begin anywhere takes a line's length squared.
_START = r"(?<![\w-])"
# A word that is a secret by its form.
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{6,}|sk-[\w-]{6,}|gh[pousr]_\w{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}"
    r"|nvapi-[\w-]{10,}|xox[abpr]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)(?!\*\*\*)[\w.~+/=-]{6,}")
# HF_TOKEN=VALUE, as in a shell.
_VARIABLE = re.compile(r"\b([A-Z][A-Z0-9_]{0,60}(?:TOKEN|KEY|SECRET|PASSWORD)\s*=\s*)" + _VALUE)
_HEADER = re.compile(r"(?i)\b(authorization|x-api-key)(['\"]?\s*[:=]\s*)(?!bearer|basic)" + _VALUE)
_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,20}://)[^\s/@'\"<>]{1,300}@")
# --api-key VALUE, --api-key=VALUE, HF_TOKEN=VALUE, "api_key": "VALUE", api_key=['A', 'B'].
_OPTION = re.compile(rf"(?i)({_START}--{_NAME}(?:=|\s+))(?!-){_VALUE}")
_LIST = re.compile(rf"(?i)({_START}{_NAME}['\"]?\s*[:=]\s*[\[(])([^\])]*)")
_PLAIN = r"(?!None\b|null\b|true\b|false\b|[\[({]|\d{1,9}\b)"
_FIELD = re.compile(rf"(?i)({_START}{_NAME}['\"]?\s*[:=]\s*){_PLAIN}{_VALUE}")


def masked(text: str) -> str:
    """The text with every key, token and password replaced by ***."""
    text = _FORMS.sub(MASK, text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _HEADER.sub(rf"\1\2{MASK}", text)
    text = _URL.sub(rf"\1{MASK}@", text)
    text = _VARIABLE.sub(rf"\1{MASK}", text)
    text = _OPTION.sub(rf"\1{MASK}", text)
    text = _LIST.sub(rf"\1{MASK}", text)
    return _FIELD.sub(rf"\1{MASK}", text)

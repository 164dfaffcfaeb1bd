"""HF tokenizer files from a GGUF's metadata: no download, no other source.

GLM-5's tokenizer is byte-level BPE (`tokenizer.ggml.model` gpt2, `tokenizer.ggml.pre` glm4).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError, brief
from glm5lab.gguf.reader import GgufModel

MODEL, PRE = "gpt2", "glm4"
# How text is cut into words before merging; llama.cpp's and HF's pattern for GLM-4 and GLM-5. What
# is a letter depends on each one's Unicode tables: scripts added in Unicode 15.1 and later (from
# U+105C0 on) may be cut differently.
GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GGUF token types that are one token each wherever they occur in a text.
CONTROL, USER_DEFINED = 3, 4
# A turn ends where the model would hand over: end of text, the user's turn, a tool's result.
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
OTHER_MODEL = "use a GGUF file converted by llama.cpp from GLM-5, GLM-5.1 or GLM-5.2"


@dataclass(frozen=True)
class SpecialIds:
    """Token numbers that generation needs; None or empty where the file names none."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def special_ids(model: GgufModel) -> SpecialIds:
    """Begin, end and padding tokens; ends are the file's keys and GLM-5's three end tokens."""
    value = model.metadata.get("tokenizer.ggml.tokens")
    tokens = value if isinstance(value, list) else []

    def key(name: str) -> int | None:
        value = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not whole or (tokens and value >= len(tokens)):
            raise InputError(
                model.path,
                f"tokenizer.ggml.{name}_token_id is {brief(value)}, "
                f"the vocabulary has {len(tokens)}",
                OTHER_MODEL,
            )
        return value

    named = [tokens.index(t) for t in END_TOKENS if t in tokens]
    ends = [i for i in (key("eos"), key("eot"), key("eom"), *named) if i is not None]
    eos = tuple(dict.fromkeys(ends))
    pad = key("padding")
    return SpecialIds(key("bos"), eos, pad if pad is not None or not eos else eos[0])


def tokenizer_files(model: GgufModel) -> dict[str, str]:
    """The texts of tokenizer.json, tokenizer_config.json and chat_template.jinja, by file name.

    Args:
        model: its metadata hold the tokenizer.

    Raises:
        InputError: no tokenizer in the file, or one of another kind.
    """
    vocabulary = _Vocabulary(model)
    files = {
        "tokenizer.json": json.dumps(_tokenizer_json(vocabulary), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_config(vocabulary), ensure_ascii=False, indent=2),
    }
    template = model.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    return files


def write_tokenizer(model: GgufModel, folder: Path) -> list[Path]:
    """Write `tokenizer_files` into a folder, which must exist.

    Returns:
        The files written; transformers.AutoTokenizer.from_pretrained(folder) loads them.

    Raises:
        InputError: as `tokenizer_files`.
    """
    return write_files(tokenizer_files(model), folder)


def write_files(files: dict[str, str], folder: Path) -> list[Path]:
    """Write texts by file name, each whole or not at all."""
    written = []
    for name, text in files.items():
        path = Path(folder) / name
        temporary = path.with_name(f".{name}.part")
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
        written.append(path)
    return written


class _Vocabulary:
    """The tokenizer's metadata, checked."""

    def __init__(self, model: GgufModel) -> None:
        self.model, data = model, model.metadata
        kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre")
        if kind != MODEL or pre != PRE:
            raise self.fail(
                f"tokenizer.ggml.model {brief(kind)} with tokenizer.ggml.pre {brief(pre)}; "
                f"supported is {MODEL!r} with {PRE!r} (byte-level BPE of GLM-4 and GLM-5)"
            )
        self.tokens: list[str] = self.array("tokens", str)
        self.types: list[int] = self.array("token_type", int)
        if len(self.types) != len(self.tokens):
            raise self.fail(f"{len(self.tokens)} tokens but {len(self.types)} token types")
        self.ids = {token: i for i, token in reversed(list(enumerate(self.tokens)))}
        self.merges = [self.merge(m) for m in self.array("merges", str)]
        self.special = special_ids(model)
        self.add_bos = bool(data.get("tokenizer.ggml.add_bos_token", False))
        context = data.get("glm-dsa.context_length")
        self.context = context if isinstance(context, int) and context > 0 else None

    def fail(self, cause: str) -> InputError:
        return InputError(self.model.path, cause, OTHER_MODEL)

    def array(self, name: str, item: type) -> list[Any]:
        value = self.model.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not value or not isinstance(value[0], item):
            raise self.fail(f"tokenizer.ggml.{name} is missing or no array of {item.__name__}")
        return value

    def merge(self, text: str) -> tuple[str, str]:
        left, space, right = text.partition(" ")
        if (
            not space
            or left + right not in self.ids
            or left not in self.ids
            or right not in self.ids
        ):
            raise self.fail(f"merge {brief(text)} does not join two tokens into a third")
        return left, right


def _added(v: _Vocabulary) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": token, **flags, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(v.tokens, v.types, strict=True))
        if kind in (CONTROL, USER_DEFINED) and v.ids[token] == i
    ]


def _tokenizer_json(v: _Vocabulary) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {
        "type": "Split",
        "pattern": {"Regex": GLM4_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    words = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(v),
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": _post_processor(v, byte_level),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # As llama.cpp does for glm4 (and tiktoken, where GLM-4's vocabulary comes from): a word
            # that is a token stays whole, whatever the merges would make of it.
            "ignore_merges": True,
            "vocab": dict(sorted(v.ids.items(), key=lambda item: item[1])),
            "merges": v.merges,
        },
    }


def _post_processor(v: _Vocabulary, byte_level: dict[str, Any]) -> dict[str, Any]:
    if not v.add_bos or v.special.bos is None:
        return {**byte_level, "trim_offsets": False, "use_regex": True}
    bos = v.tokens[v.special.bos]
    start, text = (
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, second],
        "special_tokens": {bos: {"id": bos, "ids": [v.special.bos], "tokens": [bos]}},
    }


def _config(v: _Vocabulary) -> dict[str, Any]:
    special = [t["content"] for t in _added(v) if t["special"]]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "extra_special_tokens": special,
    }
    if v.context:
        config["model_max_length"] = v.context
    for name, number in (
        ("bos_token", v.special.bos),
        ("eos_token", v.special.eos[0] if v.special.eos else None),
        ("pad_token", v.special.pad),
    ):
        if number is not None:
            config[name] = v.tokens[number]
    return config

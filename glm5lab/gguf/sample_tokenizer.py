"""A small byte-level tokenizer with GLM-5's special tokens, as GGUF stores it."""

from dataclasses import dataclass

from glm5lab.gguf.byte_level import byte_characters, encode_bytes

# GGUF token types (llama.cpp's enum llama_token_type).
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# GLM-5's vocabulary, and the number of its <|endoftext|>.
GLM5_SIZE, FIRST_SPECIAL = 154880, 154820

# In the order of GLM-5's vocabulary. Special tokens are invisible in text; the second group is
# ordinary text to a reader (thoughts, tool calls) but still one token each.
SPECIAL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
)  # fmt: skip
TEXT_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)  # fmt: skip

# Merges of English text, in order of rank; those of Chinese characters join UTF-8 bytes.
ENGLISH = (
    (" ", "t"), ("h", "e"), ("i", "n"), (" ", "a"), ("r", "e"), ("o", "n"), ("e", "r"),
    (" t", "he"), ("in", "g"), ("a", "t"), ("e", "n"), (" ", "s"), ("o", "r"), (" ", "w"),
    ("o", "u"), (" a", "n"), (" an", "d"), ("e", "d"), ("i", "s"), ("l", "l"), (" ", "c"),
    (" ", "f"), (" ", "o"), ("e", "s"), (" ", "b"), ("1", "9"), ("2", "0"), (" ", " "),
    ("  ", "  "), ("l", "o"), ("he", "ll"), ("hell", "o"),
)  # fmt: skip
CHINESE = ("你", "好", "的", "世", "界", "你好", "世界")

CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{%- for message in messages %}"
    "{%- if message.content is string %}{% set content = message.content %}"
    "{%- else %}{% set content = message.content "
    "| selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') %}{% endif %}"
    "{%- if message.role == 'user' %}<|user|>{{ '\\n' + content }}"
    "{%- elif message.role == 'assistant' %}<|assistant|>{{ '\\n<think></think>\\n' + content }}"
    "{%- elif message.role == 'tool' %}<|observation|>{{ '\\n' + content }}"
    "{%- else %}<|system|>{{ '\\n' + content }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>"
    "{{- '\\n<think></think>\\n' if enable_thinking is defined and not enable_thinking else '' }}"
    "{%- endif %}"
)


@dataclass(frozen=True)
class SampleVocabulary:
    """Tokens (in GGUF's byte-level spelling), their types, and merges, ready for GGUF keys."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def id(self, token: str) -> int:
        """Number of a token."""
        return self.tokens.index(token)


def sample_vocabulary(size: int) -> SampleVocabulary:
    """256 byte tokens, merged tokens, special tokens, and padding up to `size`."""
    tokens, merges = _ordinary_tokens()
    return _with_special(tokens, merges, len(tokens), size)


def published_vocabulary(size: int) -> SampleVocabulary:
    """The same tokens with special ones where GLM-5's vocabulary of 154,880 has them."""
    tokens, merges = _ordinary_tokens()
    return _with_special(tokens, merges, size - GLM5_SIZE + FIRST_SPECIAL, size)


def _ordinary_tokens() -> tuple[list[str], list[str]]:
    tokens = list(byte_characters().values())
    merges = []
    for left, right in _merge_pairs():
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
    return tokens, merges


def _with_special(tokens: list[str], merges: list[str], first: int, size: int) -> SampleVocabulary:
    """Padding up to number `first`, the special tokens, padding up to `size`."""
    special = [*SPECIAL, *TEXT_TOKENS]
    least = len(tokens) + len(special)
    if first < len(tokens) or first + len(special) > size:
        raise ValueError(f"size: {least} tokens needed, got {size}")
    types = [NORMAL] * len(tokens)
    for token, kind in (
        [(f"[PAD{i}]", UNUSED) for i in range(len(tokens), first)]
        + [(t, CONTROL) for t in SPECIAL]
        + [(t, USER_DEFINED) for t in TEXT_TOKENS]
        + [(f"[PAD{i}]", UNUSED) for i in range(first + len(special), size)]
    ):
        tokens.append(token)
        types.append(kind)
    return SampleVocabulary(tokens, types, merges)


def _merge_pairs() -> list[tuple[str, str]]:
    out = [(encode_bytes(a.encode()), encode_bytes(b.encode())) for a, b in ENGLISH]
    for text in CHINESE:
        raw = text.encode()
        if len(raw) == 3:  # one character: its first two bytes, then the third
            out.append((encode_bytes(raw[:1]), encode_bytes(raw[1:2])))
            out.append((encode_bytes(raw[:2]), encode_bytes(raw[2:])))
        else:
            out.append((encode_bytes(raw[:3]), encode_bytes(raw[3:])))
    return list(dict.fromkeys(out))

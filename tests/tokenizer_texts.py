"""Texts that pull a tokenizer apart, and a vocabulary with deep merges to try them on."""

import random
import unicodedata
from typing import Any

from glm5lab.gguf.byte_level import byte_characters
from glm5lab.gguf.sample_tokenizer import (
    CONTROL,
    NORMAL,
    SPECIAL,
    TEXT_TOKENS,
    UNUSED,
    USER_DEFINED,
    SampleVocabulary,
)

# One paragraph each, so that every script gets merges of its own.
CORPUS = (
    "The model reads a file, splits its words into tokens, and answers in the same language. "
    "It's what they'd call a byte-level tokenizer; we've tested it, haven't we? I'm sure you'll "
    "see that IT'S the same, DON'T you? I'LL, WE'VE, THEY'RE, SHE'D, I'M. "
    "The years 1984, 2001 and 2024 hold 365 or 366 days.",
    "模型读取文件，把句子切分成词元，然后用同样的语言回答。今天北京的天气很好，气温二十三度。"
    "你好，世界！我们在测试分词器：它必须与另一个实现完全一致。",
    "モデルはファイルを読み、文をトークンに分けて、同じ言語で答えます。東京の天気は晴れです。"
    "모델은 파일을 읽고 문장을 토큰으로 나누어 같은 언어로 대답합니다. 서울의 날씨는 맑습니다.",
    "Модель читает файл, делит слова на токены и отвечает на том же языке. Погода хорошая.",
    "يقرأ النموذج الملف ويقسم الكلمات إلى رموز ويجيب باللغة نفسها. الطقس جميل اليوم. ١٩٨٤",
    "मॉडल फ़ाइल पढ़ता है, शब्दों को टोकन में बाँटता है और उसी भाषा में उत्तर देता है। १२३४",
    "โมเดลอ่านไฟล์ แบ่งคำเป็นโทเคน แล้วตอบเป็นภาษาเดียวกัน Das Modell prüft Größen, naïve Façaden, "
    "el niño comió mañana, ça va à l'école, příliš žluťoučký kůň, İstanbul'da ığdır.",
    "def answer(question: str, *, limit: int = 2048) -> list[str]:\n\tfor i in range(limit):\n"
    '        if question[i:i + 2] == "??":\n            return {"key": [1, 2.5, None]}\n'
    "    raise ValueError(f'{limit!r} is too small')  # TODO: x**2 <= y // 3 && !done || a->b\r\n"
    '<div class="a-b_c">&nbsp;</div>\nSELECT * FROM t WHERE id = 10000000;\n#include <stdio.h>\n',
    "👨‍👩‍👧‍👦 🙂🙂🙂 🏳️‍🌈 👍🏽 🇩🇪🇨🇳 ✅❌ ∀x∈ℝ: ∑ᵢ xᵢ² ≥ 0 → ½ ⅓ Ⅷ ② ℵ₀ €5 £6 ¥7 ‰ “quotes” ‘single’",
)
SPACES = " \t\n\r\v\f\u0085\u00a0\u1680\u2000\u2009\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"


def trained_vocabulary(size: int) -> SampleVocabulary:
    """Byte-level BPE trained on CORPUS with the tokenizers package, special tokens behind it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from glm5lab.gguf.tokenizer import GLM4_PATTERN

    special = [*SPECIAL, *TEXT_TOKENS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GLM4_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special) - 8,
        initial_alphabet=list(byte_characters().values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    types = [NORMAL] * len(tokens)
    tokens += special
    types += [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(TEXT_TOKENS)
    padding = [f"[PAD{i}]" for i in range(len(tokens), size)]
    return SampleVocabulary(tokens + padding, types + [UNUSED] * len(padding), merges)


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of mixed pieces: words of the corpus, any code point, whitespace, special tokens."""
    rng = random.Random(seed)
    words = [w for text in CORPUS for w in text.replace("\n", " ").split(" ") if w]
    assigned = [
        chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")
    ]

    def piece() -> str:
        kind = rng.randrange(8)
        if kind == 0:
            return "".join(rng.choices(SPACES, k=rng.randint(1, 5)))
        if kind == 1:
            return "".join(rng.choices(assigned, k=rng.randint(1, 4)))
        if kind == 2:
            return rng.choice([*SPECIAL, *TEXT_TOKENS])
        if kind == 3:
            return str(rng.randrange(10 ** rng.randint(1, 12)))
        if kind == 4:
            return "".join(rng.choices("'\"`.,;:!?-_/\\|<>[](){}#$%^&*+=~@", k=rng.randint(1, 5)))
        if kind == 5:
            return rng.choice(("'s", "'T", "'re", "'VE", "'ll", "'d", "'ſ", "\r\n", " \n ", "  "))
        return rng.choice(words)

    def text() -> str:
        joined = rng.choice(("", " "))
        return joined.join(piece() for _ in range(rng.randint(1, 12)))

    return [text() for _ in range(count)]


def first_difference(texts: list[str], ours: list[Any], theirs: list[Any]) -> str:
    """A readable report of the first text on which two tokenizers differ, or ""."""
    for text, a, b in zip(texts, ours, theirs, strict=True):
        if a != b:
            return f"{text!r}: {a} instead of {b}"
    return ""

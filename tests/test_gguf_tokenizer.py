"""The tokenizer from metadata, against llama.cpp's own and through HF's loader."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from llama_tokenize import llama_cpp_ids
from tokenizer_texts import CORPUS, SPACES, first_difference, random_texts, trained_vocabulary

from glm5lab.architecture import Glm5Architecture
from glm5lab.errors import InputError
from glm5lab.gguf import sample
from glm5lab.gguf.byte_level import byte_characters, encode_bytes
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.gguf.sample_tokenizer import SampleVocabulary, sample_vocabulary
from glm5lab.gguf.tokenizer import write_tokenizer

TEXTS = [
    "Hello, the weather in 北京 is 23.5°C.",
    "你好世界！你好，世界。 好的\n",
    "def f(x):\n\treturn  x**2   # 12345678 \r\n\r\n    \n",
    "I'LL don't we'VE they're   ",
    "[gMASK]<sop><|system|>\nbe brief<|user|>\nhello there<|assistant|>\n<think></think>\n",
    "<tool_call>f<arg_key>a</arg_key></tool_call><|observation|> /nothink",
    "naïve café — “quotes” ١٢٣ हिन्दी ไทย\u00a0x\u3000y",
    "👨‍👩‍👧 🙂🙂\ufe0f \U0001f1e9\U0001f1ea",
    "   ",
    "\n\n \n",
    "<|endoftext|>[PAD400] [MASK] < |user|>",
    "the then hello hell 19201920",
    "",
]


def load(model: GgufModel, folder: Path) -> Any:
    from transformers import AutoTokenizer

    written = write_tokenizer(model, folder)
    assert [p.name for p in written] == [p for p in NAMES if (folder / p).exists()]
    return AutoTokenizer.from_pretrained(folder)


NAMES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@pytest.fixture(scope="module")
def model(sample_f32: Path) -> GgufModel:
    return open_gguf(sample_f32)


@pytest.fixture(scope="module")
def tokenizer(model: GgufModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(model, tmp_path_factory.mktemp("tokenizer"))


def test_equals_llama_cpp(model: GgufModel, tokenizer: Any) -> None:
    expected = llama_cpp_ids(model.files[0], TEXTS)
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == expected


def test_text_survives(tokenizer: Any) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_whole_words_win_over_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is a token stays whole though no merges lead to it, as llama.cpp has it."""

    def vocabulary(size: int) -> SampleVocabulary:
        v = sample_vocabulary(size)
        v.tokens[-3:] = ["zqzq", "Ġzq", "<custom>"]
        v.types[-3:] = [1, 1, 4]
        return v

    monkeypatch.setattr(sample, "sample_vocabulary", vocabulary)
    path = sample.write_sample(tmp_path)
    texts = ["zqzq zqzq zq", "a <custom> b"]
    ours = [load(open_gguf(path), tmp_path)(text)["input_ids"] for text in texts]
    assert ours == llama_cpp_ids(path, texts)
    assert ours[0][0] == 509


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample whose tokenizer has about a thousand merges in many scripts."""
    tiny = Glm5Architecture.tiny()
    with pytest.MonkeyPatch.context() as patch:
        larger = dataclasses.replace(tiny, vocab_size=4096)
        patch.setattr(Glm5Architecture, "tiny", lambda kind: larger)
        patch.setattr(sample, "sample_vocabulary", trained_vocabulary)
        return sample.write_sample(tmp_path_factory.mktemp("deep"))


def test_many_scripts_equal_llama_cpp(deep: Path, tmp_path: Path) -> None:
    """Paragraphs in twelve scripts, code, emoji, whitespace runs, and random mixtures of them."""
    model = open_gguf(deep)
    assert len(model.metadata["tokenizer.ggml.merges"]) > 1000
    tokenizer = load(model, tmp_path)
    runs = [f"a{space * n}b{space * n}" for space in SPACES for n in (1, 2, 3, 7)]
    texts = [*TEXTS, *CORPUS, *runs, "\n".join(CORPUS), *random_texts(3000, seed=0)]
    ours = [tokenizer(text)["input_ids"] for text in texts]
    assert first_difference(texts, ours, llama_cpp_ids(deep, texts)) == ""
    assert sum(len(ids) for ids in ours) > 30000
    assert max(max(ids, default=0) for ids in ours) > 1000
    for text, ids in zip(texts, ours, strict=True):
        assert tokenizer.decode(ids) == text


def test_special_tokens(model: GgufModel, tokenizer: Any) -> None:
    tokens, types = (model.metadata[f"tokenizer.ggml.{k}"] for k in ("tokens", "token_type"))
    assert len(tokenizer) == len(tokens)
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    control = {t for t, kind in zip(tokens, types, strict=True) if kind == 3}
    assert set(tokenizer.all_special_tokens) == control
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("[gMASK]", "<|endoftext|>")
    assert tokenizer.pad_token == "<|endoftext|>"
    ids = tokenizer("<|user|>hi<think>so</think>")["input_ids"]
    assert ids[0] == tokens.index("<|user|>")
    assert tokens.index("<think>") in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<think>so</think>"


def test_chat_template(tokenizer: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "[gMASK]<sop><|system|>\nbe brief<|user|>\nhello"
        "<|assistant|>\n<think></think>\nhi<|user|>\nbye<|assistant|>"
    )
    quick = tokenizer.apply_chat_template(
        messages[1:2], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert quick == "[gMASK]<sop><|user|>\nhello<|assistant|>\n<think></think>\n"


def test_begin_token_only_when_the_file_says_so(model: GgufModel, tmp_path: Path) -> None:
    add = dataclasses.replace(
        model, metadata=model.metadata | {"tokenizer.ggml.add_bos_token": True}
    )
    tokenizer = load(add, tmp_path)
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer("hi", add_special_tokens=False)["input_ids"][0] != tokenizer.bos_token_id


def test_no_chat_template_no_file(model: GgufModel, tmp_path: Path) -> None:
    metadata = {k: v for k, v in model.metadata.items() if k != "tokenizer.chat_template"}
    assert load(dataclasses.replace(model, metadata=metadata), tmp_path).chat_template is None


BAD = {
    "model": ("llama", "tokenizer.ggml.model 'llama' with tokenizer.ggml.pre 'glm4'; supported"),
    "pre": ("qwen2", "pre 'qwen2'; supported is 'gpt2' with 'glm4'"),
    "tokens": (None, "tokenizer.ggml.tokens is missing"),
    "token_type": ([1, 2], "512 tokens but 2 token types"),
    "merges": (["ab"], "merge 'ab' does not join two tokens into a third"),
    "bos_token_id": (70000, "bos_token_id is 70000, the vocabulary has 512"),
}


@pytest.mark.parametrize("key", BAD)
def test_other_tokenizers_are_refused(model: GgufModel, tmp_path: Path, key: str) -> None:
    value, cause = BAD[key]
    changed = model.metadata | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(InputError, match=cause):
        write_tokenizer(dataclasses.replace(model, metadata=changed), tmp_path)
    assert not list(tmp_path.iterdir())


def test_byte_level_spelling() -> None:
    assert encode_bytes(b" the\n") == "ĠtheĊ"
    assert len(set(byte_characters().values())) == 256
    assert not any(c.isspace() for c in byte_characters().values())

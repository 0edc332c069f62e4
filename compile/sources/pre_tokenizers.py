"""Pre-tokenizers of byte-level BPE, which split text into words before merging, by the name in GGUF files.

A pre-tokenizer is a list of splits, one after the other, as in the makers' own `tokenizer.json`. llama.cpp rewrites
some for its regular expressions (llama-vocab.cpp), with the same results. Knows no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer with settings that depend on it.

    Attributes:
        steps: entries of `pre_tokenizers` in a `tokenizer.json`; the last one maps bytes to letters.
        ignores_merges: true if a word that is a token is not split further.
        adds_bos: true if a text begins with the beginning-of-sequence token, unless the file says otherwise.
        composes: true if text is composed (Unicode NFC) before it is split.
    """

    steps: tuple[Json, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    composes: bool = False


def _split(pattern: str) -> Json:
    """Return a step that splits text at the matches of a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes_as_letters(*, words: bool = False) -> Json:
    """Return the step that maps bytes to letters; with `words`, it first splits at GPT-2's word boundaries."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def _cuts(*patterns: str) -> tuple[Json, ...]:
    """Return splits by each pattern, then the step that maps bytes to letters."""
    return (*map(_split, patterns), _bytes_as_letters())


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # suffixes of English words
_LINES_AND_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(letters: str, digits: str, others: str, *, endings: str = _ENDINGS + "|") -> str:
    """Return OpenAI's cl100k pattern with other classes of letters, digits and other characters."""
    return rf"{endings}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{others}{_LINES_AND_SPACES}"


_LLAMA3_WORDS = _words(r"\p{L}+", r"\p{N}{1,3}", r"[^\s\p{L}\p{N}]+[\r\n]*")
_QWEN2_WORDS = _words(r"\p{L}+", r"\p{N}", r"[^\s\p{L}\p{N}]+[\r\n]*")
_QWEN35_WORDS = _words(r"[\p{L}\p{M}]+", r"\p{N}", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_SEED_WORDS = _words(r"\p{L}+", r"\p{N}{1}", r"[^\s\p{L}\p{N}\r\n]+")
_BAILING_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE_WORDS = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _words_by_case(digits: str, endings: str = "") -> str:
    """Return OpenAI's o200k pattern: a word ends where lower case is followed by upper case."""
    capital, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{capital}*{small}+{endings}|{before}{capital}+{small}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_LINES_AND_SPACES}"
    )


_TEKKEN_WORDS = _words_by_case(r"\p{N}")
_GPT4O_WORDS = _words_by_case(r"\p{N}{1,3}", _ENDINGS + "?")
_DEEPSEEK3_CUTS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _LINES_AND_SPACES,
)


def _characters(ranges: str) -> str:
    """Return ranges of characters, given by hexadecimal numbers, in the syntax of a character class."""
    return "".join("-".join(chr(int(number, 16)) for number in each.split("-")) for each in ranges.split())


_CASED_LETTERS = _characters(  # those listed by DeepSeek's first models
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_HAN_AND_MORE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM_CUTS = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~" + _characters("ff01-ff0f ff1a-ff5e 2018-201f 3000-3002") + "]+",
    r"\s+$",
    _HAN_AND_MORE,
)
_DEEPSEEK_CODER_CUTS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_MORE)

_SINGLE_DIGITS: Json = {"type": "Digits", "individual_digits": True}
_GPT2 = PreTokenizer((_bytes_as_letters(words=True),))
_SMOLLM = PreTokenizer((_SINGLE_DIGITS, _bytes_as_letters(words=True)))
_STARCODER = PreTokenizer(_cuts(r"\p{N}", _GPT2_WORDS))
_LLAMA3 = PreTokenizer(_cuts(_LLAMA3_WORDS), ignores_merges=True, adds_bos=True)
_DBRX = PreTokenizer(_cuts(_LLAMA3_WORDS))
_GLM4 = PreTokenizer(_cuts(_LLAMA3_WORDS), ignores_merges=True)
_QWEN2 = PreTokenizer(_cuts(_QWEN2_WORDS), composes=True)
_SOLAR = PreTokenizer(_cuts(_QWEN2_WORDS))
_GPT4O = PreTokenizer(_cuts(_GPT4O_WORDS))
_DEEPSEEK3 = PreTokenizer(_cuts(*_DEEPSEEK3_CUTS))
_DEEPSEEK_LLM = PreTokenizer((*map(_split, _DEEPSEEK_LLM_CUTS), _SINGLE_DIGITS, _bytes_as_letters()))
_DEEPSEEK_CODER = PreTokenizer((*map(_split, _DEEPSEEK_CODER_CUTS), _SINGLE_DIGITS, _bytes_as_letters()))
_BAILING = PreTokenizer(_cuts(_BAILING_WORDS))


def _named(names: Iterable[str], way: PreTokenizer) -> dict[str, PreTokenizer]:
    """Return a pre-tokenizer under each of its names."""
    return dict.fromkeys(names, way)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        _cuts(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    **_named(("gpt-2", "phi-2", "mellum", "a.x-4.0", "olmo", "exaone4", "trillion", "granite-docling", "mpt"), _GPT2),
    "smollm": _SMOLLM,
    **_named(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _STARCODER),
    **_named(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    "jina-v5-nano": _LLAMA3,
    **_named(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX),
    **_named(("glm4", "glm5"), _GLM4),
    **_named(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), _QWEN2),
    **_named(("stablelm2", "hunyuan", "solar-open", "grok-2"), _SOLAR),
    "qwen35": PreTokenizer(_cuts(_QWEN35_WORDS), composes=True),
    "tekken": PreTokenizer(_cuts(_TEKKEN_WORDS), ignores_merges=True, adds_bos=True),
    **_named(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _GPT4O),
    **_named(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "seed-coder": PreTokenizer(_cuts(_SEED_WORDS)),
    **_named(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "exaone-moe": PreTokenizer(_cuts(_EXAONE_MOE_WORDS)),
    "laguna": PreTokenizer(_cuts(r"[^\n]+|[\n]+", _QWEN2_WORDS)),
    "minicpm5": PreTokenizer(
        _cuts(r"\p{N}{1,3}", _words(r"\p{L}+", r"\p{N}+", r"[^\s\p{L}\p{N}]+[\r\n]*")), ignores_merges=True
    ),
}

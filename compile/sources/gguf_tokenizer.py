"""A tokenizers-library `tokenizer.json` from what GGUF and SentencePiece files say of a vocabulary.

Knows the two kinds of tokenizer that Llama-family models have: byte-level BPE (`gpt2`), whose way of cutting
text into words goes by the name in `tokenizer.ggml.pre`, and SentencePiece BPE (`llama`), whose scores
become merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from radixlm.runtime.errors import CorruptSource, UnsupportedTokenizer
from tokenizers import Tokenizer

from .checkpoint import checked

Json = dict[str, Any]


class TokenType(IntEnum):
    """What a token is for: the numbers of GGUF's `token_type` and of SentencePiece, which are the same."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """All that a tokenizer is made of, whatever file it was in. `scores` and `merges` serve one kind each."""

    model: str  # "gpt2" or "llama"
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    pre: str = "default"
    add_space_prefix: bool = True
    bos_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos_token: bool = False


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in a GGUF file's metadata, with llama.cpp's defaults for what it leaves out.

    Raises CorruptSource where tokens are missing or arrays disagree in length.
    """
    key = "tokenizer.ggml."
    model = metadata.get(key + "model")
    tokens = metadata.get(key + "tokens")
    if not model or not tokens:
        raise CorruptSource("the GGUF file has no tokenizer; convert the model again, with its tokenizer")
    if not isinstance(tokens, list):
        raise CorruptSource("tokenizer.ggml.tokens is no list; fetch the file again")
    pre = metadata.get(key + "pre", "default")
    is_spm = model == "llama"
    defaults = {
        "pre": "default",
        "add_space_prefix": is_spm,
        "bos_token_id": 1 if is_spm else None,
        "unknown_token_id": 0 if is_spm else None,
        "add_bos_token": is_spm or str(pre) in _LLAMA3,
    }
    fields = ("model", "tokens", "merges", "scores", *defaults)
    given = {field: metadata[key + field] for field in fields if key + field in metadata}
    types = metadata.get(key + "token_type") or [int(TokenType.NORMAL)] * len(tokens)
    return checked("tokenizer.ggml", {**defaults, **given, "types": types}, Vocabulary)


def build_tokenizer_json(vocabulary: Vocabulary) -> str:
    """The text of `tokenizer.json`.

    Raises UnsupportedTokenizer for a kind that is not known here, CorruptSource where the parts disagree.
    """
    if len(vocabulary.types) != len(vocabulary.tokens):
        raise CorruptSource(f"{len(vocabulary.tokens)} tokens have {len(vocabulary.types)} types")
    for token_id in (vocabulary.bos_token_id, vocabulary.unknown_token_id):
        if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
            raise CorruptSource(f"special token {token_id} is past the {len(vocabulary.tokens)} tokens")
    if vocabulary.model == "gpt2":
        parts = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        parts = _sentencepiece(vocabulary)
    else:
        raise UnsupportedTokenizer(
            f"tokenizer kind {vocabulary.model!r} cannot be rebuilt; supported are gpt2 (byte-level BPE) and "
            "llama (SentencePiece BPE)"
        )
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary),
        **parts,
    }
    text = json.dumps(whole, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise CorruptSource(f"tokens and merges make no tokenizer ({error}); fetch the file again") from error
    return text


def _byte_level(vocabulary: Vocabulary) -> Json:
    if vocabulary.pre not in _PRE_TOKENIZERS:
        raise UnsupportedTokenizer(
            f"pre-tokenizer {vocabulary.pre!r} is not known; supported are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return {
        "normalizer": {"type": "NFC"} if vocabulary.pre in _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_PRE_TOKENIZERS[vocabulary.pre])},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(_ids(vocabulary), list(vocabulary.merges), ignore_merges=vocabulary.pre in _IGNORE_MERGES),
    }


def _sentencepiece(vocabulary: Vocabulary) -> Json:
    unknown_id = vocabulary.unknown_token_id
    has_bytes = TokenType.BYTE in vocabulary.types
    prefix = vocabulary.add_space_prefix
    escape: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unescape: Json = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    prepend: Json = {"type": "Prepend", "prepend": "▁"}
    strip: Json = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders: list[Json] = [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, escape] if prefix else [escape]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, strip] if prefix else decoders},
        "model": _bpe(
            _ids(vocabulary),
            merges_from_scores(vocabulary),
            unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
    }


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first.

    SentencePiece merges the adjacent pair whose whole has the highest score; as a list of merges (the order
    among equal scores is the one that Hugging Face's converter uses) BPE does the same. Only normal pieces
    take part: "</s>" is never put together from "</" and "s>", and what the makers defined is taken out of
    the text before anything is merged.
    """
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CorruptSource(f"{len(vocabulary.tokens)} tokens have {len(vocabulary.scores)} scores")
    ids = {
        token: index
        for index, (token, type_) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if type_ == TokenType.NORMAL
    }
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = sorted((ids[left], ids[right], left, right) for left, right in halves if left in ids and right in ids)
        merges += [(vocabulary.scores[index], len(left), len(right), left, right) for _, _, left, right in pairs]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _bpe(vocab: dict[str, int], merges: Sequence[str | tuple[str, str]], **options: Any) -> Json:
    """A merge is a pair; joined by a space, as older files have it, it may hold no other space."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids by text, special tokens too (so that each keeps its id); of tokens with the same text the first."""
    ids: dict[str, int] = {}
    for index, token in enumerate(vocabulary.tokens):
        ids.setdefault(token, index)
    return ids


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """Tokens found in the text before anything else: control tokens, and those that the makers defined."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special_types = {TokenType.CONTROL} | ({TokenType.UNKNOWN} if vocabulary.model == "llama" else set())
    return [
        {"id": index, "content": token, **plain, "special": type_ in special_types}
        for index, (token, type_) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if type_ in special_types or type_ == TokenType.USER_DEFINED
    ]


def _post_processor(vocabulary: Vocabulary) -> Json | None:
    """Put the beginning-of-sequence token first, if the model wants one."""
    if not vocabulary.add_bos_token or vocabulary.bos_token_id is None:
        return None
    bos = vocabulary.tokens[vocabulary.bos_token_id]
    first = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos_token_id], "tokens": [bos]}},
    }


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level_step(*, words: bool = False) -> Json:
    """Bytes as letters; with `words`, cut at GPT-2's word boundaries first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


# How text is cut before merging, by `tokenizer.ggml.pre`, one split after the other (llama-vocab.cpp).
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_IGNORE_MERGES = _LLAMA3 | {"tekken"}
_PRE_TOKENIZERS: dict[str, tuple[Json, ...]] = {
    "default": (
        *map(_split, (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
        _byte_level_step(),
    ),
    "gpt-2": (_byte_level_step(words=True),),
    "smollm": ({"type": "Digits", "individual_digits": True}, _byte_level_step(words=True)),
    "tekken": (_split(_TEKKEN_WORDS), _byte_level_step()),
    **dict.fromkeys(sorted(_LLAMA3), (_split(_LLAMA3_WORDS), _byte_level_step())),
    **dict.fromkeys(sorted(_QWEN2), (_split(_QWEN2_WORDS), _byte_level_step())),
}

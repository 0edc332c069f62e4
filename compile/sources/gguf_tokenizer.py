"""A tokenizers-library `tokenizer.json` from what GGUF and SentencePiece files say of a vocabulary.

Knows three kinds of tokenizer: byte-level BPE (`gpt2`), whose way of cutting text into words goes by the name in
`tokenizer.ggml.pre` (`pre_tokenizers.py`); SentencePiece BPE (`llama`), whose scores become merges; and Gemma 4's
(`gemma4`), which has SentencePiece's spaces and bytes, and merges of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
from radixlm.runtime.errors import CorruptSource, UnsupportedTokenizer
from tokenizers import Tokenizer

from .pre_tokenizers import PRE_TOKENIZERS
from .source import checked

Json = dict[str, Any]

_WITH_MERGES = frozenset({"gpt2", "gemma4"})
_SPACES_AS_LETTERS = frozenset({"llama", "gemma4"})  # kinds whose tokens have "▁" for a space


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

    model: str  # "gpt2", "llama" or "gemma4"
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

    Raises CorruptSource where tokens or merges are missing.
    """
    key = "tokenizer.ggml."
    model = metadata.get(key + "model")
    tokens = metadata.get(key + "tokens")
    if not model or not tokens:
        raise CorruptSource("it has no tokenizer; convert the model again, with its tokenizer")
    if not isinstance(tokens, list):
        raise CorruptSource("tokenizer.ggml.tokens is no list; fetch the file again")
    if model in _WITH_MERGES and not metadata.get(key + "merges"):
        raise CorruptSource(
            "the tokenizer has no merges, and would cut all text into letters; take a newer conversion of the model"
        )
    pre = metadata.get(key + "pre", "default")
    is_spm, way = model == "llama", PRE_TOKENIZERS.get(str(pre))
    defaults = {
        "pre": "default",
        "add_space_prefix": is_spm,
        "bos_token_id": 1 if is_spm else None,
        "unknown_token_id": 0 if is_spm else None,
        "add_bos_token": model in _SPACES_AS_LETTERS or (way is not None and way.adds_bos),
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
        parts = _sentencepiece(vocabulary, merges_from_scores(vocabulary))
    elif vocabulary.model == "gemma4":
        parts = _sentencepiece(vocabulary, _pairs(vocabulary.merges))
    else:
        raise UnsupportedTokenizer(
            f"tokenizer kind {vocabulary.model!r} cannot be rebuilt; supported are gpt2 (byte-level BPE), "
            "llama (SentencePiece BPE) and gemma4"
        )
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary),
        **parts,
    }
    text = msgspec.json.encode(whole).decode()
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise CorruptSource(f"tokens and merges make no tokenizer ({error}); fetch the file again") from error
    return text


def _byte_level(vocabulary: Vocabulary) -> Json:
    if vocabulary.pre not in PRE_TOKENIZERS:
        raise UnsupportedTokenizer(
            f"pre-tokenizer {vocabulary.pre!r} is not known; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    way = PRE_TOKENIZERS[vocabulary.pre]
    return {
        "normalizer": {"type": "NFC"} if way.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(way.steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(_ids(vocabulary), list(vocabulary.merges), ignore_merges=way.ignores_merges),
    }


def _sentencepiece(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]]) -> Json:
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
            merges,
            unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
    }


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that are joined by a space in the file, as pairs.

    Raises CorruptSource where one is no pair.
    """
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2:
            raise CorruptSource(
                f"the merge {' '.join(pair)!r} has {len(pair)} parts instead of 2; fetch the file again"
            )
    return pairs  # type: ignore[return-value]


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
    special_types = {TokenType.CONTROL} | ({TokenType.UNKNOWN} if vocabulary.model in _SPACES_AS_LETTERS else set())
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

"""Build a `tokenizer.json` of the tokenizers library from a vocabulary in a GGUF or SentencePiece file.

Supports these kinds of tokenizer:
- byte-level BPE (`gpt2`); `tokenizer.ggml.pre` names its pre-tokenizer (`pre_tokenizers.py`)
- SentencePiece BPE (`llama`), whose scores become merges
- Gemma 4's (`gemma4`), with SentencePiece's spaces and bytes, and merges of its own
- those of encoders (`encoder_tokenizers.py`): WordPiece (`bert`) and SentencePiece's Unigram (`t5`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
from radixlm.runtime.errors import CorruptSource, UnsupportedTokenizer
from tokenizers import Tokenizer

from .encoder_tokenizers import ENCODER_TOKENIZERS, unigram, wordpiece
from .pre_tokenizers import PRE_TOKENIZERS
from .source import checked

Json = dict[str, Any]

_WITH_MERGES = frozenset({"gpt2", "gemma4"})
_SPACES_AS_LETTERS = frozenset({"llama", "gemma4"})  # kinds whose tokens have "▁" for a space
# llama.cpp's ids of the tokens that begin and end a text, and of the unknown one, where a file does not say them
_USUAL_IDS = {"llama": (1, 2, 0), "bert": (101, 102, 100), "t5": (None, 1, 2)}

# llama.cpp drops white space after the special tokens of models with these names, except after these tokens
_STRIPPING_NAMES = ("phi-3", "phi3")
_NEVER_STRIPPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})


class TokenType(IntEnum):
    """The type of a token, with the numbers of GGUF's `token_type`, which are also SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a tokenizer, from any file format. `scores` and `merges` are used by one kind each."""

    model: str  # "gpt2", "llama", "gemma4", "bert" or "t5"
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    pre: str = "default"
    add_space_prefix: bool = True
    bos_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos_token: bool = False
    eos_token_id: int | None = None
    add_eos_token: bool = False
    precompiled_charsmap: Sequence[int] = ()  # bytes, by which SentencePiece normalizes letters
    strips_after: bool = False  # whether white space after special tokens is dropped, as for Phi-3


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary in a GGUF file's metadata, with llama.cpp's defaults for missing keys.

    Raises CorruptSource if tokens or merges are missing.
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
    is_encoder = model in ENCODER_TOKENIZERS
    bos, eos, unknown = _USUAL_IDS.get(str(model), (None, None, None))
    defaults = {
        "pre": "default",
        "add_space_prefix": is_spm or is_encoder,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "add_eos_token": is_encoder,
        "unknown_token_id": unknown,
        "add_bos_token": is_encoder or model in _SPACES_AS_LETTERS or (way is not None and way.adds_bos),
    }
    fields = ("model", "tokens", "merges", "scores", "precompiled_charsmap", *defaults)
    given = {field: metadata[key + field] for field in fields if key + field in metadata}
    if model == "bert":
        named = {"bos_token_id": "cls_token_id", "eos_token_id": "seperator_token_id"}  # spelled so by llama.cpp
        given |= {field: metadata[key + name] for field, name in named.items() if key + name in metadata}
    types = metadata.get(key + "token_type") or [int(TokenType.NORMAL)] * len(tokens)
    name = str(metadata.get("general.name", "")).lower()
    given |= {"types": types, "strips_after": any(part in name for part in _STRIPPING_NAMES)}
    return checked("tokenizer.ggml", {**defaults, **given}, Vocabulary)


def build_tokenizer_json(vocabulary: Vocabulary) -> str:
    """Return the text of `tokenizer.json`.

    Raises UnsupportedTokenizer for an unknown kind, CorruptSource if the parts disagree.
    """
    if len(vocabulary.types) != len(vocabulary.tokens):
        raise CorruptSource(f"{len(vocabulary.tokens)} tokens have {len(vocabulary.types)} types")
    last = vocabulary.eos_token_id if vocabulary.add_eos_token else None
    for token_id in (vocabulary.bos_token_id, vocabulary.unknown_token_id, last):
        if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
            raise CorruptSource(f"special token {token_id} is past the {len(vocabulary.tokens)} tokens")
    if vocabulary.model == "gpt2":
        parts = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        parts = _sentencepiece(vocabulary, merges_from_scores(vocabulary))
    elif vocabulary.model == "gemma4":
        parts = _sentencepiece(vocabulary, _pairs(vocabulary.merges))
    elif vocabulary.model == "bert":
        parts = wordpiece(vocabulary.tokens, vocabulary.unknown_token_id)
    elif vocabulary.model == "t5":
        parts = unigram(
            *(vocabulary.tokens, vocabulary.scores, vocabulary.unknown_token_id),
            bytes(vocabulary.precompiled_charsmap),
        )
    else:
        raise UnsupportedTokenizer(
            f"tokenizer kind {vocabulary.model!r} cannot be rebuilt; supported are gpt2 (byte-level BPE), "
            "llama (SentencePiece BPE), gemma4, bert (WordPiece) and t5 (Unigram)"
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
    """Return the model, pre-tokenizer and decoder of a byte-level BPE."""
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
    """Return the model, normalizer and decoder of a BPE with SentencePiece's spaces."""
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
    """Split merges, which are joined by a space in the file, into pairs.

    Raises CorruptSource if one is not a pair.
    """
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2:
            raise CorruptSource(
                f"the merge {' '.join(pair)!r} has {len(pair)} parts instead of 2; fetch the file again"
            )
    return pairs  # type: ignore[return-value]


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every way to join a piece from two others, best score first.

    SentencePiece merges the adjacent pair whose whole has the highest score. As a list of merges, BPE does the same.
    Equal scores have the order of Hugging Face's converter. Only normal pieces take part: "</s>" is never joined from
    "</" and "s>", and user-defined pieces are matched in the text before anything is merged.
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
    """Return a BPE model. A merge is a pair; in the older form, joined by a space, it can hold no other space."""
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
    """Return ids by text, including special tokens (so that each keeps its id); for equal texts the first."""
    ids: dict[str, int] = {}
    for index, token in enumerate(vocabulary.tokens):
        ids.setdefault(token, index)
    return ids


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """Return tokens that are matched before anything else: control and user-defined tokens."""
    plain = {"single_word": False, "lstrip": False, "normalized": False}
    has_unknown = vocabulary.model in (*_SPACES_AS_LETTERS, *ENCODER_TOKENIZERS)
    special_types = {TokenType.CONTROL} | ({TokenType.UNKNOWN} if has_unknown else set())
    return [
        {
            "id": index,
            "content": token,
            **plain,
            "rstrip": vocabulary.strips_after and token not in _NEVER_STRIPPING,
            "special": type_ in special_types,
        }
        for index, (token, type_) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if type_ in special_types or type_ == TokenType.USER_DEFINED
    ]


def _post_processor(vocabulary: Vocabulary) -> Json | None:
    """Return a post-processor of the tokens before and after a sequence; None if the model uses none."""
    bos = vocabulary.bos_token_id if vocabulary.add_bos_token else None
    eos = vocabulary.eos_token_id if vocabulary.add_eos_token else None
    if bos is None and eos is None:
        return None
    special = {vocabulary.tokens[each]: each for each in (bos, eos) if each is not None}

    def template(sequence: str, type_id: int) -> list[Json]:
        text: Json = {"Sequence": {"id": sequence, "type_id": type_id}}
        ends = ([] if each is None else [_special(vocabulary.tokens[each], type_id)] for each in (bos, eos))
        before, after = ends
        return [*before, text, *after]

    pair = template("A", 0) + template("B", 1)
    if vocabulary.model in ENCODER_TOKENIZERS:  # the second text has a separator before it, or only the first one's end
        is_bert, ends = vocabulary.model == "bert", [] if eos is None else [_special(vocabulary.tokens[eos], 0)]
        pair = template("A", 0) + ([] if is_bert else ends) + template("B", int(is_bert))[bos is not None :]
    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": pair,
        "special_tokens": {text: {"id": text, "ids": [each], "tokens": [text]} for text, each in special.items()},
    }


def _special(text: str, type_id: int) -> Json:
    return {"SpecialToken": {"id": text, "type_id": type_id}}

"""Parts of a `tokenizer.json` for the tokenizers of encoders in GGUF files: WordPiece and SentencePiece's Unigram.

llama.cpp writes a word of WordPiece with a `▁` before it, and a continuation without its `##`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from radixlm.runtime.errors import CorruptSource

Json = dict[str, Any]

ENCODER_TOKENIZERS = frozenset({"bert", "t5"})
_WORD, _CONTINUES = "▁", "##"


def wordpiece(tokens: Sequence[str], unknown_id: int | None) -> Json:
    """Return the model, normalizer, pre-tokenizer and decoder of BERT's WordPiece, in lower case as llama.cpp's.

    >>> list(wordpiece(["[UNK]", "▁the", "ing"], 0)["model"]["vocab"])
    ['[UNK]', 'the', '##ing']
    """
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": _unknown(tokens, unknown_id),
            "continuing_subword_prefix": _CONTINUES,
            "max_input_chars_per_word": 100,
            "vocab": {_piece(token): index for index, token in enumerate(tokens)},
        },
    }


def unigram(tokens: Sequence[str], scores: Sequence[float], unknown_id: int | None, charsmap: bytes) -> Json:
    """Return the model, normalizer, pre-tokenizer and decoder of XLM-RoBERTa's Unigram.

    Args:
        charsmap: by which letters are normalized; empty for none.

    Raises:
        CorruptSource: tokens and scores are not as many.
    """
    if len(scores) != len(tokens):
        raise CorruptSource(f"{len(tokens)} tokens have {len(scores)} scores")
    _unknown(tokens, unknown_id)
    spaces: Json = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    letters: list[Json] = []
    if charsmap:
        letters = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}]
    marks: Json = {"type": "Metaspace", "replacement": _WORD, "prepend_scheme": "always", "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*letters, spaces]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, marks]},
        "decoder": marks,
        "model": {
            "type": "Unigram",
            "unk_id": unknown_id,
            "vocab": [list(pair) for pair in zip(tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _piece(token: str) -> str:
    """Return a token as WordPiece writes it."""
    if token.startswith(_WORD):
        return token.removeprefix(_WORD)
    return token if token.startswith("[") and token.endswith("]") else _CONTINUES + token


def _unknown(tokens: Sequence[str], unknown_id: int | None) -> str:
    """Return the unknown token. Raises CorruptSource if there is none."""
    if unknown_id is None or not 0 <= unknown_id < len(tokens):
        raise CorruptSource(f"the unknown token {unknown_id} is none of the {len(tokens)} tokens")
    return tokens[unknown_id]

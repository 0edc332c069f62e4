"""A SentencePiece `tokenizer.model` as a vocabulary, read without the sentencepiece library.

Knows the few fields of sentencepiece_model.proto that a BPE model is made of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from radixlm.runtime.errors import CorruptSource, UnsupportedTokenizer

from .gguf_tokenizer import TokenType, Vocabulary

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _UNKNOWN_ID, _BOS_ID = 3, 40, 41
_PRECOMPILED_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES = 2, 3, 4
_BPE = 2

Value = int | bytes


def vocabulary_from_sentencepiece(data: bytes, *, add_bos_token: bool = True) -> Vocabulary:
    """The pieces, scores and types of a serialized ModelProto.

    Raises CorruptSource where `data` is none, UnsupportedTokenizer for a unigram model, and one that normalizes texts.
    """
    try:
        tokens, scores, types = [], [], []
        trainer: dict[int, Value] = {}
        normalizer: dict[int, Value] = {}
        for number, value in _fields(data):
            if number == _PIECES:
                piece = dict(_fields(_bytes(value)))
                tokens.append(_bytes(piece[_PIECE_TEXT]).decode("utf-8"))
                scores.append(struct.unpack("<f", _bytes(piece.get(_PIECE_SCORE, bytes(4))))[0])
                types.append(_int(piece.get(_PIECE_TYPE, int(TokenType.NORMAL))))
            elif number == _TRAINER:
                trainer = dict(_fields(_bytes(value)))
            elif number == _NORMALIZER:
                normalizer = dict(_fields(_bytes(value)))
        if not tokens:
            raise ValueError("no pieces")
        model_type = _int(trainer.get(_MODEL_TYPE, 1))
        add_space_prefix = bool(normalizer.get(_ADD_DUMMY_PREFIX, 1))
        drops_spaces = bool(normalizer) and bool(normalizer.get(_REMOVE_EXTRA_WHITESPACES, 1))
        changes_text = bool(normalizer.get(_PRECOMPILED_CHARSMAP)) or drops_spaces
        bos_id, unknown_id = _id(trainer.get(_BOS_ID, 1)), _id(trainer.get(_UNKNOWN_ID, 0))
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise CorruptSource(f"tokenizer.model is no SentencePiece model ({error}); fetch it again") from error
    if model_type != _BPE:
        raise UnsupportedTokenizer("tokenizer.model is a unigram model; only SentencePiece BPE can be rebuilt")
    if changes_text:
        raise UnsupportedTokenizer(
            "tokenizer.model changes texts before it cuts them (it normalizes letters or drops spaces), which cannot "
            "be rebuilt; add the tokenizer.json of the model"
        )
    return Vocabulary(
        model="llama",
        tokens=tokens,
        types=types,
        scores=scores,
        add_space_prefix=add_space_prefix,
        bos_token_id=bos_id,
        unknown_token_id=unknown_id,
        add_bos_token=add_bos_token,
    )


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of one protobuf message in order: number, and an int or the raw bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            number_value, at = _varint(data, at)
            yield number, number_value
            continue
        if wire_type == 2:
            length, at = _varint(data, at)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if at + length > len(data):
            raise ValueError(f"{len(data)} bytes, {at + length} are needed")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value


def _id(value: Value) -> int | None:
    """A token id; absent ones are -1, a varint of ten bytes."""
    number = _int(value)
    return None if number >= 1 << 31 else number

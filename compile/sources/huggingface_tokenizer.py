"""The tokenizer of a Hugging Face directory: its JSON, its special ids, its chat template.

Knows the files (tokenizer.json or tokenizer.model, tokenizer_config.json, chat_template.jinja) and their precedence. A
SentencePiece `tokenizer.model` is read without the sentencepiece library. Only the few fields of
sentencepiece_model.proto that a BPE model uses are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact.gguf_header import require_content
from radixlm.runtime.errors import CorruptSource, SourceNotFound, UnsupportedTokenizer
from tokenizers import Tokenizer

from .gguf_tokenizer import TokenType, Vocabulary, build_tokenizer_json
from .model_files import read_json
from .source import ends_of_reply, read_text, usable_template

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _UNKNOWN_ID, _BOS_ID = 3, 40, 41
_PRECOMPILED_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES = 2, 3, 4
_BPE = 2

_CLS = "[CLS]"  # begins texts of encoders, whether a file says so or not

Value = int | bytes


def vocabulary_from_sentencepiece(data: bytes, *, add_bos_token: bool = True) -> Vocabulary:
    """Read the pieces, scores and types of a serialized ModelProto.

    Raises CorruptSource if `data` is invalid, UnsupportedTokenizer for a unigram model, and for one that normalizes
    text.
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
    """Yield the fields of one protobuf message in order: number, and an int or the raw bytes."""
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
    """Return the number at `at`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _bytes(value: Value) -> bytes:
    """Return a field's bytes. Raises ValueError for a number."""
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _int(value: Value) -> int:
    """Return a field's number. Raises ValueError for bytes."""
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value


def _id(value: Value) -> int | None:
    """Return a token id; absent ones are -1, a varint of ten bytes."""
    number = _int(value)
    return None if number >= 1 << 31 else number


Json = Mapping[str, Any]
# files of multimodal models, such as Mistral Small 3.1
_OF_PROCESSORS = ("chat_template.json", "processor_config.json")


class HuggingFaceTokenizer:
    """The tokenizer that the directory `path` describes; `ids` are those of tokens by their texts."""

    def __init__(self, path: Path, config: Json, generation: Json, *, vocab_size: int) -> None:
        """Read the tokenizer. Raises SourceNotFound without one, CorruptSource for a damaged one or too large ids."""
        self._path = path
        self._settings = read_json(path / "tokenizer_config.json", optional=True)
        self._bos_of_pieces: int | None = None  # the id in tokenizer.model, if that is the tokenizer
        self._open(self._read_tokenizer())
        self.bos_token_id = self._bos_token_id(config, generation)
        self.eos_token_ids = self._eos_token_ids(config, generation)
        if any(index >= vocab_size for index in self.ids.values()):
            self._drop_added_tokens(vocab_size)
        self.add_bos_token = self._adds_bos()
        self.chat_template = self._read_chat_template()

    def _read_tokenizer(self) -> str:
        """Return the tokenizer.json of the directory, built from tokenizer.model if there is only that."""
        model = self._path / "tokenizer.model"
        if (self._path / "tokenizer.json").is_file():
            return read_text(self._path / "tokenizer.json")
        if not model.is_file():
            raise SourceNotFound(f"{self._path} has neither tokenizer.json nor tokenizer.model; add one of them")
        require_content(model)
        adds_bos = bool(self._settings.get("add_bos_token", True))
        vocabulary = vocabulary_from_sentencepiece(model.read_bytes(), add_bos_token=adds_bos)
        self._bos_of_pieces = vocabulary.bos_token_id
        return build_tokenizer_json(_with_added(vocabulary, self._settings.get("added_tokens_decoder") or {}))

    def _open(self, document: str) -> None:
        """Set the tokenizer, its JSON and its ids. Raises CorruptSource if the document is no tokenizer."""
        self.json = document
        try:
            self._tokenizer = Tokenizer.from_str(document)
        except Exception as error:  # the library raises bare Exception
            raise CorruptSource(f"{self._path / 'tokenizer.json'} is no tokenizer ({error}); fetch it again") from error
        self.ids = self._tokenizer.get_vocab(with_added_tokens=True)

    def _drop_added_tokens(self, vocab_size: int) -> None:
        """Drop added tokens that have no row in the embedding, such as the image token of Gemma 3's text models.

        Raises:
            CorruptSource: a token of the model's own vocabulary has no row, or one that begins or ends a text.
        """
        own = self._tokenizer.get_vocab(with_added_tokens=False)
        needed = {*own.values(), self.bos_token_id, *self.eos_token_ids}
        dropped = {text: index for text, index in self.ids.items() if index >= vocab_size}
        largest = max((index for index in dropped.values() if index in needed), default=None)
        if largest is not None:
            raise CorruptSource(f"{self._path}: the tokenizer has id {largest}, the embedding {vocab_size} rows")
        self._open(_without_added(self.json, dropped.keys()))

    def _bos_token_id(self, config: Json, generation: Json) -> int | None:
        """Return the id of the beginning-of-sequence token, an encoder's `[CLS]`; None if no file declares one."""
        named = (self.ids.get(_text(self._settings.get(key))) for key in ("bos_token", "cls_token"))
        ids = [*named, *_ids_in(generation, "bos_token_id"), *_ids_in(config, "bos_token_id")]
        ids += [self._bos_of_pieces, self.ids.get(_CLS)]
        return next((index for index in ids if index is not None and index in self.ids.values()), None)

    def _eos_token_ids(self, config: Json, generation: Json) -> tuple[int, ...]:
        """Return the tokenizer's own id, all that any file declares, and the well-known ones in the vocabulary."""
        declared = [*_ids_in(generation, "eos_token_id"), *_ids_in(config, "eos_token_id")]
        named = self.ids.get(_text(self._settings.get("eos_token")))
        ids = [named, *declared, *(self.ids[text] for text in ends_of_reply(self.ids))]
        known = set(self.ids.values())
        return tuple(dict.fromkeys(index for index in ids if index is not None and index in known))

    def _adds_bos(self) -> bool:
        """Return the tokenizer's setting; without one, whether tokenizer.json puts the token before an empty text."""
        if self.bos_token_id is None:
            return False
        declared = self._settings.get("add_bos_token")
        return bool(declared) if declared is not None else self._tokenizer.encode("").ids[:1] == [self.bos_token_id]

    def _read_chat_template(self) -> str | None:
        """Return the template of its own file, then of the tokenizer, then of files that only processors read."""
        return next((template for template in map(_usual_template, self._templates()) if template is not None), None)

    def _templates(self) -> Iterator[Any]:
        """Yield the template of each file; a file is read only if none before it has a template."""
        file = self._path / "chat_template.jinja"
        if file.is_file():
            yield read_text(file)
        yield self._settings.get("chat_template")
        for name in _OF_PROCESSORS:
            yield read_json(self._path / name, optional=True).get("chat_template")


def _usual_template(said: Any) -> str | None:
    """Return the template, or the default one of several named ones; None if it would render nothing."""
    if isinstance(said, list):
        said = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, dict)}
    if isinstance(said, dict):
        said = said.get("default")
    return usable_template(said)


def _with_added(vocabulary: Vocabulary, added: Json) -> Vocabulary:
    """Return the vocabulary with the tokens that tokenizer_config.json adds to SentencePiece's own pieces."""
    tokens, types, scores = list(vocabulary.tokens), list(vocabulary.types), list(vocabulary.scores)
    for key in sorted(added, key=int):
        if int(key) < len(tokens):
            continue
        if int(key) > len(tokens):
            raise CorruptSource(f"added token {key} leaves a hole after {len(tokens)} pieces")
        tokens.append(str(added[key]["content"]))
        types.append(TokenType.CONTROL if added[key].get("special") else TokenType.USER_DEFINED)
        scores.append(0.0)
    return replace(vocabulary, tokens=tokens, types=types, scores=scores)


def _without_added(document: str, dropped: Set[str]) -> str:
    """Return a tokenizer.json without added tokens of these texts. Its post-processor does not insert them either."""
    tokenizer = json.loads(document)
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in dropped]
    whole = tokenizer.get("post_processor") or {}
    for processor in whole.get("processors", [whole]):
        if processor.get("type") == "TemplateProcessing":
            inserted = processor["special_tokens"]
            kept = {name: token for name, token in inserted.items() if dropped.isdisjoint(token["tokens"])}
            processor["special_tokens"] = kept
            for template in ("single", "pair"):
                pieces = processor[template]
                processor[template] = [
                    piece for piece in pieces if "SpecialToken" not in piece or piece["SpecialToken"]["id"] in kept
                ]
    return json.dumps(tokenizer, ensure_ascii=False)


def _ids_in(settings: Json, key: str) -> list[int]:
    """Return the valid token ids of a setting, which may be one id, a list or null."""
    value = settings.get(key)
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool)]


def _text(token: Any) -> str:
    """Return the text of a token: in tokenizer_config.json it is a string, or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""

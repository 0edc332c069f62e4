"""What a tokenizer does to text, found by reading tokenizer.json and by probing what it really does.

Knows one tokenizer, not the model behind it. No table of known tokenizers: what is not found here is not so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import tokenizers

from .errors import InvalidProfile, InvalidTokenizer
from .pieces import Kind

DummyPrefix = Literal["none", "text_start", "every_section"]

_SPACE_MARKS: Mapping[Kind, str] = {"byte_level_bpe": "Ġ", "sentencepiece": "▁", "other": " "}
# Endings that a generation prompt may have before its space: a letter, a digit, punctuation, brackets, a new line.
_BEFORE_SUFFIX = ("Hello", "a", "7", "Assistant:", "[/INST]", "### Response:", "?", ">", '"', "é", "Hello\n", "\n\n")
# Composed and decomposed é, ligature, full-width letter, capital, accents, several spaces, a tab, an inner new line.
_CHANGED_BY_NORMALIZERS = ("e\u0301", "\u00e9", "\ufb01", "\uff21", "A", "a  b", "a\tb", "a\nb", "a ", "\u00a0a", "“a”")


@dataclass(frozen=True)
class AddedToken:
    """A token that stands outside the vocabulary's pieces; `special` ones are control, never text."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True)
class TokenizerProfile:
    """What a tokenizer does to text.

    `dummy_prefix` says where a space is put before the text: nowhere, at its start, or also after each special token;
    `dummy_prefix_before_space`, whether that also happens where the text itself begins with a space.
    """

    kind: Kind
    model: str  # the class in tokenizer.json: "BPE", "Unigram", ...
    vocab_size: int  # all ids are below
    added_tokens: tuple[AddedToken, ...]
    unk_token_id: int | None
    byte_fallback: bool  # characters without a piece are spelled by the pieces <0xNN>
    normalizers: tuple[str, ...]  # types in tokenizer.json, in order
    pre_tokenizers: tuple[str, ...]
    normalizer_changes_text: bool  # beyond the writing of spaces: NFC, lower case, stripping
    dummy_prefix: DummyPrefix
    dummy_prefix_before_space: bool
    decoding_strips_space: bool  # decoding drops a space that begins the text
    suffix_ids: tuple[int, ...]  # what a lone space at the end of a text becomes, if a token of its own
    pieces_cross_space: bool  # some piece continues over the beginning of a word, so that no cut is safe there
    template_prefix_ids: tuple[int, ...]  # what the post-processor adds before a text (bos) ...
    template_suffix_ids: tuple[int, ...]  # ... and behind it (eos)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset(token.id for token in self.added_tokens if token.special)

    def to_dict(self) -> dict[str, object]:
        """The profile in JSON's types; `from_dict` gives it back."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> TokenizerProfile:
        """The profile that `to_dict` wrote.

        Raises:
            InvalidProfile: a field is missing, unknown, or of another type.
        """
        profile = _read_dataclass(cls, fields, "profile")
        assert isinstance(profile, TokenizerProfile)
        outside = [i for i in (*profile.suffix_ids, *profile.special_ids) if not 0 <= i < profile.vocab_size]
        if outside:
            raise InvalidProfile(f"profile: token id {outside[0]} is outside the vocabulary of {profile.vocab_size}")
        return profile


def load_tokenizer(tokenizer_json: str) -> tokenizers.Tokenizer:
    """The library's tokenizer, without what would make encoding lossy or random: truncation, padding, dropout.

    Raises:
        InvalidTokenizer: the library cannot read the text.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise InvalidTokenizer(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def profile_tokenizer(tokenizer_json: str) -> TokenizerProfile:
    """Find out what the tokenizer does to text; takes a second for a large vocabulary.

    Raises:
        InvalidTokenizer: tokenizer.json does not parse.
    """
    tokenizer = load_tokenizer(tokenizer_json)
    try:
        document = json.loads(tokenizer_json)
        return _Probe(tokenizer, document).profile()
    except (KeyError, TypeError, AttributeError) as error:  # the library reads it, but it is not as documented
        raise InvalidTokenizer(f"tokenizer.json has an unexpected form: {error!r}") from error


class _Probe:
    """Questions to one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, document: dict[str, object]) -> None:
        self.tokenizer = tokenizer
        self.document = document
        self.model = _section(document, "model")
        self.vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.added = _added_tokens(document)
        self.byte_fallback = bool(self.model.get("byte_fallback")) and "<0x00>" in self.vocabulary
        self.kind = self._kind()
        self.space = _SPACE_MARKS[self.kind]

    def profile(self) -> TokenizerProfile:
        unk = self.model.get("unk_token")
        template = self.tokenizer.encode("a").ids
        plain = self._ids("a")
        at = next((n for n in range(len(template)) if template[n : n + len(plain)] == plain), 0)
        dummy_prefix = self._dummy_prefix()
        return TokenizerProfile(
            kind=self.kind,
            model=str(self.model["type"]) if "type" in self.model else type(self.tokenizer.model).__name__,
            vocab_size=max(self.vocabulary.values(), default=-1) + 1,
            added_tokens=self.added,
            unk_token_id=self.vocabulary.get(unk) if isinstance(unk, str) else None,
            byte_fallback=self.byte_fallback,
            normalizers=_types(self.document.get("normalizer"), "normalizers"),
            pre_tokenizers=_types(self.document.get("pre_tokenizer"), "pretokenizers"),
            normalizer_changes_text=any(map(self._is_changed, _CHANGED_BY_NORMALIZERS)),
            dummy_prefix=dummy_prefix,
            dummy_prefix_before_space=dummy_prefix != "none" and self._written(" a").startswith(self.space * 2),
            decoding_strips_space=self._decoding_strips_space(),
            suffix_ids=self._suffix_ids(),
            pieces_cross_space=any(self._crosses_space(piece) for piece in self.vocabulary),
            template_prefix_ids=tuple(template[:at]),
            template_suffix_ids=tuple(template[at + len(plain) :]),
        )

    def _kind(self) -> Kind:
        parts = {
            *_types(self.document.get("decoder"), "decoders"),
            *_types(self.document.get("pre_tokenizer"), "pretokenizers"),
        }
        if "ByteLevel" in parts:
            return "byte_level_bpe" if isinstance(self.tokenizer.model, tokenizers.models.BPE) else "other"
        writes_marks = "▁" in self._written("a b")
        models = (tokenizers.models.BPE, tokenizers.models.Unigram)
        return "sentencepiece" if writes_marks and isinstance(self.tokenizer.model, models) else "other"

    def _dummy_prefix(self) -> DummyPrefix:
        if not self._written("a").startswith(self.space):
            return "none"
        special = next((token for token in self.added if token.special), None)
        if special is None:
            return "text_start"
        pieces = self.tokenizer.encode(f"b{special.text}a", add_special_tokens=False).tokens
        after = "".join(pieces[pieces.index(special.text) + 1 :]) if special.text in pieces else ""
        return "every_section" if after.startswith(self.space) else "text_start"

    def _suffix_ids(self) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for text in _BEFORE_SUFFIX:
            *before, last = self._ids(text + " ") or [-1]
            if last >= 0 and before == self._ids(text) and self.tokenizer.id_to_token(last) == self.space:
                found[last] = None
        return tuple(found)

    def _decoding_strips_space(self) -> bool:
        last = self._ids("b a")[-1:]  # 'a' with the space before it, where they are one piece
        word = self.tokenizer.id_to_token(last[0]) if last else ""
        if not word.startswith(self.space):  # a tiny vocabulary: take the space and the word
            last = self._ids("b a")[-2:]
        return not self.tokenizer.decode(last).startswith(" ")

    def _is_changed(self, text: str) -> bool:
        if self.tokenizer.normalizer is None:
            return False
        normalized: str = self.tokenizer.normalizer.normalize_str(text).replace(self.space, " ")
        return text not in (normalized, normalized[1:] if normalized.startswith(" ") else text + "-")

    def _crosses_space(self, piece: str) -> bool:
        stem = piece.lstrip(self.space)
        return self.space in stem and not any(token.text == piece for token in self.added)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _written(self, text: str) -> str:
        return "".join(self.tokenizer.encode(text, add_special_tokens=False).tokens)


def _section(document: Mapping[str, object], name: str) -> dict[str, object]:
    section = document[name]
    if not isinstance(section, dict):
        raise InvalidTokenizer(f'"{name}" of tokenizer.json is not an object')
    return section


def _added_tokens(document: Mapping[str, object]) -> tuple[AddedToken, ...]:
    listed = document.get("added_tokens") or []
    assert isinstance(listed, list)  # the library has read it
    tokens = (AddedToken(int(one["id"]), str(one["content"]), bool(one.get("special"))) for one in listed)
    return tuple(sorted(tokens, key=lambda token: token.id))


def _types(part: object, members: str) -> tuple[str, ...]:
    """The types of a normalizer, pre-tokenizer or decoder, those in a Sequence one by one."""

    def walk(part: object) -> Iterator[str]:
        if not isinstance(part, dict):
            return
        if part.get("type") != "Sequence":
            yield str(part.get("type"))
        for member in part.get(members) or ():
            yield from walk(member)

    return tuple(walk(part))


def _read_dataclass(cls: type, fields: object, where: str) -> object:
    if not isinstance(fields, Mapping):
        raise InvalidProfile(f"{where}: expected an object, got {type(fields).__name__}")
    hints = get_type_hints(cls)
    if unlike := sorted(map(str, hints.keys() ^ fields.keys())):
        raise InvalidProfile(f"{where}: fields that are missing or unknown: {', '.join(unlike)}; compile the model again")
    return cls(**{name: _read_value(hints[name], fields[name], f"{where}.{name}") for name in hints})


def _read_value(hint: object, value: object, where: str) -> object:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_dataclass(hint, value, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidProfile(f"{where}: expected a list, got {type(value).__name__}")
        return tuple(_read_value(get_args(hint)[0], one, f"{where}[{n}]") for n, one in enumerate(value))
    if get_origin(hint) is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise InvalidProfile(f"{where}: expected one of {', '.join(get_args(hint))}, got {value!r}")
        return value
    allowed = get_args(hint) or (hint,)  # int | None, or a plain type; bool is not an int here
    if type(value) not in allowed:
        names = " or ".join(getattr(one, "__name__", str(one)) for one in allowed)
        raise InvalidProfile(f"{where}: expected {names}, got {value!r}")
    return value

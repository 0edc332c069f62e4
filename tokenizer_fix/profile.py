"""A tokenizer's effects on text, as stored in the manifest; `probe` finds them.

Knows types and ranges, not tokenizers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

from .errors import InvalidProfile
from .pieces import Kind

DummyPrefix = Literal["none", "text_start", "every_section"]


@dataclass(frozen=True)
class AddedToken:
    """A token outside the vocabulary's pieces; `special` ones are control tokens, never text."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True)
class TokenizerProfile:
    """The effects of a tokenizer on text.

    `dummy_prefix` says where a space is added: nowhere, at the start of a text, or also after each special token.
    `dummy_prefix_before_space` says whether it is also added if the text itself begins with a space.
    """

    kind: Kind
    model: str  # the class in tokenizer.json: "BPE", "Unigram", ...
    vocab_size: int  # all ids are smaller
    added_tokens: tuple[AddedToken, ...]
    unk_token_id: int | None
    byte_fallback: bool  # characters without a piece are spelled by the pieces <0xNN>
    normalizers: tuple[str, ...]  # types in tokenizer.json, in order
    pre_tokenizers: tuple[str, ...]
    normalizer_changes_text: bool  # beyond the encoding of spaces: NFC, lower case, stripping
    dummy_prefix: DummyPrefix
    dummy_prefix_before_space: bool
    decoding_strips_space: bool  # decoding drops a space that begins the text
    suffix_ids: tuple[int, ...]  # tokens of a lone space at the end of a text, if it is a token of its own
    pieces_cross_space: bool  # some piece continues over the beginning of a word: no cut there is safe by itself
    template_prefix_ids: tuple[int, ...]  # added by the post-processor before a text (bos) ...
    template_suffix_ids: tuple[int, ...]  # ... and after it (eos)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset(token.id for token in self.added_tokens if token.special)

    def to_dict(self) -> dict[str, object]:
        """Return the profile in JSON's types, for `from_dict`."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> TokenizerProfile:
        """Return the profile that `to_dict` wrote.

        Raises:
            InvalidProfile: a field is missing, unknown, or of another type.
        """
        profile = _read_dataclass(cls, fields, "profile")
        assert isinstance(profile, TokenizerProfile)
        ids = (*profile.suffix_ids, *(token.id for token in profile.added_tokens))
        if outside := [token_id for token_id in ids if not 0 <= token_id < profile.vocab_size]:
            raise InvalidProfile(f"profile: token id {outside[0]} is not below vocab_size {profile.vocab_size}")
        return profile


def _read_dataclass(cls: type, fields: object, where: str) -> object:
    """Return a dataclass from JSON fields. Raises InvalidProfile that names the position `where`."""
    if not isinstance(fields, Mapping):
        raise InvalidProfile(f"{where}: expected an object, got {type(fields).__name__}")
    hints = _hints_of(cls)
    if unlike := sorted(map(str, hints.keys() ^ fields.keys())):
        names = ", ".join(unlike)
        raise InvalidProfile(f"{where}: missing or unknown fields: {names}; compile the model again")
    return cls(**{name: _read_value(hints[name], fields[name], f"{where}.{name}") for name in hints})


@cache
def _hints_of(cls: type) -> dict[str, object]:
    """Return the types of a dataclass's fields, found once: a profile has thousands of added tokens."""
    return get_type_hints(cls)


def _read_value(hint: object, value: object, where: str) -> object:
    """Return a value of a field's type from JSON. Raises InvalidProfile that names the position `where`."""
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

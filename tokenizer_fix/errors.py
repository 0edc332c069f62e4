"""What can be wrong with a tokenizer, or with what is given to one. All are ValueErrors."""

from __future__ import annotations


class TokenizerError(ValueError):
    """Base of every error that `tokenizer_fix` raises on purpose."""


class InvalidTokenizer(TokenizerError):
    """tokenizer.json does not parse, contradicts itself, or is of a kind that cannot be decoded here."""


class InvalidProfile(TokenizerError):
    """A stored `TokenizerProfile` lacks a field, has one too many, or one of a wrong type."""


class InvalidText(TokenizerError):
    """The text cannot be encoded: it is not Unicode, or plain text would become a special token."""


class InvalidTokenId(TokenizerError):
    """The id is outside the vocabulary."""

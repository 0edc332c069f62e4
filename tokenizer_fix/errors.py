"""Errors of a tokenizer, and of its arguments. All are ValueErrors."""

from __future__ import annotations


class TokenizerError(ValueError):
    """Base of every error that `tokenizer_fix` raises on purpose."""


class InvalidTokenizer(TokenizerError):
    """The tokenizer.json does not parse, contradicts itself, or is of a kind that cannot be decoded."""


class InvalidProfile(TokenizerError):
    """A stored `TokenizerProfile` lacks a field, has an unknown one, or one of a wrong type."""


class InvalidText(TokenizerError):
    """The text cannot be encoded: it is not Unicode, or plain text would become a special token."""


class InvalidTokenId(TokenizerError):
    """The token id is outside the vocabulary."""


class TooManyTokens(TokenizerError):
    """A text has more tokens than allowed; `num_tokens` is a lower bound of their number."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"the text has at least {num_tokens} tokens, at most {max_tokens} are allowed; shorten it")
        self.num_tokens, self.max_tokens = num_tokens, max_tokens

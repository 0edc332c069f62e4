"""The bytes of single tokens.

Knows the alphabets in which vocabularies write text (GPT-2's, SentencePiece's and WordPiece's), not how tokens follow
one another.
"""

from __future__ import annotations

import operator
import re
from typing import Literal

import tokenizers

from .errors import InvalidTokenId

Kind = Literal["byte_level_bpe", "sentencepiece", "wordpiece", "other"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary: 'Ġ' (U+0120) is the space.

    Printable Latin-1 characters are their own bytes; the other 68 bytes follow from U+0100 on (GPT-2's
    `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


class Pieces:
    """The bytes of each token of a vocabulary.

    A piece of a byte-level vocabulary may be any part of a character. In SentencePiece's, only the pieces `<0xNN>` are
    parts of characters. WordPiece's are words, which a space precedes, and their continuations after `##`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, kind: Kind, byte_fallback: bool, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._continues = str(getattr(tokenizer.model, "continuing_subword_prefix", "")) if kind == "wordpiece" else ""
        self._alphabet = byte_alphabet() if kind == "byte_level_bpe" else None
        self._byte_fallback = byte_fallback
        self._vocab_size = vocab_size
        self._spelled: dict[int, bytes] = {}  # pieces returned before, because a reply repeats its tokens

    def spell(self, token_id: int) -> bytes:
        """Return the bytes of `token_id`; b"" for an id that the vocabulary leaves unused.

        Raises:
            InvalidTokenId: the id is not in `[0, vocab_size)`.
        """
        token_id = self.check(token_id)
        spelled = self._spelled.get(token_id)
        if spelled is None:
            spelled = self._spelled[token_id] = self._spell(token_id)
        return spelled

    def check(self, token_id: int) -> int:
        """Return the id as an int. Raises InvalidTokenId if it is not in `[0, vocab_size)`."""
        token_id = operator.index(token_id)
        if not 0 <= token_id < self._vocab_size:
            raise InvalidTokenId(f"token id {token_id} is not in the vocabulary: 0..{self._vocab_size - 1}")
        return token_id

    def _spell(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an unused id."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._continues:
            is_part = piece.startswith(self._continues)
            return (piece.removeprefix(self._continues) if is_part else f" {piece}").encode()
        return self._byte_level(piece) if self._alphabet is not None else self._sentencepiece(piece)

    def _byte_level(self, piece: str) -> bytes:
        """Return the bytes of a piece of a byte-level vocabulary."""
        assert self._alphabet is not None
        try:
            return bytes(self._alphabet[character] for character in piece)
        except KeyError:  # an added token is written unchanged, spaces included
            return piece.encode()

    def _sentencepiece(self, piece: str) -> bytes:
        """Return the bytes of a piece of SentencePiece."""
        if self._byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()

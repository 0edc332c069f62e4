"""The bytes that a prompt's ids spell, and how its text continues from any of them.

Two runs of ids that spell the same bytes between the same special tokens are the same text. Knows ids and bytes, not
caches; a tokenizer creates it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from .seam_encoder import is_cut

MARK = 0xFF  # begins the mark of a token that is not text; no UTF-8 has this byte

Spell = Callable[[int], bytes]
"""The bytes of a token; `special_mark` for special ones, and for those that spell nothing or the byte MARK."""


def special_mark(token_id: int) -> bytes:
    """Return the mark of a special token: five bytes that no text contains."""
    return bytes([MARK]) + token_id.to_bytes(4, "big")


def is_mark(spelled: bytes) -> bool:
    """Return whether these bytes are a mark, of a token that is not text and matches only its own id."""
    return spelled[0] == MARK


class MarkedPieces(dict[int, bytes]):
    """A cache of the bytes of tokens, by id; control tokens are marks.

    It is a dict, because it is looked up for each token of a prompt: that takes a tenth of the time of a method.

    Args:
        spell: returns the bytes of a token.
        control_ids: tokens that are not text, whatever they spell.
    """

    def __init__(self, spell: Callable[[int], bytes], control_ids: Container[int]) -> None:
        super().__init__()
        self._spell, self._control_ids = spell, control_ids

    def __missing__(self, token_id: int) -> bytes:
        spelled = self._spell(token_id)
        if not spelled or MARK in spelled or token_id in self._control_ids:
            spelled = special_mark(token_id)
        self[token_id] = spelled
        return spelled


class SpelledPrompt:
    """The encoding of a prompt, as bytes.

    `text[starts[i]:starts[i + 1]]` is the bytes of `ids[i]`. An offset into `text` at which one of `ids` begins is
    canonical: the prompt continues there as it was encoded. The text between two marks is one section.
    """

    def __init__(
        self, ids: Sequence[int], spell: Spell, encode_inside: Callable[[str], list[int]], *, has_cuts: bool = False
    ) -> None:
        """Spell `ids`.

        Args:
            encode_inside: returns the ids of a text that continues inside a section: nothing is added before it.
            has_cuts: true if no token extends over the seams that `is_cut` finds. Tokens after a seam then stay the
                same, whatever changes before it.
        """
        self.ids = ids
        self.spell = spell
        self._encode_inside = encode_inside
        pieces = list(map(spell, ids))
        self.text = b"".join(pieces)
        self.starts = list(accumulate(map(len, pieces), initial=0))
        self._has_cuts = has_cuts
        self._tails: dict[int, tuple[tuple[int, ...], int] | None] = {}

    def canonical_index(self, offset: int) -> int | None:
        """Return the index in `ids` of the token at `offset` (`len(ids)` at the end); None inside a token."""
        index = bisect_left(self.starts, offset)
        return index if index < len(self.starts) and self.starts[index] == offset else None

    def is_character_boundary(self, offset: int) -> bool:
        """Return whether `offset` is between two characters."""
        return offset >= len(self.text) or self.text[offset] & 0xC0 != 0x80

    def has_mark(self, offset: int) -> bool:
        """Return whether a token that is not text begins at `offset`, at which a token ends."""
        return offset < len(self.text) and self.text[offset] == MARK

    def tail(self, offset: int) -> tuple[tuple[int, ...], int] | None:
        """Return ids of the text from a character on, up to a token of `ids`, and the index of that token.

        At a canonical offset there are no such ids. None if no ids spell the rest: a vocabulary may have a word without
        its parts.
        """
        index = self.canonical_index(offset)
        if index is not None:
            return (), index
        if offset not in self._tails:
            self._tails[offset] = self._encode_tail(offset)
        return self._tails[offset]

    def _encode_tail(self, offset: int) -> tuple[tuple[int, ...], int] | None:
        """Return ids of the text from `offset` to the next independent token, and that token's index."""
        after = self._next_cut(offset)
        rest = self.text[offset : self.starts[after]]
        try:
            ids = tuple(self._encode_inside(rest.decode()))
        except UnicodeDecodeError:  # a prompt of ids may spell any bytes
            return None
        return (ids, after) if b"".join(map(self.spell, ids)) == rest else None

    def _next_cut(self, offset: int) -> int:
        """Return the index of the next token of `ids` that does not depend on earlier text.

        It is a mark, or a token after a seam.
        """
        index = bisect_left(self.starts, offset)
        while index < len(self.ids):
            start = self.starts[index]
            if self.text[start] == MARK or (self._has_cuts and start > offset and is_cut(self.text, start)):
                break
            index += 1
        return index

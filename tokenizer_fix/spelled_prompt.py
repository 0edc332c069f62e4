"""What a prompt's ids spell, byte by byte, and how its text goes on from any of them.

Two runs of ids that spell the same bytes between the same special tokens are the same text. Knows ids and bytes, not
caches; a tokenizer makes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from .seam_encoder import is_cut

MARK = 0xFF  # begins what stands for a token that is no text; no UTF-8 has this byte

Spell = Callable[[int], bytes]
"""The bytes of a token; `special_mark` for special ones, and for those that spell nothing or the byte MARK."""


def special_mark(token_id: int) -> bytes:
    """What a special token spells here: five bytes that no text has."""
    return bytes([MARK]) + token_id.to_bytes(4, "big")


def is_mark(spelled: bytes) -> bool:
    """Whether a token that spells this is no text, and stands for its own id alone."""
    return spelled[0] == MARK


class MarkedPieces(dict[int, bytes]):
    """What tokens spell here, by id, of those that were asked for.

    A dict, for it is looked up for each token of a prompt: that takes a tenth of the time of a method.

    Args:
        spell: the bytes of a token.
        control_ids: tokens that are no text, whatever they spell.
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

    `text[starts[i]:starts[i + 1]]` is what `ids[i]` spells. An offset into `text` that begins one of `ids` is
    canonical: there the prompt goes on as it was encoded. Between marks the text is one section.
    """

    def __init__(
        self, ids: Sequence[int], spell: Spell, encode_inside: Callable[[str], list[int]], *, has_cuts: bool = False
    ) -> None:
        """Spell `ids`.

        Args:
            encode_inside: the ids of a text that goes on inside a section: nothing is put before it.
            has_cuts: whether the tokenizer joins nothing over the places that `is_cut` names: then what is behind
                one stays as it was encoded, whatever changes before it.
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
        """Which of `ids` begins at `offset` (`len(ids)` at the end); None inside a token."""
        index = bisect_left(self.starts, offset)
        return index if index < len(self.starts) and self.starts[index] == offset else None

    def is_character_boundary(self, offset: int) -> bool:
        """Whether no character is cut at `offset`."""
        return offset >= len(self.text) or self.text[offset] & 0xC0 != 0x80

    def has_mark(self, offset: int) -> bool:
        """Whether a token that is no text begins at `offset`, where one ends."""
        return offset < len(self.text) and self.text[offset] == MARK

    def tail(self, offset: int) -> tuple[tuple[int, ...], int] | None:
        """How the prompt goes on from a character: ids up to where its own go on, then `ids[index:]`.

        At a canonical offset there are none of the former. None where no ids spell the rest: a vocabulary may have
        a word without its parts.
        """
        index = self.canonical_index(offset)
        if index is not None:
            return (), index
        if offset not in self._tails:
            self._tails[offset] = self._encode_tail(offset)
        return self._tails[offset]

    def _encode_tail(self, offset: int) -> tuple[tuple[int, ...], int] | None:
        after = self._next_cut(offset)
        rest = self.text[offset : self.starts[after]]
        try:
            ids = tuple(self._encode_inside(rest.decode()))
        except UnicodeDecodeError:  # a prompt of ids may spell anything
            return None
        return (ids, after) if b"".join(map(self.spell, ids)) == rest else None

    def _next_cut(self, offset: int) -> int:
        """The first of `ids` after `offset` that stays, whatever is before it: no text, or behind a cut."""
        index = bisect_left(self.starts, offset)
        while index < len(self.ids):
            start = self.starts[index]
            if self.text[start] == MARK or (self._has_cuts and start > offset and is_cut(self.text, start)):
                break
            index += 1
        return index

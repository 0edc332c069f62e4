"""What a prompt's ids spell, byte by byte, and how its text goes on from any of them.

Two runs of ids that spell the same bytes between the same special tokens are the same text. Knows ids and bytes, not
caches; a tokenizer makes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from .seam_encoder import is_cut

_MARK = b"\xff"  # begins what stands for a special token; no UTF-8 has it, and ids are compared besides


def special_mark(token_id: int) -> bytes:
    """What a special token spells here: five bytes that no text has."""
    return _MARK + token_id.to_bytes(4, "big")


class SpelledPrompt:
    """The encoding of a prompt, as bytes.

    `text[starts[i]:starts[i + 1]]` is what `ids[i]` spells; special tokens are spelled as `special_mark`. An offset
    into `text` that begins one of `ids` is canonical: there the prompt goes on as it was encoded.
    """

    def __init__(
        self,
        ids: Sequence[int],
        spell: Callable[[int], bytes],
        special_ids: Container[int],
        encode_inside: Callable[[str], list[int]],
        *,
        has_cuts: bool = False,
    ) -> None:
        """Spell `ids`.

        Args:
            spell: the bytes of a token, `special_mark` for special ones.
            encode_inside: the ids of a text that goes on inside a section: nothing is put before it.
            has_cuts: whether the tokenizer joins nothing over the places that `is_cut` names: then what is behind
                one stays as it was encoded, whatever changes before it.
        """
        self.ids = ids
        self.spell = spell
        self._special_ids = special_ids
        self._encode_inside = encode_inside
        pieces = [spell(token_id) for token_id in ids]
        self.text = b"".join(pieces)
        self.starts = [0, *accumulate(map(len, pieces))]
        self._has_cuts = has_cuts
        self._tails: dict[int, tuple[tuple[int, ...], int] | None] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether a token is control and no text."""
        return token_id in self._special_ids

    def canonical_index(self, offset: int) -> int | None:
        """Which of `ids` begins at `offset` (`len(ids)` at the end); None inside a token."""
        index = bisect_left(self.starts, offset)
        return index if index < len(self.starts) and self.starts[index] == offset else None

    def is_character_boundary(self, offset: int) -> bool:
        """Whether no character is cut at `offset`."""
        return offset >= len(self.text) or self.text[offset] & 0xC0 != 0x80

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
        """The first of `ids` after `offset` that stays, whatever is before it: a special one, or behind a cut."""
        index = bisect_left(self.starts, offset)
        while index < len(self.ids) and self.ids[index] not in self._special_ids:
            start = self.starts[index]
            if self._has_cuts and start > offset and is_cut(self.text, start):
                break
            index += 1
        return index

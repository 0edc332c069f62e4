"""What a prompt's ids spell, byte by byte, and how its text goes on from any of them.

Two runs of ids that spell the same bytes between the same special tokens are the same text. Knows ids and bytes, not
caches; a tokenizer makes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

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
    ) -> None:
        """Spell `ids`.

        Args:
            spell: the bytes of a token, `special_mark` for special ones.
            encode_inside: the ids of a text that goes on inside a section: nothing is put before it.
        """
        self.ids = ids
        self.spell = spell
        self._special_ids = special_ids
        self._encode_inside = encode_inside
        pieces = [spell(token_id) for token_id in ids]
        self.text = b"".join(pieces)
        self.starts = [0, *accumulate(map(len, pieces))]
        self._tails: dict[int, tuple[tuple[int, ...], int]] = {}

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

    def tail(self, offset: int) -> tuple[tuple[int, ...], int]:
        """How the prompt goes on from a character: ids of the rest of its section, then `ids[index:]`.

        At a canonical offset there are none of the former.
        """
        index = self.canonical_index(offset)
        if index is not None:
            return (), index
        if offset not in self._tails:
            after = bisect_left(self.starts, offset)
            while after < len(self.ids) and self.ids[after] not in self._special_ids:
                after += 1
            rest = self.text[offset : self.starts[after]].decode("utf-8", "strict")
            self._tails[offset] = (tuple(self._encode_inside(rest)), after)
        return self._tails[offset]

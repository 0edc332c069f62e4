"""Find what followed the last tokens of a text when they last stood in it.

Knows one list of token ids. The idea is prompt lookup's (Saxena, 2023): replies repeat what was said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..model.batch import Int32Array

LENGTHS = (32, 16, 8, 4, 3, 2, 1)  # tokens of a suffix that are the same, the best first
SHORT = (4, 3, 2, 1)  # those that are looked for; of what is found, the longest
_CANDIDATES = 16  # that are compared, the last ones


class SuffixLookup:
    """The tokens of a prompt and its reply.

    >>> lookup = SuffixLookup([1, 2, 3, 4, 5, 9, 2, 3])
    >>> lookup.draft(3)
    ((4, 5, 9), 2)
    >>> lookup.extend([7])
    >>> lookup.draft(3)
    ((), 0)
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids: Int32Array = np.array(token_ids, np.int32)
        self._length = len(token_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        """The last token; there must be one."""
        return int(self._ids[self._length - 1])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        length = self._length + len(token_ids)
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(256, len(self._ids)), np.int32)])
            return self.extend(token_ids)
        self._ids[self._length : length] = token_ids
        self._length = length

    def draft(self, most: int, *, behind: Sequence[int] = ()) -> tuple[tuple[int, ...], int]:
        """At most `most` tokens that followed the longest suffix, and its length, rounded down to one of `LENGTHS`; 0:
        none did. The suffix is that of all tokens and those `behind` them, which are not added.
        """
        own = self._length
        self.extend(behind)
        try:
            return self._draft(most)
        finally:
            self._length = own

    def _draft(self, most: int) -> tuple[tuple[int, ...], int]:
        ids = self._ids[: self._length]
        for length in SHORT if most > 0 else ():
            starts = self._length - length  # of earlier suffixes
            if starts <= 0:
                continue
            is_same = ids[:starts] == ids[starts]
            for place in range(1, length):
                is_same &= ids[place : starts + place] == ids[starts + place]
            found = np.flatnonzero(is_same)[-_CANDIDATES:]
            if found.size:
                begin, length = self._longest((found + length).tolist())
                return tuple(ids[begin : begin + most].tolist()), length
        return (), 0

    def _longest(self, ends: list[int]) -> tuple[int, int]:
        """Of places where suffixes end, that of the longest one, the last on ties, and how much of it is the same."""
        own = self._ids[max(0, self._length - LENGTHS[0]) : self._length][::-1]
        best, longest = 0, 0
        for end in reversed(ends):
            earlier = self._ids[max(0, end - len(own)) : end][::-1]
            differs = own[: len(earlier)] != earlier
            length = int(np.argmax(differs)) if differs.any() else len(earlier)
            if length > longest:
                best, longest = end, length
                if length == len(own):
                    break
        return best, next(length for length in LENGTHS if length <= longest)

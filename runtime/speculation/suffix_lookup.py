"""Find what followed the last tokens of a text when they last stood in it.

Knows one list of token ids. The idea is prompt lookup's (Saxena, 2023): replies repeat what was said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..model.batch import Int32Array

LENGTHS = (4, 3, 2)  # tokens of a suffix, the best first


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

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        length = self._length + len(token_ids)
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(256, len(self._ids)), np.int32)])
            return self.extend(token_ids)
        self._ids[self._length : length] = token_ids
        self._length = length

    def draft(self, most: int) -> tuple[tuple[int, ...], int]:
        """At most `most` tokens that followed the longest suffix the last time, and the length of that; 0: none did."""
        ids = self._ids[: self._length]
        for length in LENGTHS:
            starts = self._length - length  # of earlier suffixes
            if starts <= 0:
                continue
            is_same = ids[:starts] == ids[starts]
            for place in range(1, length):
                is_same &= ids[place : starts + place] == ids[starts + place]
            found = int(np.argmax(is_same[::-1]))
            if is_same[starts - 1 - found]:
                begin = starts - 1 - found + length
                return tuple(ids[begin : begin + most].tolist()), length
        return (), 0

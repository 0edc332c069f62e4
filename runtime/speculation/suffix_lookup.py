"""Find what followed the last tokens of a text when they last stood in it.

Knows one list of token ids. The idea is prompt lookup's (Saxena, 2023): replies repeat what was said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..model.batch import Int32Array

IntArray = npt.NDArray[np.intp]

LENGTHS = (32, 16, 8, 4, 3, 2, 1)  # tokens of a suffix that are the same, the best first
LOOKED_FOR = 4  # tokens of a suffix; of what is found, the longest
_CANDIDATES = 16  # that are compared, the last ones
_BACK = np.arange(1, LENGTHS[0] + 1)
_NONE = np.empty(0, np.intp)


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
        ends = self._ends()
        if most <= 0 or not ends.size:
            return (), 0
        begin, length = self._longest(ends[-_CANDIDATES:])
        return tuple(self._ids[begin : min(begin + most, self._length)].tolist()), length

    def _ends(self) -> IntArray:
        """Where the longest earlier suffixes end, of `LOOKED_FOR` tokens at most; in order, behind their last token."""
        ids = self._ids[: self._length]
        ends = np.flatnonzero(ids[:-1] == ids[-1]) + 1 if self._length else _NONE
        for length in range(2, LOOKED_FOR + 1):
            if not (longer := ends[ends >= length]).size:
                break
            longer = longer[ids[longer - length] == ids[-length]]
            if not longer.size:
                break
            ends = longer
        return ends

    def _longest(self, ends: IntArray) -> tuple[int, int]:
        """Of places where suffixes end, that of the longest one, the last on ties, and how much of it is the same."""
        back = _BACK[: self._length]
        before = ends[:, None] - back
        is_same = (self._ids[before] == self._ids[self._length - back]) & (before >= 0)
        lengths = np.where(is_same.all(axis=1), len(back), is_same.argmin(axis=1))
        best = len(ends) - 1 - int(lengths[::-1].argmax())
        longest = int(lengths[best])
        return int(ends[best]), next(length for length in LENGTHS if length <= longest)

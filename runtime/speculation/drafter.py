"""Draft the next tokens of one reply without a model: from its grammar, the prefix tree, or its earlier tokens.

The last is prompt lookup (Saxena, 2023): replies repeat earlier text. Knows one sequence's tokens and its namespace's
tree, and no other namespace's; and the tokens that a grammar allows next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from ..chat.token_constraint import Foresight
from ..model.batch import Int32Array
from .draft import FORCED, MAX_DRAFT, MODEL, NO_DRAFT, TREE, Acceptance, Draft, StepCost, draft_length

LookAhead = Callable[[int], tuple[int, ...]]
"""Return at most this many tokens that the tree has after all of the sequence's."""

IntArray = npt.NDArray[np.intp]

LENGTHS = (32, 16, 8, 4, 3, 2, 1)  # lengths of an equal suffix in tokens, the best first
MAX_SUFFIX = 4  # tokens of a suffix that are searched for; the longest match wins
_CANDIDATES = 16  # the last matches, which are compared
_BACK = np.arange(1, LENGTHS[0] + 1)
_NONE = np.empty(0, np.intp)
_LOOK_EVERY = 8  # tokens until the tree is searched again after a miss
_AHEAD = 256  # tokens requested from the tree at once
_EXPECTED = {
    TREE: 0.8,
    32: 0.95,
    16: 0.9,
    8: 0.8,
    4: 0.7,
    3: 0.5,
    2: 0.3,
    1: 0.15,
    FORCED: 0.95,
}  # expected acceptance rate, by kind


@dataclass
class Drafter:
    """The drafter of one reply.

    Args:
        token_ids: prompt and reply so far.
        look_ahead: searches the tree; None: the tree is not searched.
        foresight: of the reply's grammar; None without a grammar.
        on_verified: called for a draft model's drafts, with the numbers of verified and of accepted tokens.
    """

    token_ids: Sequence[int]
    look_ahead: LookAhead | None = None
    foresight: Foresight | None = None
    on_verified: Callable[[int, int], None] | None = None
    _ahead: tuple[int, ...] = ()
    _looks_at: int = 0  # the length at which the tree is searched next
    _seen: dict[int, Acceptance] = field(default_factory=lambda: {kind: Acceptance(e) for kind, e in _EXPECTED.items()})

    _after: dict[int, Acceptance] = field(default_factory=dict)  # by the token before a draft token

    def __post_init__(self) -> None:
        self._lookup = SuffixLookup(self.token_ids)

    def propose(self, most: int, cost: StepCost, *, num_rows: int, num_expected: float) -> Draft:
        """Return a draft of the tokens after the sequence, for a step of `num_rows` rows without it."""
        most = min(most, MAX_DRAFT)
        if most <= 0 or not cost.is_worth_drafting(num_rows, num_expected):
            return NO_DRAFT
        self._catch_up()
        forced = () if self.foresight is None else self.foresight.forced()[:most]
        for kind, token_ids in self._candidates(forced, most):
            if self.foresight is not None and len(token_ids) > len(forced):
                token_ids = token_ids[: self.foresight.num_allowed(token_ids)]
            if not token_ids:
                continue
            draft = self._make_draft(kind, token_ids, len(forced))
            number = draft_length(draft.chances, cost, num_rows=num_rows, num_expected=num_expected)
            if number:
                return draft.first(number)
            self._seen[kind].forget()
        return NO_DRAFT

    def observe(self, draft: Draft, num_accepted: int) -> None:
        """Record how many tokens of a draft were accepted, for the source that it came from."""
        forced, number = draft.num_forced, len(draft.token_ids)
        if draft.kind == MODEL:
            assert self.on_verified is not None, "a draft of no model"
            self.on_verified(number, num_accepted)
            return
        if forced:
            self._seen[FORCED].observe(forced, min(forced, num_accepted))
        if number > forced and num_accepted >= forced:
            self._seen[draft.kind].observe(number - forced, num_accepted - forced)
        before = self._ids_before(draft.token_ids)
        for place in range(forced, min(number, num_accepted + 1)):
            self._after.setdefault(before[place], Acceptance(0.0)).observe(1, int(place < num_accepted))

    def _make_draft(self, kind: int, token_ids: tuple[int, ...], num_forced: int) -> Draft:
        """Return a draft with the measured probabilities that each token and those before it are accepted.

        Args:
            kind: the source of the tokens: `TREE`, `FORCED`, or the length of the suffix that was looked up.
            num_forced: number of first tokens that the grammar allows only.
        """
        sure, share, after = self._seen[FORCED].share, self._seen[kind].share, self._after
        shares = [sure] * min(num_forced, len(token_ids))
        for before in self._ids_before(token_ids)[len(shares) :]:
            is_known = 0 < kind < LENGTHS[0] and before in after  # a long match does not depend on one token
            shares.append(after[before].share_of(share) if is_known else share)
        return Draft(token_ids, kind, tuple(accumulate(shares, mul)), num_forced)

    def _ids_before(self, token_ids: Sequence[int]) -> list[int]:
        """Return the token before each token of a draft."""
        return [self._lookup.last, *token_ids[:-1]]

    def _candidates(self, forced: tuple[int, ...], most: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return each source's proposal as `(kind, token ids)`, the best first; all begin with the forced tokens."""
        ahead = self._tokens_ahead(most)
        if ahead[: len(forced)] != forced[: len(ahead)]:
            ahead = ()
        found, length = self._lookup.draft(most - len(forced), behind=forced)
        return [(TREE, ahead), (length if found else FORCED, (*forced, *found))]

    def _tokens_ahead(self, most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that come next in the prefix tree, which is searched every few tokens only."""
        if not self._ahead and self.look_ahead is not None and len(self._lookup) >= self._looks_at:
            self._ahead = self.look_ahead(_AHEAD)
            self._looks_at = len(self._lookup) + _LOOK_EVERY
        return self._ahead[:most]

    def _catch_up(self) -> None:
        """Add the tokens that came since the last call, and forget those that were taken back."""
        if len(self.token_ids) < len(self._lookup):
            self._lookup, self._ahead = SuffixLookup(self.token_ids), ()
        new = self.token_ids[len(self._lookup) :]
        if new:
            is_as_known = self._ahead[: len(new)] == tuple(new)
            self._ahead = self._ahead[len(new) :] if is_as_known else ()
            self._lookup.extend(new)


class SuffixLookup:
    """The tokens of a prompt and its reply, to find the tokens that followed an earlier occurrence of the last ones.

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
        """Return at most `most` tokens that followed the longest earlier suffix, and its length; 0 if there is none.

        The length is rounded down to one of `LENGTHS`. The suffix is that of all tokens and then those `behind` them,
        which are not added.
        """
        own = self._length
        self.extend(behind)
        try:
            return self._find_draft(most)
        finally:
            self._length = own

    def _find_draft(self, most: int) -> tuple[tuple[int, ...], int]:
        """Return at most `most` tokens after the longest earlier suffix, and its length; see `draft`."""
        ends = self._ends()
        if most <= 0 or not ends.size:
            return (), 0
        begin, length = self._longest(ends[-_CANDIDATES:])
        return tuple(self._ids[begin : min(begin + most, self._length)].tolist()), length

    def _ends(self) -> IntArray:
        """Return the ends of the longest earlier suffixes, of at most `MAX_SUFFIX` tokens, in order.

        An end is the index after the suffix's last token.
        """
        ids = self._ids[: self._length]
        ends = np.flatnonzero(ids[:-1] == ids[-1]) + 1 if self._length else _NONE
        for length in range(2, MAX_SUFFIX + 1):
            if not (longer := ends[ends >= length]).size:
                break
            longer = longer[ids[longer - length] == ids[-length]]
            if not longer.size:
                break
            ends = longer
        return ends

    def _longest(self, ends: IntArray) -> tuple[int, int]:
        """Return the end of the longest suffix among `ends`, the last one on ties, and its length."""
        back = _BACK[: self._length]
        before = ends[:, None] - back
        is_same = (self._ids[before] == self._ids[self._length - back]) & (before >= 0)
        lengths = np.where(is_same.all(axis=1), len(back), is_same.argmin(axis=1))
        best = len(ends) - 1 - int(lengths[::-1].argmax())
        longest = int(lengths[best])
        return int(ends[best]), next(length for length in LENGTHS if length <= longest)

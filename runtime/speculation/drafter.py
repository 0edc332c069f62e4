"""Guess what one reply goes on with: as the tree knows it, or as its own tokens went on before.

Knows one sequence's tokens and its namespace's tree, and no other namespace's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .draft_length import MAX_DRAFT, Acceptance, StepCost, draft_length
from .suffix_lookup import SuffixLookup

LookAhead = Callable[[Sequence[int], int], tuple[int, ...]]
"""At most so many tokens that the tree has behind all of these."""

_LOOK_EVERY = 8  # tokens: the tree is asked again so often where it knew nothing
_AHEAD = 256  # tokens that the tree is asked for at once
_EXPECTED = {0: 0.8, 4: 0.7, 3: 0.5, 2: 0.3}  # right guesses: of the tree's (0), and by the length of a suffix


@dataclass(frozen=True)
class Draft:
    """Guesses, and the kind that they are of."""

    token_ids: tuple[int, ...]
    kind: int
    share: float = 0.0  # of them that are expected to be right, where those before them were


NO_DRAFT = Draft((), 0)


@dataclass
class Drafter:
    """Drafts for one reply.

    Args:
        token_ids: of prompt and reply so far.
        look_ahead: into the tree; None: it is not to be asked.
    """

    token_ids: Sequence[int]
    look_ahead: LookAhead | None = None
    _ahead: tuple[int, ...] = ()
    _looks_at: int = 0  # the length at which the tree is asked next
    _seen: dict[int, Acceptance] = field(default_factory=lambda: {kind: Acceptance(e) for kind, e in _EXPECTED.items()})

    def __post_init__(self) -> None:
        self._lookup = SuffixLookup(self.token_ids)

    def propose(self, most: int, cost: StepCost, *, num_rows: int, num_expected: float) -> Draft:
        """A draft of the tokens behind all of the sequence's, for a step of `num_rows` without it."""
        self._catch_up()
        most = min(most, MAX_DRAFT)
        if most <= 0:
            return NO_DRAFT
        for kind, token_ids in self._sources(most):
            if not token_ids:
                continue
            share = self._seen[kind].share
            number = draft_length(share, cost, num_rows=num_rows, num_expected=num_expected, most=len(token_ids))
            if number:
                return Draft(token_ids[:number], kind, share)
            self._seen[kind].forget()
        return NO_DRAFT

    def observe(self, draft: Draft, num_accepted: int) -> None:
        """Note how much of a draft was right."""
        self._seen[draft.kind].observe(len(draft.token_ids), num_accepted)

    def _sources(self, most: int) -> list[tuple[int, tuple[int, ...]]]:
        """What each source has, the best first."""
        found, length = self._lookup.draft(most)
        return [(0, self._tree(most)), (length, found)]

    def _tree(self, most: int) -> tuple[int, ...]:
        if not self._ahead and self.look_ahead is not None and len(self._lookup) >= self._looks_at:
            self._ahead = self.look_ahead(self.token_ids, _AHEAD)
            self._looks_at = len(self._lookup) + _LOOK_EVERY
        return self._ahead[:most]

    def _catch_up(self) -> None:
        """Take in the tokens that came since the last time."""
        new = self.token_ids[len(self._lookup) :]
        if new:
            is_as_known = self._ahead[: len(new)] == tuple(new)
            self._ahead = self._ahead[len(new) :] if is_as_known else ()
            self._lookup.extend(new)

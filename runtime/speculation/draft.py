"""Guesses of what a reply goes on with, and how sure they are.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

TREE = 0  # the kinds of guesses: what the tree knows; the length of a suffix, from 2 on; and these
FORCED = -1  # what a grammar leaves no choice in
MODEL = -2  # of a draft model


@dataclass(frozen=True)
class Draft:
    """Guesses of the next tokens.

    Attributes:
        kind: where they come from.
        chances: by token, that it and all before it are right.
        num_forced: the first of them, that a grammar gave; the rest is of the kind.
    """

    token_ids: tuple[int, ...]
    kind: int
    chances: tuple[float, ...] = ()
    num_forced: int = 0

    @classmethod
    def of(cls, token_ids: tuple[int, ...], kind: int, share: float) -> Draft:
        """Guesses of which each is right with `share`, where those before it are."""
        return cls(token_ids, kind, tuple(accumulate([share] * len(token_ids), mul)))

    def first(self, number: int) -> Draft:
        """The first so many of them."""
        return Draft(self.token_ids[:number], self.kind, self.chances[:number], min(self.num_forced, number))


NO_DRAFT = Draft((), TREE)

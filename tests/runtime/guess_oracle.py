"""Guesses of which it is known whether they are right: in place of those that an engine makes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from radixlm.runtime.speculation.draft import NO_DRAFT, Draft, StepCost
from radixlm.runtime.speculation.drafter import Drafter

SHARES = {"right": 1.0, "mixed": 0.7, "wrong": 0.0}  # of guesses that are right


class Oracle:
    """Drafts of replies that are known, each guess right with a share; of others, drafts that are wrong."""

    replies: ClassVar[dict[tuple[int, ...], Sequence[int]]] = {}  # by prompt
    chance: ClassVar[random.Random] = random.Random(1)
    right: ClassVar[float] = 0.0
    vocab_size: ClassVar[int] = 40

    def __init__(self, token_ids: Sequence[int], *_: object, **__: object) -> None:
        self._ids = token_ids
        begins = (ids for ids in self.replies if tuple(token_ids[: len(ids)]) == ids)
        self._prompt = max(begins, key=len, default=None)
        self.seen: list[tuple[int, int]] = []

    def propose(self, most: int, cost: StepCost, *, num_rows: int, num_expected: float) -> Draft:
        if self._prompt is None or not most:
            return NO_DRAFT
        known = self._known(self._prompt)
        number = self.chance.randint(0, most)
        guesses = list(known[:number]) + [self._any() for _ in range(number - len(known))]
        for place in range(len(guesses)):
            if self.chance.random() >= self.right:
                guesses[place] = self._any()
        return Draft.of(tuple(guesses), 0, 0.5) if guesses else NO_DRAFT

    def _known(self, prompt: tuple[int, ...]) -> Sequence[int]:
        """What is left of the reply to a prompt."""
        return self.replies[prompt][len(self._ids) - len(prompt) :]

    def observe(self, draft: Draft, num_accepted: int) -> None:
        self.seen.append((len(draft.token_ids), num_accepted))

    def _any(self) -> int:
        return self.chance.randrange(self.vocab_size)


class Unpaid(Drafter):
    """In every step a draft: what the engine would guess, or ids of the sequence at random; nothing has to pay."""

    chance: ClassVar[random.Random] = random.Random(1)

    def propose(self, most: int, cost: StepCost, *, num_rows: int, num_expected: float) -> Draft:
        free = StepCost()
        for rows in (1, 32):
            free.observe(rows, 0.01)
        known = super().propose(most, free, num_rows=1, num_expected=1.0)
        if most <= 0 or (known.token_ids and self.chance.random() < 0.5):
            return known
        number = self.chance.randint(1, min(most, 5))
        return Draft.of(tuple(self.chance.choice(self.token_ids) for _ in range(number)), 1, 0.5)

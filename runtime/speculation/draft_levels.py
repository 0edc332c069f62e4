"""Draft token by token with a model: each guess is a row of the next step, for as many replies and as far as it pays.

Knows rows of numbers, pages and seconds; not where the rows are from, nor how a token is chosen from logits.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..cache import sequence as cached
from ..model.batch import Batch, Float32Array, TopLogits, make_batch
from .draft import MODEL, Draft, StepCost, best_length
from .draft_worth import MAX_DEPTH, DraftWorth, bin_of

_LOGGER = logging.getLogger(__name__)

Choose = Callable[[Float32Array, TopLogits], "tuple[int, float] | None"]
"""The token that is chosen from logits `[1, vocab]` as the reply would, and how likely these find it; then from those
behind it. None: none can be."""


@dataclass
class Ask:
    """A reply that guesses are wanted for.

    Attributes:
        name: of the request, until `DraftSource.end`.
        sequence: of prompt and reply so far, in the cache of the model that they are made for.
        most: guesses that there is room for.
        num_generated, num_left: tokens that the reply has, and that it may still have.
    """

    name: str
    sequence: cached.Sequence
    most: int
    num_generated: int
    num_left: int
    choose: Choose
    guesses: list[int] = field(default_factory=list)
    likely: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """That all guesses so far are right."""
        return self.chances[-1] if self.chances else 1.0


class DraftPart(NamedTuple):
    """See `SequencePart`."""

    start: int
    token_ids: Sequence[int]
    rows: range
    page_ids: array[int]
    state_in: int = 0
    state_out: int = 0

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


class DraftRows(NamedTuple):
    """Room for a sequence's uncomputed tokens from `start` on, and for guesses behind them: one row each."""

    start: int
    token_ids: Sequence[int]
    rows: range
    page_ids: array[int]

    def part(self, guesses: Sequence[int]) -> DraftPart:
        """What the next step computes: the tokens, or the last guess."""
        number = len(self.token_ids)
        if not guesses:
            return DraftPart(self.start, self.token_ids, self.rows[:number], self.page_ids)
        behind = number + len(guesses) - 1
        return DraftPart(self.start + behind, guesses[-1:], self.rows[behind : behind + 1], self.page_ids)


class RunsDrafts(Protocol):
    """What runs the steps."""

    def forward(self, batch: Batch) -> Float32Array:
        """Return logits `[R, vocab_size]`, valid until the next call."""
        ...

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """As `Forward`'s."""
        ...


class DraftSource(ABC):
    """A model that guesses what replies go on with.

    Args:
        name: in messages.
        runs: computes its steps.
        vocab_size: tokens that the replies' model knows.
        clock: seconds; only differences count.

    Attributes:
        worth: when guesses pay.
        num_tokens: that it computed.
    """

    def __init__(self, name: str, runs: RunsDrafts, *, vocab_size: int, clock: Callable[[], float]) -> None:
        self._name, self._runs, self._clock, self._vocab_size = name, runs, clock, vocab_size
        self.worth = DraftWorth()
        self.num_tokens = 0
        self._num_steps = 0
        self._likely_of: dict[str, list[int]] = {}  # of what was guessed last

    @abstractmethod
    def _guess(self, asks: Sequence[Ask], cost: StepCost, num_rows: int, num_expected: float) -> None:
        """Have `_levels` guess for those asks that rows can be had for."""

    @property
    def names(self) -> frozenset[str]:
        """The requests that it follows."""
        return frozenset()

    def guess(self, asks: Sequence[Ask], cost: StepCost, *, num_rows: int, num_expected: float) -> dict[str, Draft]:
        """Drafts by the names of the requests, for a step of `num_rows` without them that takes as `cost` says. Where
        the model fails, it is not used any more: no reply needs it."""
        if not asks:
            return {}
        try:
            self._guess(asks, cost, num_rows, num_expected)
        except Exception:
            _LOGGER.exception("%s failed, and is not used any more", self._name)
            self.worth.turn_off()
            self.start_over()
            return {}
        return self._drafts(asks, cost, num_rows, num_expected)

    def observe(self, name: str, num_checked: int, num_accepted: int) -> None:
        """Note how many of the guesses that were made last for a request, and checked, were right."""
        self.worth.observe(self._likely_of.pop(name, [])[:num_checked], num_accepted)

    def end(self, name: str) -> None:
        """A request gave its pages back, or ended."""
        self._likely_of.pop(name, None)

    def start_over(self) -> None:
        """Forget everything."""
        self._likely_of.clear()

    def _levels(
        self, rows: Sequence[tuple[Ask, DraftRows]], cost: StepCost, num_rows: int, num_expected: float
    ) -> None:
        """Guess for all of these at once, one more token each time, as long as that pays."""
        begun = self._clock()
        active = list(rows)
        for depth in range(MAX_DEPTH):
            active = [(ask, room) for ask, room in active if depth < ask.most and len(ask.guesses) == depth]
            chances = [ask.chance for ask, _ in active]
            made = [chance for ask, _ in rows for chance in ask.chances]
            expected, total = num_expected + sum(made), num_rows + len(made)
            spent_s = self._clock() - begun
            if not active or not self.worth.depth(cost, total, expected, chances, MAX_DEPTH - depth, spent_s):
                break
            self._compute_level(active)

    def _compute_level(self, active: Sequence[tuple[Ask, DraftRows]]) -> None:
        """The next guess of each."""
        parts = [room.part(ask.guesses) for ask, room in active]
        num_tokens = sum(len(part.token_ids) for part in parts)
        begun = self._clock()
        logits = self._runs.forward(make_batch(parts, [1] * len(parts)))[:, : self._vocab_size]
        top = self._runs.top_logits(len(parts), self._vocab_size)
        for row, (ask, _) in enumerate(active):
            chosen = ask.choose(logits[row : row + 1], top.one(row))
            if chosen is not None:
                likely = bin_of(chosen[1])
                ask.chances.append(ask.chance * self.worth.share_of(likely))
                ask.guesses.append(chosen[0])
                ask.likely.append(likely)
        self.num_tokens += num_tokens
        self._num_steps += 1
        if self._num_steps > 2:  # the first ones map weights in
            self.worth.cost.observe(num_tokens, self._clock() - begun)

    def _drafts(self, asks: Sequence[Ask], cost: StepCost, num_rows: int, num_expected: float) -> dict[str, Draft]:
        """Of all guesses, those that pay to be checked."""
        chances = sorted((chance for ask in asks for chance in ask.chances), reverse=True)
        number, _ = best_length(chances, cost, num_rows=num_rows, num_expected=num_expected)
        least = chances[number - 1] if number else 2.0
        drafts: dict[str, Draft] = {}
        for ask in asks:
            length = sum(chance >= least for chance in ask.chances)
            if length:
                drafts[ask.name] = Draft(tuple(ask.guesses[:length]), MODEL, tuple(ask.chances[:length]))
                self._likely_of[ask.name] = ask.likely[:length]
        return drafts

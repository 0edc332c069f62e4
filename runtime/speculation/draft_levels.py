"""Draft token by token with a model: each draft token is a row of the next step, as long as drafting is worthwhile.

Drafts for several replies at once. Knows rows of logits, pages and seconds; not the source of rows, nor how a token is
chosen from logits.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..cache import sequence as cached
from ..model.batch import NEVER_DRAFTED, Batch, Float32Array, TopLogits, make_batch
from .draft import MODEL, Draft, StepCost, best_length
from .draft_worth import MAX_DEPTH, DraftWorth, bin_of

_LOGGER = logging.getLogger(__name__)

Choose = Callable[[Float32Array, TopLogits], "tuple[int, float] | None"]
"""Choose a token from logits `[1, vocab]` like the reply's sampler, and return it with its probability. The next call
gets the logits after that token. None if no token can be chosen."""


@dataclass
class DraftRequest:
    """A request for draft tokens of one reply.

    Attributes:
        name: of the request, until `DraftSource.end`.
        sequence: prompt and reply so far, in the cache of the model that generates the reply.
        most: number of draft tokens that there is room for.
        num_generated, num_left: tokens that the reply has, and the most that can still come.
        draft_ids, likely: the draft tokens so far, and the bin of each.
        chances: for each of them, the probability that it and all before it are accepted.
    """

    name: str
    sequence: cached.Sequence
    most: int
    num_generated: int
    num_left: int
    choose: Choose
    draft_ids: list[int] = field(default_factory=list)
    likely: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """Probability that all draft tokens so far are accepted."""
        return self.chances[-1] if self.chances else 1.0


class DraftPart(NamedTuple):
    """One sequence's part of a batch; see `SequencePart`."""

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
    """Room for a sequence's uncomputed tokens from `start` on, and for draft tokens after them: one row each."""

    start: int
    token_ids: Sequence[int]
    rows: range
    page_ids: array[int]

    def part(self, draft_ids: Sequence[int]) -> DraftPart:
        """Return a sequence's input of the next step: its uncomputed tokens, or after these its last draft token."""
        number = len(self.token_ids)
        if not draft_ids:
            return DraftPart(self.start, self.token_ids, self.rows[:number], self.page_ids)
        behind = number + len(draft_ids) - 1
        return DraftPart(self.start + behind, draft_ids[-1:], self.rows[behind : behind + 1], self.page_ids)


class DraftRunner(Protocol):
    """Computes the steps of a draft source."""

    def forward(self, batch: Batch) -> Float32Array:
        """Return logits `[R, vocab_size]`, valid until the next call."""
        ...

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """Return the largest logits, as `Forward.top_logits` does."""
        ...


class DraftSource(ABC):
    """A model that drafts tokens for replies.

    Args:
        name: for messages.
        runs: computes its steps.
        vocab_size: number of tokens that the replies' model knows.
        clock: seconds; only differences count.

    Attributes:
        worth: decides when drafting is worthwhile.
        num_tokens: number of tokens that it computed.
    """

    def __init__(self, name: str, runs: DraftRunner, *, vocab_size: int, clock: Callable[[], float]) -> None:
        self._name, self._runs, self._clock, self._vocab_size = name, runs, clock, vocab_size
        self.worth = DraftWorth()
        self.num_tokens = 0
        self._num_steps = 0
        self._likely_of: dict[str, list[int]] = {}  # bins of the last draft's tokens, by request

    @abstractmethod
    def _draft_tokens(
        self, requests: Sequence[DraftRequest], cost: StepCost, num_rows: int, num_expected: float
    ) -> None:
        """Reserve rows for the requests, and append draft tokens to those that got some, by `_draft_together`."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the requests that it follows."""
        return frozenset()

    def draft_tokens(
        self, requests: Sequence[DraftRequest], cost: StepCost, *, num_rows: int, num_expected: float
    ) -> dict[str, Draft]:
        """Return drafts by name of request, for a step of `num_rows` rows that costs `cost` without them.

        If the model fails, it is turned off: no reply depends on it.
        """
        if not requests:
            return {}
        try:
            self._draft_tokens(requests, cost, num_rows, num_expected)
        except Exception:
            _LOGGER.exception("%s failed, and is not used any more", self._name)
            self.worth.turn_off()
            self.start_over()
            return {}
        return self._select_drafts(requests, cost, num_rows, num_expected)

    def observe(self, name: str, num_checked: int, num_accepted: int) -> None:
        """Record how many of a request's last draft tokens, as far as they were verified, were accepted."""
        self.worth.observe(self._likely_of.pop(name, [])[:num_checked], num_accepted)

    def end(self, name: str) -> None:
        """Forget a request that released its pages or ended."""
        self._likely_of.pop(name, None)

    def start_over(self) -> None:
        """Forget everything."""
        self._likely_of.clear()

    def _draft_together(
        self, rows: Sequence[tuple[DraftRequest, DraftRows]], cost: StepCost, num_rows: int, num_expected: float
    ) -> None:
        """Draft for all requests at once, token by token, as long as that pays; each request collects its draft tokens.

        Args:
            rows: the requests, each with the rows where its tokens are computed.
            cost: of the steps that verify drafts. The next one has `num_rows` rows without drafts.
            num_expected: number of tokens that this step yields without drafts.
        """
        begun = self._clock()
        active = list(rows)
        for depth in range(MAX_DEPTH):
            active = [
                (request, room) for request, room in active if depth < request.most and len(request.draft_ids) == depth
            ]
            chances = [request.chance for request, _ in active]
            made = [chance for request, _ in rows for chance in request.chances]
            expected, total = num_expected + sum(made), num_rows + len(made)
            spent_s = self._clock() - begun
            if not active or not self.worth.depth(cost, total, expected, chances, MAX_DEPTH - depth, spent_s):
                break
            self._draft_next(active)

    def _draft_next(self, active: Sequence[tuple[DraftRequest, DraftRows]]) -> None:
        """Compute one step, and append to each request its next draft token, with its chance of acceptance."""
        parts = [room.part(request.draft_ids) for request, room in active]
        num_tokens = sum(len(part.token_ids) for part in parts)
        begun = self._clock()
        logits = self._runs.forward(make_batch(parts, [1] * len(parts)))[:, : self._vocab_size]
        top = self._runs.top_logits(len(parts), self._vocab_size)
        for row, (request, _) in enumerate(active):
            chosen = request.choose(logits[row : row + 1], top.one(row))
            if chosen is not None and logits[row, chosen[0]] > NEVER_DRAFTED / 2:
                likely = bin_of(chosen[1])
                request.chances.append(request.chance * self.worth.share_of(likely))
                request.draft_ids.append(chosen[0])
                request.likely.append(likely)
        self.num_tokens += num_tokens
        self._num_steps += 1
        if self._num_steps > 2:  # the first steps load weights into memory
            self.worth.cost.observe(num_tokens, self._clock() - begun)

    def _select_drafts(
        self, requests: Sequence[DraftRequest], cost: StepCost, num_rows: int, num_expected: float
    ) -> dict[str, Draft]:
        """Return by request the draft tokens that are worth verifying, the first ones of each that was drafted."""
        chances = sorted((chance for request in requests for chance in request.chances), reverse=True)
        number, _ = best_length(chances, cost, num_rows=num_rows, num_expected=num_expected)
        least = chances[number - 1] if number else 2.0
        drafts: dict[str, Draft] = {}
        for request in requests:
            length = sum(chance >= least for chance in request.chances)
            if length:
                drafts[request.name] = Draft(tuple(request.draft_ids[:length]), MODEL, tuple(request.chances[:length]))
                self._likely_of[request.name] = request.likely[:length]
        return drafts

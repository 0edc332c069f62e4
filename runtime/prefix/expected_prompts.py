"""Compute, while nothing else is to be done, the beginnings that the next prompts will have.

A chat template renders a reply as history otherwise than it was generated: without its thought, for one. What the next
prompt begins with is known when the reply ends, and is computed then, exactly, so that the next turn finds it. Its ids
are made in a thread of their own: to render and encode a long conversation takes half a second, in which no request
that comes could be answered. Knows the model, pages and ids, not requests or texts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixlm.tokenizer_fix import SpelledPrompt

from ..artifact.manifest import PAGE_SIZE
from ..cache.page_pool import num_pages_for
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import PrefixMatch
from ..errors import InvalidRequest
from ..memory import Forgotten, Memory
from ..model.batch import Forward, make_batch
from ..states.state_pool import SPARE_SLOTS
from .rates import LinearRate

_LOGGER = logging.getLogger(__name__)

MAX_EXPECTED = 64  # prompts: the oldest are forgotten first
PIECE_S = 0.05  # so long does a request that comes meanwhile wait, about
_FIRST_TOKENS = PAGE_SIZE  # of a piece, before any was measured

Hand = Callable[[Callable[[], None]], object]
"""Has something done somewhere else: in another thread, or between two steps."""


@dataclass(frozen=True)
class ExpectedPrompt:
    """A prompt that may come.

    Attributes:
        namespace: whose it is.
        ids: makes the token ids that it begins with, in any thread; none, or an InvalidRequest: nothing can be said of
            it.
        spell: what ids spell, where it may be matched by text; None: by ids alone.
    """

    namespace: bytes
    ids: Callable[[], Sequence[int]]
    spell: Callable[[Sequence[int]], SpelledPrompt] | None = None


class ExpectedPrompts(Memory):
    """Computes what is expected, the newest first, on pages that are free: nothing is evicted for it.

    Nothing of it goes to disk before a request has used it: no token was sampled yet, by which wrong numbers show.

    Args:
        context_length: tokens that a prompt may have.
        max_num_tokens: of one piece.
        clock: seconds; only differences count.
        aside: runs what makes ids, where it delays no step.
        post: runs what comes of that between two steps.

    Attributes:
        num_tokens: that were computed so far.
    """

    def __init__(
        self,
        forward: Forward,
        cache: PrefixCache,
        *,
        context_length: int,
        max_num_tokens: int,
        clock: Callable[[], float],
        aside: Hand,
        post: Hand,
    ) -> None:
        self.num_tokens = 0
        self._aside, self._post = aside, post
        self._forward, self._cache, self._clock = forward, cache, clock
        self._context_length, self._max_num_tokens = context_length, max_num_tokens
        self._rate = LinearRate()
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_EXPECTED)
        self._begun: _Waiting | None = None

    @property
    def has_work(self) -> bool:
        """Whether `run` has anything to do."""
        return bool(self._waiting) if self._begun is None else self._begun.ids is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing is expected any more that was not computed or dropped."""
        return self._begun is None and not self._waiting

    def add(self, expected: ExpectedPrompt) -> None:
        """Expect a prompt."""
        self._waiting.append(_Waiting(expected, self._clock()))

    def forget(self, namespace: bytes) -> Forgotten:
        """Expect nothing of a namespace any more."""
        self._keep(lambda waiting: waiting.expected.namespace != namespace)
        return Forgotten()

    def start_over(self) -> None:
        """Expect nothing any more."""
        self._keep(lambda waiting: False)

    def drop_unused(self, since: float) -> None:
        """Forget what is expected since longer, on the clock: there was never time for it."""
        self._keep(lambda waiting: waiting.since >= since)

    def run(self) -> None:
        """Do a piece: have ids made, or compute some tokens. What raises is dropped."""
        if (begun := self._begun) is None:
            begun = self._begun = self._waiting.pop()
            self._aside(lambda: self._ask(begun))
            return
        self._begun = None
        if begun.ids is not None and self._computes(begun.expected, begun.ids, begun.least):
            begun.least = 2  # a match never has the last token
            self._begun = begun

    def _keep(self, is_kept: Callable[[_Waiting], bool]) -> None:
        self._waiting = deque(filter(is_kept, self._waiting), maxlen=MAX_EXPECTED)
        if self._begun is not None and not is_kept(self._begun):
            self._begun = None

    def _ask(self, begun: _Waiting) -> None:
        """Find out what it begins with, in any thread."""
        ids = tuple[int, ...]()
        try:
            ids = tuple(begun.expected.ids())
        except InvalidRequest:
            pass  # the template does not let the user speak next, for one
        except Exception:  # it is computed when it comes
            _LOGGER.exception("finding out what the next prompt begins with failed")
        self._post(lambda: self._answer(begun, ids))

    def _answer(self, begun: _Waiting, ids: tuple[int, ...]) -> None:
        if self._begun is begun:  # else it was forgotten meanwhile
            begun.ids = ids
            self._begun = begun if 1 < len(ids) < self._context_length else None

    def _computes(self, expected: ExpectedPrompt, ids: tuple[int, ...], least: int) -> bool:
        """Compute a piece, if `least` tokens are missing; whether there is more."""
        spell = expected.spell
        match = self._cache.match(
            ids, namespace=expected.namespace, spelled=None if spell is None else lambda: spell(ids)
        )
        num_missing = len(match.prompt_ids) - match.num_tokens
        if num_missing < least or len(match.prompt_ids) >= self._context_length:
            return False
        stop = match.num_tokens + min(num_missing, self._num_tokens_at(match.num_tokens))
        if stop < len(match.prompt_ids):
            stop -= stop % PAGE_SIZE
        num_needed = num_pages_for(stop) - match.num_tokens // PAGE_SIZE
        states = self._cache.states
        if num_needed > self._cache.pool.num_free or (states is not None and states.num_free < SPARE_SLOTS):
            return False
        self._compute(match, stop)
        return stop < len(match.prompt_ids)

    def _compute(self, match: PrefixMatch, stop: int) -> None:
        num_tokens, begun = stop - match.num_tokens, self._clock()
        sequence = self._cache.open(match, context_length=self._context_length)
        is_computed = False
        try:
            with self._cache.begin() as step:
                reservation = step.reserve(sequence, num_tokens)
                if step.copies:
                    self._forward.copy_rows(step.copies)
                self._forward.forward(make_batch([reservation], [False]))
                step.commit()
            is_computed = True
        finally:
            self._cache.close(sequence, keep=is_computed)
        self.num_tokens += num_tokens
        seconds = self._clock() - begun
        if seconds > 0.0:
            self._rate.observe((match.num_tokens + stop) / 2, seconds / num_tokens, float(num_tokens))

    def _num_tokens_at(self, position: int) -> int:
        """Tokens of the next piece, so that it takes `PIECE_S`; at least a page, from which the next can go on."""
        each_s = self._rate.seconds(float(position))
        wanted = int(PIECE_S / each_s) if each_s else _FIRST_TOKENS
        return min(max(wanted, PAGE_SIZE), max(self._max_num_tokens, PAGE_SIZE))


@dataclass(eq=False)
class _Waiting:
    expected: ExpectedPrompt
    since: float  # seconds on the clock
    ids: tuple[int, ...] | None = None  # None: they were not made yet
    # missing tokens: less than a page is not worth a step, as all prompts go on behind the reply with a few
    least: int = PAGE_SIZE + 1

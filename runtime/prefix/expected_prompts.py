"""Prefill the expected beginning of the next prompts while the engine is idle.

A chat template renders a reply in the history differently from how it was generated, for instance without its
reasoning. The beginning of the next prompt is known when the reply ends. It is computed then, exactly, so that the next
turn finds it. Its ids are made in a separate thread. Rendering and encoding a long conversation takes half a second,
during which no new request could be answered. Knows the model, pages and ids, not requests or texts.
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
from ..memory import ForgetResult, Memory
from ..model.batch import NO_ADAPTER, Forward, make_batch
from ..states.state_pool import SPARE_SLOTS
from .rates import LinearRate

_LOGGER = logging.getLogger(__name__)

MAX_EXPECTED = 64  # prompts; the oldest are forgotten first
PIECE_S = 0.05  # about the longest that a new request waits
_FIRST_TOKENS = PAGE_SIZE  # tokens of a piece before any was measured

RunElsewhere = Callable[[Callable[[], None]], object]
"""Run a closure somewhere else: in another thread, or between two steps."""


@dataclass(frozen=True)
class ExpectedPrompt:
    """A prompt that is likely to come.

    Attributes:
        namespace: the namespace of its conversation.
        ids: makes the token ids that it begins with, in any thread; none, or an InvalidRequest, if they are unknown.
        spell: returns the text of ids, so that the prompt is matched by text; None: by ids alone.
        adapter_index: the place of its LoRA adapter, which the namespace is of, too.
    """

    namespace: bytes
    ids: Callable[[], Sequence[int]]
    spell: Callable[[Sequence[int]], SpelledPrompt] | None = None
    adapter_index: int = NO_ADAPTER


class ExpectedPrompts(Memory):
    """Computes expected prompts, the newest first, on free pages only: nothing is evicted for them.

    Nothing of them goes to disk before a request has used it. No token was sampled from them yet, which is what detects
    wrong numbers.

    Args:
        context_length: the most tokens of a prompt.
        max_num_tokens: the most tokens of one piece.
        clock: seconds; only differences count.
        aside: runs the making of ids where it delays no step.
        post: runs a closure between two steps.

    Attributes:
        num_tokens: computed so far.
    """

    def __init__(
        self,
        forward: Forward,
        cache: PrefixCache,
        *,
        context_length: int,
        max_num_tokens: int,
        clock: Callable[[], float],
        aside: RunElsewhere,
        post: RunElsewhere,
    ) -> None:
        self.num_tokens = 0
        self._aside, self._post = aside, post
        self._forward, self._cache, self._clock = forward, cache, clock
        self._context_length, self._max_num_tokens = context_length, max_num_tokens
        self._rate = LinearRate()
        self._waiting: deque[_QueuedPrompt] = deque(maxlen=MAX_EXPECTED)
        self._begun: _QueuedPrompt | None = None

    @property
    def has_work(self) -> bool:
        """Return whether `run` has anything to do."""
        return bool(self._waiting) if self._begun is None else self._begun.ids is not None

    @property
    def is_done(self) -> bool:
        """Return whether every expected prompt was computed or dropped."""
        return self._begun is None and not self._waiting

    def add(self, expected: ExpectedPrompt) -> None:
        """Expect a prompt."""
        self._waiting.append(_QueuedPrompt(expected, self._clock()))

    def forget(self, namespace: bytes) -> ForgetResult:
        """Drop the expected prompts of a namespace."""
        self._keep(lambda waiting: waiting.expected.namespace != namespace)
        return ForgetResult()

    def start_over(self) -> None:
        """Drop all expected prompts."""
        self._keep(lambda waiting: False)

    def drop_unused(self, since: float) -> None:
        """Drop prompts that were added before `since`, on the clock."""
        self._keep(lambda waiting: waiting.since >= since)

    def run(self) -> None:
        """Do one piece of work: have ids made, or compute some tokens. A prompt that raises is dropped."""
        if (begun := self._begun) is None:
            begun = self._begun = self._waiting.pop()
            self._aside(lambda: self._make_ids(begun))
            return
        self._begun = None
        if begun.ids is not None and self._computes(begun.expected, begun.ids, begun.least):
            begun.least = 2  # a match never includes the last token
            self._begun = begun

    def _keep(self, is_kept: Callable[[_QueuedPrompt], bool]) -> None:
        self._waiting = deque(filter(is_kept, self._waiting), maxlen=MAX_EXPECTED)
        if self._begun is not None and not is_kept(self._begun):
            self._begun = None

    def _make_ids(self, begun: _QueuedPrompt) -> None:
        """Tokenize an expected prompt, in any thread, and post its ids to the engine's thread: none if that fails."""
        ids = tuple[int, ...]()
        try:
            ids = tuple(begun.expected.ids())
        except InvalidRequest:
            pass  # for instance, the template does not allow a user message next
        except Exception:  # the prompt is computed when it comes
            _LOGGER.exception("finding out what the next prompt begins with failed")
        self._post(lambda: self._take_ids(begun, ids))

    def _take_ids(self, begun: _QueuedPrompt, ids: tuple[int, ...]) -> None:
        if self._begun is begun:  # else it was forgotten in the meantime
            begun.ids = ids
            self._begun = begun if 1 < len(ids) < self._context_length else None

    def _computes(self, expected: ExpectedPrompt, ids: tuple[int, ...], least: int) -> bool:
        """Compute a piece, if at least `least` tokens are missing; return whether more are missing."""
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
        self._compute(match, stop, expected.adapter_index)
        return stop < len(match.prompt_ids)

    def _compute(self, match: PrefixMatch, stop: int, adapter_index: int) -> None:
        """Prefill the tokens of an expected prompt from the match's end to `stop`, and keep their KV in the tree.

        Nothing is kept if that fails. Measures the seconds of a token.
        """
        num_tokens, begun = stop - match.num_tokens, self._clock()
        sequence = self._cache.open(match, context_length=self._context_length)
        is_computed = False
        try:
            with self._cache.begin() as transaction:
                reservation = transaction.reserve(sequence, num_tokens)
                if transaction.copies:
                    self._forward.copy_rows(transaction.copies)
                self._forward.forward(make_batch([reservation], [False], [adapter_index]))
                transaction.commit()
            is_computed = True
        finally:
            self._cache.close(sequence, keep=is_computed)
        self.num_tokens += num_tokens
        seconds = self._clock() - begun
        if seconds > 0.0:
            self._rate.observe((match.num_tokens + stop) / 2, seconds / num_tokens, float(num_tokens))

    def _num_tokens_at(self, position: int) -> int:
        """Return the tokens of the next piece, so that it takes `PIECE_S`; at least a page."""
        each_s = self._rate.seconds(float(position))
        wanted = int(PIECE_S / each_s) if each_s else _FIRST_TOKENS
        return min(max(wanted, PAGE_SIZE), max(self._max_num_tokens, PAGE_SIZE))


@dataclass(eq=False)
class _QueuedPrompt:
    expected: ExpectedPrompt
    since: float  # seconds on the clock
    ids: tuple[int, ...] | None = None  # None: not made yet
    # missing tokens: less than a page is not worth a step, because all prompts have a few tokens after the reply
    least: int = PAGE_SIZE + 1

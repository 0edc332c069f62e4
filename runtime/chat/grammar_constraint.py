"""Constrain a reply to a grammar, token by token.

The work for a mask is limited in steps, not in seconds: a grammar that is too much work fails on the same token on
every machine, however busy. A grammar can end a reply by the text after it: see `grammar.OVER`. Knows the library's
matcher, not where its grammar comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from ..errors import ConstraintFailed
from ..model.batch import Int32Array
from .grammar import OVER


@dataclass
class MatcherWork:
    """The work that replies of one grammar caused in its matcher, as states of its lexer, which are never dropped.

    Attributes:
        num_masks: number of masks computed, each of which may have added states.
        on_failed: called when a reply becomes too much work.
    """

    num_masks: int = 0
    on_failed: Callable[[], None] = lambda: None


class GrammarConstraint:
    """The constraint of one reply; see `TokenConstraint`.

    Args:
        matcher: this reply's own matcher, at its beginning.
        vocab_size: vocabulary of the tokenizer that the matcher was made for.
        work: the work of all matchers that share states with this one.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, work: MatcherWork | None = None) -> None:
        self._matcher = matcher
        self._begun = matcher.deep_copy()
        self._token_ids: list[int] = []
        self._is_over = False
        self._work = MatcherWork() if work is None else work
        self._mask: Int32Array = np.zeros(-(-vocab_size // 32), np.int32)
        self._is_filled = False

    @property
    def is_finished(self) -> bool:
        """Return whether nothing can follow, or only text that is no part of the reply."""
        return self._is_over or self._matcher.is_stopped()

    def mask(self) -> Int32Array:
        """Return the mask of tokens that may come next, `[ceil(vocab / 32)]`.

        Raises:
            ConstraintFailed: the mask is too much work, or no token may come.
        """
        if not self._is_filled:
            self._work.num_masks += 1
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():
                raise self._failure()
            if not self._mask.any():
                raise ConstraintFailed("the grammar allows no token here that the model has; change it")
            self._is_filled = True
        return self._mask

    def accept(self, token_id: int) -> None:
        """Advance by a token.

        Raises:
            ConstraintFailed: it is not allowed here.
        """
        self._is_filled = False
        if not self._matcher.consume_token(token_id):
            raise self._failure()
        self._token_ids.append(token_id)
        self._is_over = self._is_over or self._matcher.get_capture(OVER) is not None

    def state(self) -> int:
        """Return the number of accepted tokens, which `restore` goes back to."""
        return len(self._token_ids)

    def restore(self, state: int) -> None:
        """Rewind to a state that `state` returned: drop the tokens accepted after it.

        Raises:
            ConstraintFailed: the library cannot rewind.
        """
        self._is_filled = False
        if self._is_over:  # the library would remember the match of `OVER`
            self._matcher, self._is_over = self._begun.deep_copy(), False
            is_back = not state or self._matcher.consume_tokens(self._token_ids[:state])
        else:
            is_back = self._matcher.rollback(len(self._token_ids) - state)
        if not is_back:
            raise self._failure()
        del self._token_ids[state:]

    def forced(self) -> tuple[int, ...]:
        """Return the tokens of the only text that may come next; see `Foresight`. Empty if it is too much work."""
        ahead = self._matcher.deep_copy()  # 4 us; an error there harms no reply
        token_ids = ahead.compute_ff_tokens()
        return () if ahead.is_error() else tuple(token_ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, the grammar allows one after the other."""
        ahead = self._matcher.deep_copy()
        number = ahead.validate_tokens(list(token_ids))
        return 0 if ahead.is_error() else number

    def fork(self) -> GrammarConstraint:
        """Return an independent copy at this state."""
        forked = GrammarConstraint(self._matcher.deep_copy(), 32 * len(self._mask), self._work)
        forked._is_over = self._is_over
        return forked

    def _failure(self) -> ConstraintFailed:
        """Count a failed grammar, and return the error with the library's reason."""
        self._work.on_failed()
        reason = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
        return ConstraintFailed(f"the reply cannot follow its grammar any further: {reason[:300]}; simplify it")

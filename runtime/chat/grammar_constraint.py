"""A reply that follows a grammar, token by token.

The work for a mask is limited in steps, not in seconds: a grammar that is too much work fails on the same token on
every machine, however busy. Knows the library's matcher, not where its grammar comes from.
"""

from __future__ import annotations

import llguidance
import numpy as np

from ..errors import ConstraintFailed
from ..model.batch import Int32Array


class GrammarConstraint:
    """The state of one reply, as `TokenConstraint` describes it.

    Args:
        matcher: a matcher of this reply's own, at its beginning.
        vocab_size: that of the tokenizer which the matcher was made for.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask: Int32Array = np.zeros(-(-vocab_size // 32), np.int32)
        self._is_filled = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def mask(self) -> Int32Array:
        """Which tokens may come next, `[ceil(vocab / 32)]`.

        Raises:
            ConstraintFailed: finding out is too much work, or no token may come.
        """
        if not self._is_filled:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():
                raise self._failure()
            if not self._mask.any():
                raise ConstraintFailed("the grammar allows no token here that the model has; change it")
            self._is_filled = True
        return self._mask

    def accept(self, token_id: int) -> None:
        """Go on by a token.

        Raises:
            ConstraintFailed: it may not come here.
        """
        self._is_filled = False
        if not self._matcher.consume_token(token_id):
            raise self._failure()

    def _failure(self) -> ConstraintFailed:
        reason = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
        return ConstraintFailed(f"the reply cannot follow its grammar any further: {reason[:300]}; simplify it")

"""The protocol between grammars and the sampler: constraints that a reply must follow, token by token.

Knows token ids and bits, not grammars; `grammar_constraint.py` implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..errors import InvalidParameter
from ..model.batch import Int32Array
from .scan import Rewindable

BoolArray = npt.NDArray[np.bool_]


class TokenConstraint(Protocol):
    """The constraint of one reply. Its state depends on the accepted tokens of the reply and on nothing else.

    A preempted request keeps it. Tokens that were sampled and not accepted never reach it.
    """

    def mask(self) -> Int32Array | None:
        """Return the tokens that may come next, as bits `[ceil(vocab / 32)]`, lowest bit first; None: all of them.

        The array belongs to the constraint, and is valid until `accept`.

        Raises:
            ConstraintFailed: the constraint cannot decide, or no token may come.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a token of the reply.

        Raises:
            ConstraintFailed: this token is not allowed here.
        """
        ...

    @property
    def is_finished(self) -> bool:
        """Return whether the reply is complete and can only end."""
        ...


@runtime_checkable
class Foresight(Protocol):
    """A constraint that can look beyond the next token; its state does not change."""

    def forced(self) -> tuple[int, ...]:
        """Return the tokens of the only text that may come next, as the tokenizer splits it; empty if there are more.

        Other tokens that spell it may be allowed, too.
        """
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, are allowed to come one after the other."""
        ...

    def fork(self) -> TokenConstraint:
        """Return an independent copy at this state."""
        ...


def state_of(constraint: TokenConstraint | None) -> Any:
    """Return the state of a constraint, for `restore`; None if there is none.

    Raises:
        InvalidParameter: it cannot be rewound.
    """
    if constraint is None:
        return None
    if not isinstance(constraint, Rewindable):
        raise InvalidParameter(
            f"banned_strings take tokens back, and {type(constraint).__name__} cannot: it has no state() and restore()",
            param="banned_strings",
        )
    return constraint.state()


def restore(constraint: TokenConstraint | None, state: Any) -> None:
    """Rewind a constraint to a state from `state_of`."""
    if constraint is not None:
        assert isinstance(constraint, Rewindable)
        constraint.restore(state)


class ConstraintSource(Protocol):
    """A factory of constraints, one for each reply."""

    def start(self) -> TokenConstraint:
        """Return a constraint at the beginning of a reply."""
        ...


class MinTokens:
    """Forbids `stop_ids` in the first `min_tokens` tokens of a reply; another constraint may limit it, too.

    The reply can end earlier if that constraint is complete, or allows nothing but a stop.
    """

    def __init__(
        self, min_tokens: int, stop_ids: frozenset[int], vocab_size: int, inner: TokenConstraint | None = None
    ) -> None:
        self._num_left = min_tokens
        self._inner = inner
        is_open = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        is_open[:vocab_size] = True
        is_open[[token_id for token_id in stop_ids if token_id < vocab_size]] = False
        self._open: Int32Array = np.packbits(is_open, bitorder="little").view(np.int32)

    @property
    def is_finished(self) -> bool:
        """Return whether the reply is complete by the other constraint."""
        return self._inner is not None and self._inner.is_finished

    def mask(self) -> Int32Array | None:
        """Return the mask of tokens that may come next; see `TokenConstraint`."""
        inner = None if self._inner is None else self._inner.mask()
        if self._num_left == 0:
            return inner
        allowed = self._open if inner is None else inner & self._open
        return allowed if allowed.any() else inner

    def accept(self, token_id: int) -> None:
        """Advance by a token of the reply; see `TokenConstraint`."""
        if self._inner is not None:
            self._inner.accept(token_id)
        self._num_left = max(0, self._num_left - 1)

    def state(self) -> Any:
        """Return the number of tokens left before the reply may end, and the other constraint's state."""
        return self._num_left, state_of(self._inner)

    def restore(self, state: Any) -> None:
        """Rewind to a state that `state` returned, the other constraint included."""
        self._num_left, inner = state
        restore(self._inner, inner)

    def forced(self) -> tuple[int, ...]:
        """Return what the other constraint returns; see `Foresight`."""
        return self._inner.forced() if isinstance(self._inner, Foresight) else ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return what the other constraint returns, even if a token must not end the reply; see `Foresight`."""
        return self._inner.num_allowed(token_ids) if isinstance(self._inner, Foresight) else len(token_ids)

    def fork(self) -> MinTokens:
        """Return an independent copy; without the other constraint if that cannot be forked."""
        forked = copy(self)
        forked._inner = self._inner.fork() if isinstance(self._inner, Foresight) else None
        return forked


def mask_of(is_allowed: BoolArray) -> Int32Array:
    """Return the mask that allows these tokens; `allowed_of` is its inverse.

    >>> mask_of(np.array([True, False, True, False])).tolist()
    [5]
    """
    bits = np.packbits(is_allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def allowed_of(mask: Int32Array, vocab_size: int) -> BoolArray:
    """Return which of the first `vocab_size` tokens a mask allows, `[vocab_size]`; those beyond the mask are not.

    >>> allowed_of(np.array([5], np.int32), 4).tolist()
    [True, False, True, False]
    """
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=min(vocab_size, 32 * len(mask)))
    if len(bits) < vocab_size:
        bits = np.pad(bits, (0, vocab_size - len(bits)))
    return bits.view(np.bool_)

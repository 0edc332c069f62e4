"""What a reply must follow, token by token: the protocol between grammars and the sampler.

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
    """The state of one reply. It depends on the accepted tokens of the reply and on nothing else.

    A preempted request keeps it. Tokens that were sampled and not accepted never reach it.
    """

    def mask(self) -> Int32Array | None:
        """Which tokens may come next, as bits `[ceil(vocab / 32)]`, lowest bit first; None: all of them.

        The array is the constraint's own, valid until `accept`.

        Raises:
            ConstraintFailed: it cannot tell, or no token may come.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token of the reply.

        Raises:
            ConstraintFailed: this token may not come here.
        """
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the reply is complete and can only end."""
        ...


@runtime_checkable
class Foresight(Protocol):
    """What some constraints can say of the tokens behind the next one; they stay where they are."""

    def forced(self) -> tuple[int, ...]:
        """Tokens of the only text that may come next, as the tokenizer cuts it; none where there is a choice. Others
        that spell it may be allowed, too.
        """
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these may come, one after the other."""
        ...

    def fork(self) -> TokenConstraint:
        """A constraint that goes on from here by itself."""
        ...


def state_of(constraint: TokenConstraint | None) -> Any:
    """Where a constraint is, for `restore`; None where there is none.

    Raises:
        InvalidParameter: it cannot go back.
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
    """Have a constraint go on from where `state_of` was asked."""
    if constraint is not None:
        assert isinstance(constraint, Rewindable)
        constraint.restore(state)


class ConstraintSource(Protocol):
    """What replies must follow, each by a constraint of its own."""

    def start(self) -> TokenConstraint:
        """A constraint at the beginning of a reply."""
        ...


class MinTokens:
    """Keeps `stop_ids` out of the first `min_tokens` tokens of a reply, which another constraint may limit, too.

    The reply may end earlier where that constraint is complete, or allows nothing but a stop.
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
        """Whether the reply is complete by the other constraint."""
        return self._inner is not None and self._inner.is_finished

    def mask(self) -> Int32Array | None:
        """Which tokens may come next; see `TokenConstraint`."""
        inner = None if self._inner is None else self._inner.mask()
        if self._num_left == 0:
            return inner
        allowed = self._open if inner is None else inner & self._open
        return allowed if allowed.any() else inner

    def accept(self, token_id: int) -> None:
        """Go on by a token of the reply; see `TokenConstraint`."""
        if self._inner is not None:
            self._inner.accept(token_id)
        self._num_left = max(0, self._num_left - 1)

    def state(self) -> Any:
        """See `Rewindable`."""
        return self._num_left, state_of(self._inner)

    def restore(self, state: Any) -> None:
        """See `Rewindable`."""
        self._num_left, inner = state
        restore(self._inner, inner)

    def forced(self) -> tuple[int, ...]:
        """As the other constraint says; see `Foresight`."""
        return self._inner.forced() if isinstance(self._inner, Foresight) else ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """As the other constraint says, whatever may not end the reply; see `Foresight`."""
        return self._inner.num_allowed(token_ids) if isinstance(self._inner, Foresight) else len(token_ids)

    def fork(self) -> MinTokens:
        """One that goes on by itself; without the other constraint where that cannot."""
        forked = copy(self)
        forked._inner = self._inner.fork() if isinstance(self._inner, Foresight) else None
        return forked


def mask_of(is_allowed: BoolArray) -> Int32Array:
    """The mask that allows these tokens; `allowed_of` gives them back.

    >>> mask_of(np.array([True, False, True, False])).tolist()
    [5]
    """
    bits = np.packbits(is_allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def allowed_of(mask: Int32Array, vocab_size: int) -> BoolArray:
    """Which of the first `vocab_size` tokens a mask allows, `[vocab_size]`; those beyond the mask are not.

    >>> allowed_of(np.array([5], np.int32), 4).tolist()
    [True, False, True, False]
    """
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=min(vocab_size, 32 * len(mask)))
    if len(bits) < vocab_size:
        bits = np.pad(bits, (0, vocab_size - len(bits)))
    return bits.view(np.bool_)

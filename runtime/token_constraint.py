"""What a reply must keep to, token by token: the protocol between whoever knows a language and the sampler.

Knows token ids and bits, not grammars: `grammar_constraint.py` is the real one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from .batch import Int32Array

BoolArray = npt.NDArray[np.bool_]


class TokenConstraint(Protocol):
    """The state of one reply. It follows the reply's accepted tokens and nothing else: a preempted request keeps it,
    and what was sampled but not accepted never reaches it.
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


class ConstraintSource(Protocol):
    """What replies are to keep to; each of them follows a constraint of its own."""

    def start(self) -> TokenConstraint:
        """A constraint at the beginning of a reply."""
        ...


def allowed_of(mask: Int32Array, vocab_size: int) -> BoolArray:
    """Which of the first `vocab_size` tokens a mask allows, `[vocab_size]`; those beyond the mask are not.

    >>> allowed_of(np.array([5], np.int32), 4).tolist()
    [True, False, True, False]
    """
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=min(vocab_size, 32 * len(mask)))
    if len(bits) < vocab_size:
        bits = np.pad(bits, (0, vocab_size - len(bits)))
    return bits.view(np.bool_)

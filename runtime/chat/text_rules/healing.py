"""A reply that begins with the bytes of the prompt's last token, which is chosen anew with what comes behind it.

Knows what tokens spell, not prompts. A token may have all of the bytes and more, or a part of them, if others can bring
the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from functools import cached_property

import numpy as np
from radixlm.tokenizer_fix import Tokenizer

from ...model.batch import Int32Array
from ..token_constraint import mask_of


class HealedFirst:
    """The state of one reply; see `TokenConstraint`, which this is one of.

    Args:
        rest: the bytes that are still to come.
        end_ids: tokens that end the reply, which cannot come before them.
    """

    is_finished = False

    def __init__(self, tokens: HealingTokens, rest: bytes, end_ids: Container[int]) -> None:
        self._tokens, self._rest, self._end_ids = tokens, rest, end_ids

    def mask(self) -> Int32Array | None:
        """The tokens that begin with what is left, and those that it begins with; any, once all has come."""
        if not self._rest:
            return None
        is_allowed = np.zeros(self._tokens.vocab_size, np.bool_)
        is_allowed[[each for each in self._tokens.beginning(self._rest) if each not in self._end_ids]] = True
        return mask_of(is_allowed)

    def accept(self, token_id: int) -> None:
        """Go on by a token."""
        self._rest = self._rest[len(self._tokens.spell(token_id)) :] if self._rest else b""

    def state(self) -> bytes:
        """See `Rewindable`."""
        return self._rest

    def restore(self, state: bytes) -> None:
        """See `Rewindable`."""
        self._rest = state


class HealingTokens:
    """The tokens of a model by what they spell; any thread may ask. They are sorted when first needed.

    Args:
        vocab_size: of what is sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._special_ids = tokenizer.profile.special_ids
        self.spell, self.vocab_size = tokenizer.token_bytes, vocab_size

    def can_heal(self, token_id: int) -> bool:
        """Whether a token has bytes that others may begin with."""
        return token_id < self.vocab_size and token_id not in self._special_ids and bool(self.spell(token_id))

    def start(self, rest: bytes, end_ids: Container[int]) -> HealedFirst:
        """A constraint at the beginning of a reply that these tokens end."""
        assert self._sorted, "sorted here, and not by the engine's thread"
        return HealedFirst(self, rest, end_ids)

    def beginning(self, rest: bytes) -> Iterator[int]:
        """Those that begin with these bytes, and those that these begin with, if others have what is left then."""
        yield from self._longer(rest)
        ends = [size for size in range(len(rest)) if any(True for _ in self._longer(rest[size:]))]
        for size in range(len(rest) - 1, 0, -1):  # from where it can be brought to its end
            if any(end in ends for end in self._ends(rest, size)):
                ends.append(size)
        for size in range(1, len(rest)):
            if size in ends:
                yield from self._equal(rest[:size])

    def _ends(self, rest: bytes, size: int) -> Iterator[int]:
        """The places that one token leads to from a place."""
        return (end for end in range(size + 1, len(rest)) if any(True for _ in self._equal(rest[size:end])))

    def _longer(self, piece: bytes) -> Iterator[int]:
        place = bisect_left(self._sorted, (piece, -1))
        while place < len(self._sorted) and self._sorted[place][0].startswith(piece):
            yield self._sorted[place][1]
            place += 1

    def _equal(self, piece: bytes) -> Iterator[int]:
        place = bisect_left(self._sorted, (piece, -1))
        while place < len(self._sorted) and self._sorted[place][0] == piece:
            yield self._sorted[place][1]
            place += 1

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        """What each token spells, and its id; none of those that are no text."""
        return sorted((self.spell(each), each) for each in range(self.vocab_size) if self.can_heal(each))

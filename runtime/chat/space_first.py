"""The first token of a reply to a prompt that was fed without its last space: a space begins it, or it ends the reply.

Knows what tokens spell and which of them end a reply; not prompts, and nothing of the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cached_property

import numpy as np
from radixlm.tokenizer_fix import PreparedPrompt, Tokenizer

from ..model.batch import Int32Array
from .token_constraint import BoolArray, mask_of


class SpaceFirst:
    """The state of one reply; see `TokenConstraint`, which this is one of.

    >>> constraint = SpaceFirst(np.array([5], np.int32))
    >>> constraint.accept(2)
    >>> constraint.mask() is None
    True
    """

    is_finished = False

    def __init__(self, first: Int32Array) -> None:
        self._mask: Int32Array | None = first

    def mask(self) -> Int32Array | None:
        """Of the first token; any may follow it."""
        return self._mask

    def accept(self, token_id: int) -> None:
        """Go on by a token."""
        self._mask = None

    def state(self) -> Int32Array | None:
        """See `Rewindable`."""
        return self._mask

    def restore(self, state: Int32Array | None) -> None:
        """See `Rewindable`."""
        self._mask = state


class SpaceTokens:
    """The tokens of a model that begin with a space; any thread may ask. They are looked up when first needed.

    Args:
        vocab_size: of what is sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def start(self, end_ids: Iterable[int]) -> SpaceFirst:
        """A constraint at the beginning of a reply that these tokens end."""
        is_allowed = self._begin_with_space.copy()
        is_allowed[[token_id for token_id in end_ids if token_id < self._vocab_size]] = True
        return SpaceFirst(mask_of(is_allowed))

    @cached_property
    def _begin_with_space(self) -> BoolArray:
        special_ids, spell = self._tokenizer.profile.special_ids, self._tokenizer.token_bytes
        begin = (spell(token_id)[:1] == b" " and token_id not in special_ids for token_id in range(self._vocab_size))
        return np.fromiter(begin, np.bool_, self._vocab_size)


def given_reply(
    prompt: PreparedPrompt, reply_ids: Sequence[int], tokenizer: Tokenizer, end_ids: Container[int]
) -> tuple[int, ...]:
    """A reply that is not sampled as it can follow the prompt: with the space's token first, if it must have one."""
    lacks_space = prompt.space_id is not None and len(reply_ids) > 0 and reply_ids[0] not in end_ids
    if prompt.space_id is None or not lacks_space or tokenizer.token_bytes(reply_ids[0]).startswith(b" "):
        return tuple(reply_ids)
    return (prompt.space_id, *reply_ids)

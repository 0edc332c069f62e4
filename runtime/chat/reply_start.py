"""Constrain the first tokens of a reply to a prompt that lost its end: a lone space, or its last token.

The reply begins with a space, or ends at once; or it begins with the bytes of the dropped token, which is chosen again
together with the text after it. Knows what tokens spell and which of them end a reply; not prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from radixlm.tokenizer_fix import PreparedPrompt, Tokenizer

from ..model.batch import Int32Array
from .token_constraint import BoolArray, mask_of


class LeadingSpace:
    """A constraint that the first token begins with a space; see `TokenConstraint`.

    >>> constraint = LeadingSpace(np.array([5], np.int32))
    >>> constraint.accept(2)
    >>> constraint.mask() is None
    True
    """

    is_finished = False

    def __init__(self, first: Int32Array) -> None:
        self._mask: Int32Array | None = first

    def mask(self) -> Int32Array | None:
        """Return the mask of the first token; any token can follow it."""
        return self._mask

    def accept(self, token_id: int) -> None:
        """Advance by a token."""
        self._mask = None

    def state(self) -> Int32Array | None:
        """Return the mask of the first token, None after it, for `restore`."""
        return self._mask

    def restore(self, state: Int32Array | None) -> None:
        """Rewind to a state that `state` returned."""
        self._mask = state


class SpaceTokens:
    """The tokens of a model that begin with a space, for any thread. They are looked up when first needed.

    Args:
        vocab_size: number of tokens that can be sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def start(self, end_ids: Iterable[int]) -> LeadingSpace:
        """Return a constraint at the beginning of a reply that the tokens `end_ids` end."""
        is_allowed = self._begin_with_space.copy()
        is_allowed[[token_id for token_id in end_ids if token_id < self._vocab_size]] = True
        return LeadingSpace(mask_of(is_allowed))

    @cached_property
    def _begin_with_space(self) -> BoolArray:
        """Mask of the tokens whose text begins with a space, `[vocab]`; special tokens are none."""
        special_ids, spell = self._tokenizer.profile.special_ids, self._tokenizer.token_bytes
        begin = (spell(token_id)[:1] == b" " and token_id not in special_ids for token_id in range(self._vocab_size))
        return np.fromiter(begin, np.bool_, self._vocab_size)


def given_reply(
    prompt: PreparedPrompt, reply_ids: Sequence[int], tokenizer: Tokenizer, end_ids: Container[int]
) -> tuple[int, ...]:
    """Return a given reply as it can follow the prompt: with the space's token first, if it must have one."""
    lacks_space = prompt.space_id is not None and len(reply_ids) > 0 and reply_ids[0] not in end_ids
    if prompt.space_id is None or not lacks_space or tokenizer.token_bytes(reply_ids[0]).startswith(b" "):
        return tuple(reply_ids)
    return (prompt.space_id, *reply_ids)


class TokenHealing:
    """A constraint that the first tokens spell given bytes; see `TokenConstraint`.

    Args:
        rest: the remaining bytes.
        end_ids: tokens that end the reply, which are forbidden before these bytes.
    """

    is_finished = False

    def __init__(self, tokens: HealingTokens, rest: bytes, end_ids: Container[int]) -> None:
        self._tokens, self._rest, self._end_ids = tokens, rest, end_ids

    def mask(self) -> Int32Array | None:
        """Return the mask of tokens that begin with the rest or begin it; None once all bytes came."""
        if not self._rest:
            return None
        is_allowed = np.zeros(self._tokens.vocab_size, np.bool_)
        is_allowed[[each for each in self._tokens.beginning(self._rest) if each not in self._end_ids]] = True
        return mask_of(is_allowed)

    def accept(self, token_id: int) -> None:
        """Advance by a token."""
        self._rest = self._rest[len(self._tokens.spell(token_id)) :] if self._rest else b""

    def state(self) -> bytes:
        """Return the bytes that the next tokens must begin with, for `restore`."""
        return self._rest

    def restore(self, state: bytes) -> None:
        """Rewind to a state that `state` returned."""
        self._rest = state


class HealingTokens:
    """The tokens of a model by what they spell, for any thread. They are sorted when first needed.

    Args:
        vocab_size: number of tokens that can be sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._special_ids = tokenizer.profile.special_ids
        self.spell, self.vocab_size = tokenizer.token_bytes, vocab_size

    def can_heal(self, token_id: int) -> bool:
        """Return whether a token has bytes that other tokens can begin with."""
        return token_id < self.vocab_size and token_id not in self._special_ids and bool(self.spell(token_id))

    def start(self, rest: bytes, end_ids: Container[int]) -> TokenHealing:
        """Return a constraint at the beginning of a reply that the tokens `end_ids` end."""
        assert self._sorted, "sort here, not on the engine's thread"
        return TokenHealing(self, rest, end_ids)

    def beginning(self, rest: bytes) -> Iterator[int]:
        """Yield tokens that begin with these bytes, and those that these begin with, if others can spell the rest."""
        yield from self._tokens_beginning_with(rest)
        ends = [size for size in range(len(rest)) if any(True for _ in self._tokens_beginning_with(rest[size:]))]
        for size in range(len(rest) - 1, 0, -1):  # positions from which the end can be reached
            if any(end in ends for end in self._ends(rest, size)):
                ends.append(size)
        for size in range(1, len(rest)):
            if size in ends:
                yield from self._tokens_spelling(rest[:size])

    def _ends(self, rest: bytes, size: int) -> Iterator[int]:
        """Return the positions that one token reaches from a position."""
        return (end for end in range(size + 1, len(rest)) if any(True for _ in self._tokens_spelling(rest[size:end])))

    def _tokens_beginning_with(self, piece: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes begin with `piece`, those that equal it included."""
        place = bisect_left(self._sorted, (piece, -1))
        while place < len(self._sorted) and self._sorted[place][0].startswith(piece):
            yield self._sorted[place][1]
            place += 1

    def _tokens_spelling(self, piece: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes are `piece`."""
        place = bisect_left(self._sorted, (piece, -1))
        while place < len(self._sorted) and self._sorted[place][0] == piece:
            yield self._sorted[place][1]
            place += 1

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        """Text and id of each token, sorted; without tokens that are no text."""
        return sorted((self.spell(each), each) for each in range(self.vocab_size) if self.can_heal(each))

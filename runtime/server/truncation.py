"""Make a history that outgrew the context fit again: whole turns are dropped from its middle.

Knows messages and how many tokens they make together, not what they say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from ..errors import ContextLengthExceeded

Message = Mapping[str, object]
Count = Callable[[Sequence[Message]], int]
"""Tokens of a prompt made of messages."""
Truncation = Literal["none", "middle"]
"""`none`: a history that does not fit is an error. `middle`: its oldest turns go, what comes before them stays."""

_REPLY_SHARE = 4  # of the context one part is left for a reply that has no max_tokens
_BLOCK_SHARE = 4  # one part of the context is dropped at a time
_NUM_TRIES = 2
MAX_HISTORY_BYTES = 4 << 20  # as JSON: a million tokens, which take some seconds to count


@dataclass(frozen=True)
class Truncated:
    """What is left of a history, and what is not."""

    messages: Sequence[Message]
    dropped: Sequence[int] = ()  # places in the history that was sent
    num_dropped_tokens: int = 0


def drop_middle(
    messages: Sequence[Message],
    *,
    count: Count,
    context_length: int,
    max_tokens: int | None,
) -> Truncated:
    """The messages that stand before the first turn, and as many of the newest turns as fit.

    A turn begins with a message of the user and has all that answers it, so that no tool's result is left without its
    call. What is dropped grows by a quarter of the context at a time, not with each turn: the next turns drop the same,
    and find the prefix of this one cached.

    Args:
        max_tokens: of the reply, for which there is to be room; None: for a quarter of the context.

    Raises:
        ContextLengthExceeded: the newest turn does not fit, with what stands before the first, even with one token of
            reply; or the history is too long to look through.
    """
    num_bytes = len(msgspec.json.encode(messages))
    if num_bytes > MAX_HISTORY_BYTES:
        raise ContextLengthExceeded(
            f"the history has {num_bytes} bytes, at most {MAX_HISTORY_BYTES} are looked through for what to drop; "
            "send fewer of its turns"
        )
    num_tokens = count(messages)
    limit = context_length - min(max_tokens or context_length // _REPLY_SHARE, context_length - 1)
    if num_tokens <= limit:
        return Truncated(messages)
    turns = _Turns(messages, count)
    block = max(1, context_length // _BLOCK_SHARE)
    too_many = -(-(num_tokens - limit) // block) * block
    num_turns, num_left = turns.drop(too_many)
    for _ in range(_NUM_TRIES):
        if num_left <= limit:
            break
        # They were shorter in the history than by themselves: some templates leave out what was thought in old turns.
        too_many = -(-too_many * (num_tokens - limit) // max(num_tokens - num_left, 1)) + 1
        num_turns, num_left = turns.drop(too_many)
    if num_left > limit:
        num_turns, num_left = turns.drop(None)
    if num_left >= context_length:
        raise ContextLengthExceeded(
            f"the newest turn and what stands before the first have {num_left} tokens, the context "
            f"holds {context_length} and needs one for the reply; nothing else can be dropped: shorten them"
        )
    return Truncated(turns.without(num_turns), turns.places(num_turns), num_tokens - num_left)


class _Turns:
    """A history's turns, each of which is counted once at most, by itself: counting all that stays for each try took
    thirteen times as long as answering."""

    def __init__(self, messages: Sequence[Message], count: Count) -> None:
        self._messages, self._count = messages, count
        self._starts = [place for place, message in enumerate(messages) if message["role"] == "user"]
        self._num_before = self._starts[0] if self._starts else len(messages)
        self._most = max(len(self._starts) - 1, 0)  # the newest turn stays
        self._ends: list[int] = []  # how many tokens the first turns have together
        self._left: dict[int, int] = {}

    def drop(self, num_tokens: int | None) -> tuple[int, int]:
        """How many turns have about so many tokens, and the tokens of what is left without them; None: all but the
        newest."""
        num_turns = self._most if num_tokens is None else self._first(num_tokens)
        if num_turns not in self._left:
            self._left[num_turns] = self._count(self.without(num_turns))
        return num_turns, self._left[num_turns]

    def without(self, num_turns: int) -> Sequence[Message]:
        """The history without its first turns."""
        if not num_turns:
            return self._messages
        return [*self._messages[: self._num_before], *self._messages[self._starts[num_turns] :]]

    def places(self, num_turns: int) -> Sequence[int]:
        """Where the first turns are in the history."""
        return range(self._num_before, self._starts[num_turns]) if num_turns else range(0)

    def _first(self, num_tokens: int) -> int:
        """How many turns, from the first on, have so many tokens; all but the newest if they have fewer."""
        while len(self._ends) < self._most and (not self._ends or self._ends[-1] < num_tokens):
            turn = self._count(self._turn(len(self._ends))) - self._overhead
            self._ends.append(turn + (self._ends[-1] if self._ends else 0))
        return min(bisect_left(self._ends, num_tokens) + 1, self._most)

    @cached_property
    def _overhead(self) -> int:
        """Tokens that every conversation has, however short: a system prompt of the template, what begins the reply."""
        if self._most < 2:
            return 0
        first, second = self._turn(0), self._turn(1)
        return self._count(first) + self._count(second) - self._count([*first, *second])

    def _turn(self, number: int) -> Sequence[Message]:
        return self._messages[self._starts[number] : self._starts[number + 1]]

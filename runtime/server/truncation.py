"""Make a request that outgrew the context fit again: drop whole turns of a history's middle, or tokens of a prompt's.

A request that fits stays as it is. Knows messages and how many tokens they make together, not what they say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..chat.tools.tool_format import Tool
from ..errors import ContextLengthExceeded, InvalidRequest

Message = Mapping[str, object]
Count = Callable[[Sequence[Message], Sequence[Tool]], int]
"""Tokens of a prompt made of messages and tools."""
Truncation = Literal["none", "middle"]
"""`none`: what does not fit is an error. `middle`: a history's oldest turns go, and what comes before them stays; a
prompt's middle goes."""

_REPLY_SHARE = 4  # of the context one part is left for a reply that has no max_tokens,
_MAX_REPLY_SHARE = 2  # and one at most for a reply that has: clients ask for more than they ever get
_BEGINNING_SHARE = 8  # of the context one part is the beginning of a prompt that loses its middle
_BLOCK_SHARE = 4  # one part of the context is dropped at a time
MAX_HISTORY_BYTES = 4 << 20  # as JSON, with the tools, or of a prompt: a million tokens take some seconds to count
_PROBE: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class Truncated:
    """What is left of a history, and what was dropped."""

    messages: Sequence[Message]
    dropped: Sequence[int] = ()  # places in the history that was sent
    num_dropped_tokens: int = 0


def drop_middle(
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    count: Count,
    context_length: int,
    max_tokens: int | None,
) -> Truncated:
    """The messages before the first turn, and as many of the newest turns as fit.

    A turn begins with a message of the user and includes all answers to it, so that no tool's result is left without
    its call. What is dropped grows by a quarter of the context at a time, not with each turn: the next requests drop
    the same turns, and find the prefix of this one cached.

    Args:
        max_tokens: of the reply. The history leaves room for it, for at most half of the context; None: for a quarter.

    Raises:
        ContextLengthExceeded: the newest turn does not fit, with the tools and what stands before the first, even with
            one token of reply; or the history is too long to look through.
    """
    require_countable("history, tools included,", len(msgspec.json.encode(messages)) + len(msgspec.json.encode(tools)))
    num_tokens = count(messages, tools)
    if num_tokens < context_length:
        return Truncated(messages)
    turns = _Turns(messages, tools, count, num_tokens)
    num_kept = num_tokens - turns.num_dropped(turns.most)
    if num_kept >= context_length:
        raise ContextLengthExceeded(
            f"the newest turn, the tools and what stands before the first have {num_kept} tokens, the context "
            f"holds {context_length} and needs one for the reply; nothing else can be dropped: shorten them"
        )
    excess = num_tokens - _limit(context_length, max_tokens)
    num_turns = turns.first(_in_blocks(excess, context_length), at_least=excess)
    return Truncated(turns.without(num_turns), turns.places(num_turns), turns.num_dropped(num_turns))


@dataclass(frozen=True)
class CutPrompt:
    """What is left of a prompt's tokens. Those of `[start, start + num_dropped_tokens)` were dropped."""

    ids: list[int]
    start: int = 0
    num_dropped_tokens: int = 0


def cut_middle(
    ids: list[int], *, begins_character: Callable[[int], bool], context_length: int, max_tokens: int | None
) -> CutPrompt:
    """A prompt's beginning, an eighth of the context long, and as much of its end as leaves room for the reply.

    What is dropped grows by a quarter of the context at a time, as in `drop_middle`.

    Args:
        begins_character: whether a token begins a character; characters of several tokens are not cut.
        max_tokens: as in `drop_middle`.
    """
    if len(ids) < context_length:
        return CutPrompt(ids)

    def border(place: int, step: int) -> int:
        """The next place from here where a character begins: one has four bytes at most, and as many tokens."""
        near = (p for p in range(place, place + 4 * step, step) if 0 <= p < len(ids))
        return next((p for p in near if begins_character(ids[p])), min(place, len(ids)))

    num_dropped = _in_blocks(len(ids) - _limit(context_length, max_tokens), context_length)
    beginning = context_length // _BEGINNING_SHARE
    start, stop = border(beginning, -1), border(beginning + num_dropped, 1)
    return CutPrompt([*ids[:start], *ids[stop:]], start, stop - start)


def require_countable(noun: str, num_bytes: int) -> None:
    """Raise ContextLengthExceeded if it takes too long to count the tokens of what is to be truncated."""
    if num_bytes > MAX_HISTORY_BYTES:
        raise ContextLengthExceeded(
            f"the {noun} has {num_bytes} bytes, at most {MAX_HISTORY_BYTES} are looked through for what to drop; send "
            "less of it"
        )


def _limit(context_length: int, max_tokens: int | None) -> int:
    """Tokens of a prompt that leaves room for a reply."""
    if max_tokens is None:
        return context_length - max(1, context_length // _REPLY_SHARE)
    return context_length - max(1, min(max_tokens, context_length // _MAX_REPLY_SHARE))


def _in_blocks(num_tokens: int, context_length: int) -> int:
    """At least so many tokens, in what is dropped at a time."""
    block = max(1, context_length // _BLOCK_SHARE)
    return -(-num_tokens // block) * block


class _Turns:
    """A history's turns, each of which is counted once at most, by itself and without the tools: counting all that
    stays for each try took thirteen times as long as answering, and the tools with each turn minutes."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], count: Count, num_tokens: int) -> None:
        self._messages, self._tools, self._count, self._num_tokens = messages, tools, count, num_tokens
        self._starts = [place for place, message in enumerate(messages) if message["role"] == "user"]
        self._num_before = self._starts[0] if self._starts else len(messages)
        self.most = max(len(self._starts) - 1, 0)  # the newest turn stays
        self._dropped = {0: 0}

    def first(self, num_tokens: int, *, at_least: int) -> int:
        """How many turns, from the first on, have about `num_tokens` tokens, and surely `at_least` so many; all but the
        newest if they have fewer."""
        if self.num_dropped(self.most) <= num_tokens:
            return self.most
        num_turns = self._guessed(num_tokens)
        if self.num_dropped(num_turns) >= at_least:
            return num_turns
        # By themselves they are longer than in the history, or refused. Dropping all of them was the answer once, and
        # left 64 of 100 histories with thoughts in them nothing but the newest turn.
        return bisect_left(range(self.most), num_tokens, lo=num_turns + 1, key=self.num_dropped)

    def num_dropped(self, num_turns: int) -> int:
        """Tokens by which the prompt is shorter without its first turns."""
        if num_turns not in self._dropped:
            self._dropped[num_turns] = self._num_tokens - self._count(self.without(num_turns), self._tools)
        return self._dropped[num_turns]

    def without(self, num_turns: int) -> Sequence[Message]:
        """The history without its first turns."""
        if not num_turns:
            return self._messages
        return [*self._messages[: self._num_before], *self._messages[self._starts[num_turns] :]]

    def places(self, num_turns: int) -> Sequence[int]:
        """Where the first turns are in the history."""
        return range(self._num_before, self._starts[num_turns]) if num_turns else range(0)

    def _guessed(self, num_tokens: int) -> int:
        """As `first`, from what each turn has by itself; 0 if that cannot be known."""
        try:
            num_around = self._alone([])
            for number in range(self.most):
                turn = self._messages[self._starts[number] : self._starts[number + 1]]
                num_tokens -= self._alone(turn) - num_around
                if num_tokens <= 0:
                    return number + 1
        except InvalidRequest:  # the template takes no such conversation: it wants tools, or words of the system
            return 0
        return 0

    def _alone(self, turn: Sequence[Message]) -> int:
        """Tokens of a conversation of a turn and a question behind it, which makes it an old one: templates leave out
        what was thought in those. Some want each conversation to begin with words of the system."""
        system = [{**message, "content": ""} for message in self._messages[:1] if message["role"] == "system"]
        return self._count([*system, *turn, _PROBE], ())

"""Truncate requests that exceed the context: drop old turns of a history, or tokens in the middle of a prompt.

A request that fits is unchanged. Knows messages and their token counts, not their content.
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
"""Returns the number of tokens of a prompt made of messages and tools."""
Truncation = Literal["none", "middle"]
"""`none`: a request that does not fit is an error. `middle`: drop the oldest turns of a history, but not the messages
before them; drop the middle of a prompt."""

_REPLY_SHARE = 4  # 1/4 of the context is left for a reply without max_tokens,
_MAX_REPLY_SHARE = 2  # and at most 1/2 for a reply with max_tokens: clients ask for more than they use
_BEGINNING_SHARE = 8  # a truncated prompt keeps a beginning of 1/8 of the context
_BLOCK_SHARE = 4  # 1/4 of the context is dropped at a time
MAX_HISTORY_BYTES = 4 << 20  # of a prompt, or of messages and tools as JSON: counting a million tokens takes seconds
_PROBE: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class TruncatedHistory:
    """A history after truncation, and which messages were dropped."""

    messages: Sequence[Message]
    dropped: Sequence[int] = ()  # indices in the original history
    num_dropped_tokens: int = 0


def drop_middle(
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    count: Count,
    context_length: int,
    max_tokens: int | None,
) -> TruncatedHistory:
    """Keep the messages before the first turn, and as many of the newest turns as fit.

    A turn begins with a message of the user and includes all answers to it, so that no tool result loses its call.
    Dropping proceeds by a quarter of the context at a time, not turn by turn: the next requests drop the same turns,
    and find the prefix of this one cached.

    Args:
        max_tokens: maximum length of the reply. It is reserved, up to half of the context; None reserves a quarter.

    Raises:
        ContextLengthExceeded: the newest turn does not fit with the tools, the messages before the first turn and one
            token of reply; or the history is too long to count.
    """
    require_countable("history, tools included,", len(msgspec.json.encode(messages)) + len(msgspec.json.encode(tools)))
    num_tokens = count(messages, tools)
    if num_tokens < context_length:
        return TruncatedHistory(messages)
    turns = _Turns(messages, tools, count, num_tokens)
    num_kept = num_tokens - turns.num_dropped(turns.most)
    if num_kept >= context_length:
        raise ContextLengthExceeded(
            f"the newest turn, the tools and the messages before the first turn have {num_kept} tokens, the context "
            f"holds {context_length} and needs one for the reply; nothing else can be dropped: shorten them"
        )
    excess = num_tokens - _prompt_limit(context_length, max_tokens)
    num_turns = turns.first(_in_blocks(excess, context_length), at_least=excess)
    return TruncatedHistory(turns.without(num_turns), turns.places(num_turns), turns.num_dropped(num_turns))


@dataclass(frozen=True)
class TruncatedPrompt:
    """A prompt after truncation. The tokens `[start, start + num_dropped_tokens)` were dropped."""

    ids: list[int]
    start: int = 0
    num_dropped_tokens: int = 0


def cut_middle(
    ids: list[int], *, begins_character: Callable[[int], bool], context_length: int, max_tokens: int | None
) -> TruncatedPrompt:
    """Keep a prompt's beginning, an eighth of the context long, and as much of its end as leaves room for the reply.

    Dropping proceeds by a quarter of the context at a time, as in `drop_middle`.

    Args:
        begins_character: tells if a token begins a character; characters of several tokens are not split.
        max_tokens: as in `drop_middle`.
    """
    if len(ids) < context_length:
        return TruncatedPrompt(ids)

    def border(place: int, step: int) -> int:
        """Return the nearest position in one direction that begins a character, which has at most four tokens."""
        near = (p for p in range(place, place + 4 * step, step) if 0 <= p < len(ids))
        return next((p for p in near if begins_character(ids[p])), min(place, len(ids)))

    num_dropped = _in_blocks(len(ids) - _prompt_limit(context_length, max_tokens), context_length)
    beginning = context_length // _BEGINNING_SHARE
    start, stop = border(beginning, -1), border(beginning + num_dropped, 1)
    return TruncatedPrompt([*ids[:start], *ids[stop:]], start, stop - start)


def require_countable(noun: str, num_bytes: int) -> None:
    """Raise ContextLengthExceeded if counting the tokens of so many bytes takes too long."""
    if num_bytes > MAX_HISTORY_BYTES:
        raise ContextLengthExceeded(
            f"the {noun} has {num_bytes} bytes, more than the {MAX_HISTORY_BYTES} that can be truncated; send less"
        )


def _prompt_limit(context_length: int, max_tokens: int | None) -> int:
    """Return the maximum number of prompt tokens that leaves room for a reply."""
    if max_tokens is None:
        return context_length - max(1, context_length // _REPLY_SHARE)
    return context_length - max(1, min(max_tokens, context_length // _MAX_REPLY_SHARE))


def _in_blocks(num_tokens: int, context_length: int) -> int:
    """Round a number of tokens up to whole blocks, the unit in which tokens are dropped."""
    block = max(1, context_length // _BLOCK_SHARE)
    return -(-num_tokens // block) * block


class _Turns:
    """The turns of a history and their token counts.

    Each turn is counted at most once, alone and without tools. Counting the whole rest for each attempt took thirteen
    times as long as the reply, and counting the tools with each turn took minutes.

    Attributes:
        most: number of turns that can be dropped.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], count: Count, num_tokens: int) -> None:
        self._messages, self._tools, self._count, self._num_tokens = messages, tools, count, num_tokens
        self._starts = [place for place, message in enumerate(messages) if message["role"] == "user"]
        self._num_before = self._starts[0] if self._starts else len(messages)
        self.most = max(len(self._starts) - 1, 0)  # the newest turn stays
        self._dropped = {0: 0}

    def first(self, num_tokens: int, *, at_least: int) -> int:
        """Return how many of the oldest turns to drop for about `num_tokens` tokens, and no fewer than `at_least`.

        All but the newest if they have fewer tokens.
        """
        if self.num_dropped(self.most) <= num_tokens:
            return self.most
        num_turns = self._estimate_turns(num_tokens)
        if self.num_dropped(num_turns) >= at_least:
            return num_turns
        # Alone, turns are longer than in the history, or the template refuses them. Dropping all turns then would
        # leave 64 of 100 histories with reasoning only their newest turn.
        return bisect_left(range(self.most), num_tokens, lo=num_turns + 1, key=self.num_dropped)

    def num_dropped(self, num_turns: int) -> int:
        """Return the number of tokens that dropping the first turns saves."""
        if num_turns not in self._dropped:
            self._dropped[num_turns] = self._num_tokens - self._count(self.without(num_turns), self._tools)
        return self._dropped[num_turns]

    def without(self, num_turns: int) -> Sequence[Message]:
        """Return the history without its first turns."""
        if not num_turns:
            return self._messages
        return [*self._messages[: self._num_before], *self._messages[self._starts[num_turns] :]]

    def places(self, num_turns: int) -> Sequence[int]:
        """Return the message indices of the first turns."""
        return range(self._num_before, self._starts[num_turns]) if num_turns else range(0)

    def _estimate_turns(self, num_tokens: int) -> int:
        """Estimate the result of `first` from the lengths of single turns; 0 if the template refuses them."""
        try:
            num_around = self._count_alone([])
            for number in range(self.most):
                turn = self._messages[self._starts[number] : self._starts[number + 1]]
                num_tokens -= self._count_alone(turn) - num_around
                if num_tokens <= 0:
                    return number + 1
        except InvalidRequest:  # the template refuses such a conversation: it requires tools, or a system prompt
            return 0
        return 0

    def _count_alone(self, turn: Sequence[Message]) -> int:
        """Return the number of tokens of a turn in a prompt of its own, with an empty system prompt and a question.

        The question makes the turn an old one, whose reasoning templates drop. Some templates require a system prompt.
        """
        system = [{**message, "content": ""} for message in self._messages[:1] if message["role"] == "system"]
        return self._count([*system, *turn, _PROBE], ())

"""Make a history that outgrew the context fit again: whole turns are dropped from its middle.

Knows messages and how many tokens they make together, not what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import ContextLengthExceeded

Message = Mapping[str, object]
Truncation = Literal["none", "middle"]
"""`none`: a history that does not fit is an error. `middle`: its oldest turns go, what comes before them stays."""

_REPLY_SHARE = 4  # of the context one part is left for a reply that has no max_tokens
_BLOCK_SHARE = 4  # one part of the context is dropped at a time


@dataclass(frozen=True)
class Truncated:
    """What is left of a history, and what is not."""

    messages: Sequence[Message]
    dropped: Sequence[int] = ()  # places in the history that was sent
    num_dropped_tokens: int = 0


def drop_middle(
    messages: Sequence[Message],
    *,
    count: Callable[[Sequence[Message]], int],
    context_length: int,
    max_tokens: int | None,
) -> Truncated:
    """The messages that stand before the first turn, and as many of the newest turns as fit.

    A turn begins with a message of the user and has all that answers it, so that no tool's result is left without its
    call. What is dropped grows by a quarter of the context at a time, not with each turn: the next turns drop the same,
    and find the prefix of this one cached.

    Args:
        count: tokens of a prompt made of messages.
        max_tokens: of the reply, for which there is to be room; None: for a quarter of the context.

    Raises:
        ContextLengthExceeded: the newest turn does not fit, with what stands before the first, even with one token of
            reply.
    """
    num_tokens = count(messages)
    limit = context_length - min(max_tokens or context_length // _REPLY_SHARE, context_length - 1)
    if num_tokens <= limit:
        return Truncated(messages)
    starts = [place for place, message in enumerate(messages) if message["role"] == "user"]
    kept_first = starts[0] if starts else len(messages)
    counts = {0: num_tokens}

    def without(num_turns: int) -> Sequence[Message]:
        return [*messages[:kept_first], *messages[starts[num_turns] :]]

    def count_without(num_turns: int) -> int:
        if num_turns not in counts:
            counts[num_turns] = count(without(num_turns))
        return counts[num_turns]

    most = len(starts) - 1  # the newest turn stays
    block = max(1, context_length // _BLOCK_SHARE)
    too_many = -(-(num_tokens - limit) // block) * block
    num_turns = _first(most, lambda turns: num_tokens - count_without(turns) >= too_many)
    if num_turns is None:
        num_turns = max(most, 0)
    if count_without(num_turns) >= context_length:
        raise ContextLengthExceeded(
            f"the newest turn and what stands before the first have {count_without(num_turns)} tokens, the context "
            f"holds {context_length} and needs one for the reply; nothing else can be dropped: shorten them"
        )
    dropped = range(kept_first, starts[num_turns]) if num_turns else range(0)
    return Truncated(without(num_turns) if num_turns else messages, dropped, num_tokens - count_without(num_turns))


def _first(most: int, holds: Callable[[int], bool]) -> int | None:
    """The least number from 1 to `most` for which `holds`, as it does for all above; None if for none."""
    if most < 1 or not holds(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

"""Readers: objects that say which rows of a step's logits they want, and are handed them.

A step computes tokens of requests, and the logits of those tokens for which a reader asks. Each request is given its
readers in one place (`request.py`): the sampler, which is here, and for instance the logprobs of its prompt. Knows rows
of numbers and positions of one sequence, not requests, pages or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..completion import Delta
from ..reply import Reply
from .sampler import Refusal, Sampled, StepLogits, sample_row

_NONE = range(0)
MAX_TRIES = 8  # of one reply in one step, where tokens are taken back


class LogitRows(NamedTuple):
    """The rows that one reader asked for: of a row, the logits of what comes after the token at its position.

    Row `first` of `step` is that of `positions[0]`; the others follow. `draft_ids` are the tokens that were guessed
    after the sequence's own, and computed in the same step.
    """

    step: StepLogits
    first: int
    positions: range
    draft_ids: Sequence[int]


class Outcome(NamedTuple):
    """What a step brought for one request.

    Attributes:
        is_damaged: logits that a reader needed are not finite: the request fails, and nothing else here counts.
        deltas: of the tokens that the reply was given.
        num_accepted: tokens of the draft that were right, and after which the reply goes on.
        next_id: the token after them; None: the sequence does not go on.
        ends_right: `next_id` is the draft's, too, and ended the reply.
        error: what went wrong with this request alone.
        is_first: the reply had no token before.
        before: when the token before these came, in seconds on the engine's clock; None: none was told before.
    """

    is_damaged: bool = False
    deltas: Sequence[Delta] = ()
    num_accepted: int = 0
    next_id: int | None = None
    ends_right: bool = False
    error: Exception | None = None
    is_first: bool = False
    before: float | None = None

    @property
    def num_right(self) -> int:
        """Draft tokens that are tokens of the reply."""
        return self.num_accepted + self.ends_right


DAMAGED = Outcome(is_damaged=True)


class Reader(Protocol):
    """Reads rows of one request's logits, as steps compute them in order of position."""

    @property
    def num_reusable(self) -> int | None:
        """How many of the sequence's first tokens may be taken from the cache: it needs no more rows of these.

        None: any number. The last token is always computed.
        """
        ...

    @property
    def reading(self) -> object | None:
        """What it made of its rows, for the request's caller; None: it has not read all of them, or tells nothing."""
        ...

    def wanted(self, start: int, stop: int, length: int) -> range:
        """Return the positions whose rows it wants of a step that computes `[start, stop)`; may be empty.

        The sequence has `length` tokens. Positions from `length` on are of draft tokens. The row of position
        `length - 1` is the logits of the next token. It is called for every step of the request, also while it decodes.
        From the first row that a reader wants, the step computes all rows.
        """
        ...

    def read(self, rows: LogitRows) -> bool:
        """Read the rows that were wanted. Returns False if they are not finite, which fails the request."""
        ...


class ReplySampler:
    """The reader that gives a reply its tokens: the one after its last, and those of a draft that are right.

    Batch invariance makes a draft exact: a row of logits is the same bits whatever is computed beside it, and the n-th
    token of a reply takes the n-th number of its generator.

    Attributes:
        max_tokens: that the reply may have, known once the request is admitted. 0: a row is read, and no token wanted.
    """

    num_reusable = None
    reading = None

    def __init__(self, reply: Reply) -> None:
        self.max_tokens = 0
        self._reply = reply
        self._rows: LogitRows | None = None
        self._sampled: Sampled = None  # of the first of these

    def wanted(self, start: int, stop: int, length: int) -> range:
        """The last token's position, and those of a draft."""
        return range(length - 1, stop) if stop >= length else _NONE

    def read(self, rows: LogitRows) -> bool:
        """Sample the token after the last one."""
        self._rows = rows
        self._sampled = sample_row(rows.step, rows.first, self._reply.sampler)
        return self._sampled is not None

    def go_on(self, now: float) -> Outcome:
        """Give the reply what was sampled, then as many tokens of a draft as are right, and one more.

        The sequence stays as it is.
        """
        rows, sampled, reply = self._rows, self._sampled, self._reply
        assert rows is not None, "nothing was read"
        self._rows = None
        draft_ids, num_before = rows.draft_ids, len(reply.token_ids)
        is_first, before = reply.last_token_at is None, reply.last_token_at if reply.num_told else None
        deltas: list[Delta] = []
        number, num_tried, next_id, ends_right = 0, 0, None, False
        error: Exception | None = None
        try:
            while True:
                if sampled is None:
                    return DAMAGED
                if isinstance(sampled, Refusal):
                    error = sampled.error
                    break
                if self.max_tokens == 0:
                    deltas.append(reply.end_unsaid())
                    break
                is_right = number < len(draft_ids) and sampled.token_id == draft_ids[number]
                is_full = len(reply.token_ids) + 1 == self.max_tokens
                deltas.append(reply.accept(sampled, now, is_full=is_full, is_guessed=is_right))
                num_kept = len(reply.token_ids) - num_before
                if num_kept < 0:  # it took back tokens that it had before: others come in their place, computed anew
                    number = 0
                    break
                if num_kept <= number:  # it took tokens back: another comes in the place of the first of them
                    number, num_tried = num_kept, num_tried + 1
                    if num_tried == MAX_TRIES:  # others are not to wait for it: its last token is computed once more
                        break
                elif is_right and reply.finish_reason is None:
                    number += 1
                else:
                    next_id, ends_right = sampled.token_id, is_right
                    break
                sampled = sample_row(rows.step, rows.first + number, reply.sampler)
        except Exception as raised:
            error = raised
        return Outcome(False, deltas, number, next_id, ends_right, error, is_first, before)

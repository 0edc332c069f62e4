"""The interface of readers: objects that request rows of a step's logits, and get them.

A step computes tokens of requests, and the logits of those tokens for which a reader asks. `request.py` gives each
request its readers: the sampler, which is here, and for instance the logprobs of its prompt. Knows rows of numbers and
positions of one sequence, not requests, pages or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..completion import Delta
from ..reply import Reply
from .sampler import Refusal, Sampled, StepLogits, sample_row

_NONE = range(0)
MAX_TRIES = 8  # of one reply in one step, if tokens are taken back


class LogitRows(NamedTuple):
    """The rows that one reader asked for: each row has the logits of the token after its position.

    Row `first` of `step` is that of `positions[0]`; the others follow. `draft_ids` are the draft tokens after
    the sequence's own tokens, computed in the same step.
    """

    step: StepLogits
    first: int
    positions: range
    draft_ids: Sequence[int]


class Outcome(NamedTuple):
    """The result of a step for one request.

    Attributes:
        is_damaged: logits that a reader needed are not finite: the request fails, and all else here is meaningless.
        deltas: the deltas of the tokens that the reply was given.
        num_accepted: draft tokens that were accepted, and after which the reply continues.
        next_id: the token after them; None: the sequence does not continue.
        ends_right: `next_id` is the draft's, too, and ended the reply.
        error: the error of this request alone.
        is_first: the reply had no token before.
        before: time of the token before these, in seconds on the engine's clock; None if no token was delivered before.
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
        """Number of draft tokens that are tokens of the reply."""
        return self.num_accepted + self.ends_right


DAMAGED = Outcome(is_damaged=True)


class Reader(Protocol):
    """Reads rows of one request's logits, as steps compute them in order of position."""

    @property
    def num_reusable(self) -> int | None:
        """The most first tokens of the sequence that can be taken from the cache: it needs no more rows of these.

        None: any number. The last token is always computed.
        """
        ...

    @property
    def reading(self) -> object | None:
        """The result, for the request's caller; None if rows are missing, or if there is none."""
        ...

    def wanted(self, start: int, stop: int, length: int) -> range:
        """Return the positions whose rows it needs of a step that computes `[start, stop)`; can be empty.

        The sequence has `length` tokens. Positions from `length` on are draft tokens. The row of position
        `length - 1` has the logits of the next token. Called for every step of the request, also while it decodes.
        From the first row that a reader needs, the step computes all rows.
        """
        ...

    def read(self, rows: LogitRows) -> bool:
        """Read the requested rows. Return False if they are not finite, which fails the request."""
        ...


class ReplySampler:
    """The reader that gives a reply its tokens: the one after its last, and accepted tokens of a draft.

    Batch invariance makes speculation exact: a row of logits has the same bits in any batch, and the n-th
    token of a reply takes the n-th number of its generator.

    Attributes:
        max_tokens: the most tokens of the reply, known once the request is admitted. 0: a row is read, without a token.
    """

    num_reusable = None
    reading = None

    def __init__(self, reply: Reply) -> None:
        self.max_tokens = 0
        self._reply = reply
        self._rows: LogitRows | None = None
        self._sampled: Sampled = None  # from the first of these rows

    def wanted(self, start: int, stop: int, length: int) -> range:
        """Return the last token's position, and those of a draft."""
        return range(length - 1, stop) if stop >= length else _NONE

    def read(self, rows: LogitRows) -> bool:
        """Sample the token after the last one."""
        self._rows = rows
        self._sampled = sample_row(rows.step, rows.first, self._reply.sampler)
        return self._sampled is not None

    def go_on(self, now: float) -> Outcome:
        """Give the reply the sampled token, then as many tokens of a draft as are right, and one more.

        The sequence is not changed.
        """
        rows, sampled, reply = self._rows, self._sampled, self._reply
        assert rows is not None, "nothing was read"
        self._rows = None
        draft_ids, num_before = rows.draft_ids, len(reply.token_ids)
        is_first, before = reply.last_token_at is None, reply.last_token_at if reply.num_delivered else None
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
                    deltas.append(reply.end_empty())
                    break
                is_right = number < len(draft_ids) and sampled.token_id == draft_ids[number]
                is_full = len(reply.token_ids) + 1 == self.max_tokens
                deltas.append(reply.accept(sampled, now, is_full=is_full, is_drafted=is_right))
                num_kept = len(reply.token_ids) - num_before
                if num_kept < 0:  # it took back earlier tokens: others replace them, computed again
                    number = 0
                    break
                if num_kept <= number:  # it took tokens back: another replaces the first of them
                    number, num_tried = num_kept, num_tried + 1
                    if num_tried == MAX_TRIES:  # other requests must not wait for it: its last token is computed again
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

"""Hold a draft against what the model says: the reply goes on token by token, as without one.

The law of the row makes it exact: a row of logits is the same bits whatever is computed beside it, and the n-th token
of a reply takes the n-th number of its generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..completion import Delta
from ..request import Request
from .sampler import Refusal, Sampled


@dataclass(frozen=True)
class Verified:
    """What became of a draft.

    Attributes:
        num_accepted: tokens of it that were right, and behind which the reply goes on.
        deltas: of these, and of the last one.
        last: the token behind them, or why there is none. None: its logits are not finite.
        error: what went wrong with the one request.
        before: when the token before all of these came, in seconds on the engine's clock.
        goes_back: the reply took back tokens that it had before the draft; there is no last one.
        ends_right: the last one is the draft's, too; it ended the reply.
    """

    num_accepted: int
    deltas: list[Delta]
    last: Sampled = None
    error: Exception | None = None
    before: float | None = None
    goes_back: bool = False
    ends_right: bool = False

    @property
    def num_right(self) -> int:
        """Guesses that are tokens of the reply."""
        return self.num_accepted + self.ends_right


def verify(request: Request, draft_ids: Sequence[int], sample: Callable[[int], Sampled], now: float) -> Verified:
    """Give a reply as many tokens of a draft as are right, and one more. The sequence stays as it is.

    Args:
        sample: the token behind so many of the draft, with what the reply has drawn and counted by then.
    """
    deltas: list[Delta] = []
    reply, length, before, number = request.reply, len(request.admitted), request.reply.last_token_at, 0
    num_before = request.num_generated
    while True:
        try:
            sampled = sample(number)
            if sampled is None or isinstance(sampled, Refusal):
                return Verified(number, deltas, sampled, None if sampled is None else sampled.error, before)
            is_right = number < len(draft_ids) and sampled.token_id == draft_ids[number]
            is_full = request.is_full(length + number + 1)
            deltas.append(reply.accept(sampled, now, is_full=is_full, is_guessed=is_right))
        except Exception as error:
            return Verified(number, deltas, error=error, before=before)
        num_kept = request.num_generated - num_before
        if num_kept < 0:
            return Verified(0, deltas, before=before, goes_back=True)
        if num_kept <= number:  # the reply took tokens back: another comes in the place of the first of them
            number = num_kept
        elif not is_right or request.is_finished:
            return Verified(number, deltas, sampled, before=before, ends_right=is_right)
        else:
            number += 1


def is_damaged(token: Sampled | Verified) -> bool:
    """Whether logits were not finite that a request needed."""
    if isinstance(token, Verified):
        return token.last is None and token.error is None and not token.goes_back
    return token is None

"""Put together what one step computes, within its token budget.

Knows requests and their reservations; who is worth one is the scheduler's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..cache.kv_transaction import KVTransaction, Reservation
from ..errors import OutOfPages
from .request import Request


class ScheduledRequest(NamedTuple):
    """One request's share of a step; with `wants_logits` it samples after the last token."""

    request: Request
    reservation: Reservation
    wants_logits: bool


class StepPlan:
    """The requests of a step, in order, and the tokens that may still be added.

    `unservable` is a request that does not fit the pool even alone, if one was met: it can only fail.
    """

    def __init__(self, step: KVTransaction, max_num_tokens: int, stops: Mapping[str, int] | None = None) -> None:
        """An empty plan; a request that has a position in `stops` before it computes no further than that."""
        self.budget = max_num_tokens
        self.unservable: Request | None = None
        self._step = step
        self._stops = stops or {}
        self._scheduled: dict[str, ScheduledRequest] = {}

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """The requests of the step, in order."""
        return list(self._scheduled.values())

    def reserve(self, request: Request) -> bool:
        """Add as many of the request's tokens as the budget allows; False, with nothing changed, without
        pages.
        """
        sequence = request.admitted
        num_tokens = min(sequence.num_uncomputed, self.budget)
        if self._stops and (stop := self._stops.get(request.request_id, 0)) > sequence.num_computed:
            num_tokens = min(num_tokens, stop - sequence.num_computed)
        try:
            reservation = self._step.reserve(sequence, num_tokens)
        except OutOfPages:
            return False
        self.budget -= num_tokens
        wants_logits = reservation.stop == len(sequence)
        self._scheduled[request.request_id] = ScheduledRequest(request, reservation, wants_logits)
        return True

    def drop(self, request: Request) -> None:
        """Take a request out again, if it is in; its pages and tokens are free for others."""
        dropped = self._scheduled.pop(request.request_id, None)
        if dropped is not None:
            self._step.drop(dropped.reservation.sequence)
            self.budget += dropped.reservation.num_tokens

    def num_held_pages(self, request: Request) -> int:
        """Pages that a running request holds, those of this step included."""
        scheduled = self._scheduled.get(request.request_id)
        return scheduled.reservation.num_pages if scheduled else len(request.admitted.page_ids)

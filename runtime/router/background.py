"""Keeps a model loaded while it works for requests that have ended: background responses and batches.

Knows how a model's process reports that work, not how it is requested.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ..server.http.forwarding import ServerGone
from ..server.stored.batches import BatchReply
from .model_row import Lease
from .model_server import ANSWER_S, Headers, ModelServer, whole_answer

LOOKS_S = 1.0
_FEWEST_LOOKS = 2  # a response is counted once its prompt is tokenized
T = TypeVar("T")


class _Health(msgspec.Struct):
    """The counts of a model's `/health`. Without them, as for a client without a key, there is no work to wait for."""

    num_running: int = 0
    num_waiting: int = 0


class _Batches(msgspec.Struct):
    """The latest batches of a client, which a model's server processes in the order of their creation."""

    data: list[BatchReply] = []


class Background:
    """Leases that are held after their requests have ended, one for each model."""

    def __init__(self) -> None:
        self._held: dict[ModelServer, _Held] = {}

    def hold(self, lease: Lease[ModelServer], headers: Headers, key: str | None, *, is_batch: bool) -> None:
        """Keep a model loaded until it has computed all that it was asked for, or has ended.

        Args:
            lease: of the model; it is released.
            headers: of the request.
            key: API key of the request, which the model accepts; None on a server without keys.
            is_batch: wait for the batches of this key, too, which have no request in the engine at times.
        """
        if (held := self._held.get(lease.worker)) is not None:
            held.num_looks = 0
            lease.release()
        else:
            held = self._held[lease.worker] = _Held(lease, headers)
            held.task = asyncio.get_running_loop().create_task(held.release_when_idle())
            held.task.add_done_callback(lambda _: self._held.pop(lease.worker))
        if is_batch:
            held.batches_of[key] = headers


@dataclass
class _Held:
    """A lease, the headers of its request, and the number of times in a row that its model had no work.

    Attributes:
        batches_of: for each API key that created batches, the headers of a request.
    """

    lease: Lease[ModelServer]
    headers: Headers
    batches_of: dict[str | None, Headers] = field(default_factory=dict)
    num_looks: int = 0
    task: asyncio.Task[None] | None = None

    async def release_when_idle(self) -> None:
        """Ask the model for its work again and again, and release the lease when it has none."""
        try:
            while self.num_looks < _FEWEST_LOOKS:
                await asyncio.sleep(LOOKS_S)
                try:
                    self.num_looks = 0 if await self._has_work() else self.num_looks + 1
                except TimeoutError:
                    continue
        except ServerGone:
            pass
        finally:
            self.lease.release()

    async def _has_work(self) -> bool:
        """Return whether the model has requests, or batches that have not ended."""
        health = await self._get(b"/health", self.headers, _Health)
        if health.num_running or health.num_waiting:
            return True
        for headers in [*self.batches_of.values()]:
            batches = await self._get(b"/v1/batches", headers, _Batches)
            if any(batch.is_open for batch in batches.data):
                return True
        return False

    async def _get(self, target: bytes, headers: Headers, type: type[T]) -> T:
        async with asyncio.timeout(ANSWER_S):
            _, body = await whole_answer(self.lease.worker, "GET", target, headers)
        return msgspec.json.decode(body, type=type)

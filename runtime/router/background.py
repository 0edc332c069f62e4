"""Keeps a model loaded while it makes responses in the background, for which no request is open.

Knows when a model's process has no work, not whose work it is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from ..server.http.forwarding import ServerGone
from .model_row import Lease
from .model_server import ANSWER_S, Headers, ModelServer, whole_answer

LOOKS_S = 1.0
_FEWEST_LOOKS = 2  # a response is counted once its prompt is tokenized


class _Health(msgspec.Struct):
    """The counts of a model's `/health`. Without them, as for a client without a key, there is no work to wait for."""

    num_running: int = 0
    num_waiting: int = 0


class Background:
    """Leases that are held after their requests have ended, one for each model."""

    def __init__(self) -> None:
        self._held: dict[ModelServer, _Held] = {}

    def hold(self, lease: Lease[ModelServer], headers: Headers) -> None:
        """Keep a model loaded until it has computed all that it was asked for, or has ended.

        Args:
            lease: of the model; it is released.
            headers: of the request, whose key the model accepts.
        """
        if (held := self._held.get(lease.worker)) is not None:
            held.num_looks = 0
            lease.release()
            return
        held = self._held[lease.worker] = _Held(lease, headers)
        held.task = asyncio.get_running_loop().create_task(held.release_when_idle())
        held.task.add_done_callback(lambda _: self._held.pop(lease.worker))


@dataclass
class _Held:
    """A lease, the headers of its request, and the number of times in a row that its model had no work."""

    lease: Lease[ModelServer]
    headers: Headers
    num_looks: int = 0
    task: asyncio.Task[None] | None = None

    async def release_when_idle(self) -> None:
        """Ask the model for its work again and again, and release the lease when it has none."""
        try:
            while self.num_looks < _FEWEST_LOOKS:
                await asyncio.sleep(LOOKS_S)
                try:
                    async with asyncio.timeout(ANSWER_S):
                        _, body = await whole_answer(self.lease.worker, "GET", b"/health", self.headers)
                except TimeoutError:
                    continue
                health = msgspec.json.decode(body, type=_Health)
                self.num_looks = 0 if health.num_running or health.num_waiting else self.num_looks + 1
        except ServerGone:
            pass
        finally:
            self.lease.release()

"""Keeps a model loaded while it makes responses in the background, for which no request is open.

Knows when a model's process has no work, not whose work it is.
"""

from __future__ import annotations

import asyncio
from typing import Any

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
    """Leases that are held after their requests have ended."""

    def __init__(self) -> None:
        self._tasks = set[asyncio.Task[Any]]()

    def hold(self, lease: Lease[ModelServer], headers: Headers) -> None:
        """Release a lease once its model has computed all that it was asked for, or has ended.

        Args:
            headers: of the request, whose key its model accepts.
        """
        task = asyncio.get_running_loop().create_task(_release_when_idle(lease, headers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _release_when_idle(lease: Lease[ModelServer], headers: Headers) -> None:
    num_looks = 0
    try:
        while num_looks < _FEWEST_LOOKS:
            await asyncio.sleep(LOOKS_S)
            try:
                async with asyncio.timeout(ANSWER_S):
                    _, body = await whole_answer(lease.worker, "GET", b"/health", headers)
            except TimeoutError:
                continue
            health = msgspec.json.decode(body, type=_Health)
            num_looks = 0 if health.num_running or health.num_waiting else num_looks + 1
    except ServerGone:
        pass
    finally:
        lease.release()

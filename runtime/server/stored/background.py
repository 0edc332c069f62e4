"""Responses that are made without a connection: `"background": true` of `/v1/responses`.

Knows ids, tasks and the status of a stored response. `openai/background_responses.py` makes the responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Final

import msgspec

_LOST: Final = "the server stopped before the response ended, or could not store it; send the request again"


class StoredStatus(msgspec.Struct):
    """The progress of a stored response."""

    status: str = "completed"
    background: bool = False

    @classmethod
    def of(cls, response: bytes) -> StoredStatus:
        """Read it from a stored response."""
        return msgspec.json.decode(response, type=cls)

    @property
    def is_running(self) -> bool:
        """Return whether the response had not ended when it was stored."""
        return self.status == "in_progress"

    @property
    def can_be_continued(self) -> bool:
        """Return whether other responses can continue it."""
        return self.status in ("completed", "incomplete")


class BackgroundResponses:
    """The responses of this process that are being made in the background. Call it on the event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled = set[str]()

    async def begin(self, response_id: str, work: Coroutine[None, None, None]) -> None:
        """Start to run `work`, which stores the response when it ends."""
        self._tasks[response_id] = task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda task: self._forget(response_id))
        await asyncio.sleep(0)  # a task that is cancelled before it has started would not free its request

    def is_running(self, response_id: str) -> bool:
        """Return whether a response is being made here."""
        return response_id in self._tasks

    def is_cancelled(self, response_id: str) -> bool:
        """Return whether `cancel` stops a response, so that its task stores this; a server that stops does not."""
        return response_id in self._cancelled

    async def cancel(self, response_id: str) -> None:
        """Stop making a response, and wait until its last status is stored. What it has stored by then stays."""
        task = self._tasks.get(response_id)
        if task is not None:
            if response_id not in self._cancelled:  # a second time would interrupt its storing the status
                self._cancelled.add(response_id)
                task.cancel()
            await asyncio.wait([task])

    def _forget(self, response_id: str) -> None:
        self._tasks.pop(response_id, None)
        self._cancelled.discard(response_id)


def as_ended(response: bytes, status: str, error: str | None = None) -> bytes:
    """Return a stored response that will not end by itself, with its last status."""
    fields = msgspec.json.decode(response) | {"status": status}
    if error is not None:
        fields["error"] = {"code": "server_error", "message": error}
    return msgspec.json.encode(fields)


def as_cancelled(response: bytes) -> bytes:
    """Return a stored response as cancelled if it had not ended."""
    return as_ended(response, "cancelled") if StoredStatus.of(response).is_running else response


def as_lost(response: bytes) -> bytes:
    """Return a stored response as failed if its task is gone before it ended."""
    return as_ended(response, "failed", _LOST) if StoredStatus.of(response).is_running else response

"""Ollama's `/api/pull` and `/api/delete` for several models: clients add and remove models, if the operator allows it.

Knows names, states and progress lines; a `Library` knows which models exist and which ones clients can remove.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..server.errors import HTTPError, shaped
from ..server.http.request_body import decode_json, read_json
from ..server.models import unknown_model
from ..server.ollama.about import MAX_BODY_BYTES, delete_refused, pull_refused
from ..server.ollama.answer import MEDIA_TYPE
from ..server.ollama.names import spellings
from ..server.ollama.replies import StatusReply
from ..server.ollama.requests import NamedModel
from ..server.served import json_response
from .model_row import ModelSpec, Row
from .model_server import ModelServer
from .model_table import ModelTable

POLL_S = 0.2  # interval of progress lines
_DONE = StatusReply("success")


class Library(Protocol):
    """The models that clients pulled and can delete. Its methods run in threads."""

    def spec_of(self, name: str) -> ModelSpec:
        """Return how to load a model that is not served yet.

        Raises:
            HTTPError: 404, the name cannot be a model.
        """
        ...

    def has(self, name: str) -> bool:
        """Return whether a client pulled a model."""
        ...

    def add(self, spec: ModelSpec) -> None:
        """Record that a client pulled a model, so that it is served again after a restart."""
        ...

    def forget(self, spec: ModelSpec) -> None:
        """Remove the record of a pulled model."""
        ...

    def remove_artifact(self, spec: ModelSpec, served: Sequence[ModelSpec]) -> None:
        """Remove the artifact of a deleted model, unless one of the `served` models has the same."""
        ...


class Pulling:
    """The endpoints `/api/pull` and `/api/delete`.

    Args:
        library: models that clients can pull and delete; None: both are refused.
    """

    def __init__(self, table: ModelTable[ModelServer], library: Library | None) -> None:
        self._table, self._library = table, library
        self._pulls: dict[Row[ModelServer], asyncio.Task[None]] = {}
        self._deleting = asyncio.Lock()

    async def pull(self, request: Request) -> Response:
        """`POST /api/pull`: download, compile and load a model, and serve it from now on.

        The pull continues if the client disconnects.

        Raises:
            HTTPError: 403, the operator does not allow it; 404, the name cannot be a model.
            ModelUnavailable: it could not be loaded.
        """
        asked = await _asked(request)
        row = self._named(asked.model) or await self._begun(str(asked.model))
        task = self._pulls.get(row)  # it can end before the first line is written
        if asked.stream is False:
            if task is not None:
                await asyncio.shield(task)
            return json_response(_DONE)
        return StreamingResponse(self._lines(row, task, request.url.path), media_type=MEDIA_TYPE)

    async def delete(self, request: Request) -> Response:
        """`DELETE /api/delete`: remove a model that a client pulled, after its requests have ended.

        Raises:
            HTTPError: 403, no client pulled it; 404, there is no such model; 409, it is the only one.
        """
        asked = await _asked(request)
        async with self._deleting:  # of two requests that delete the last two models, one is refused
            row, library = await self._deletable(str(asked.model))
            await asyncio.to_thread(library.forget, row.spec)
            unloaded = self._table.remove(row)
        await unloaded
        served = [each.spec for each in self._table.rows]
        await asyncio.to_thread(library.remove_artifact, row.spec, served)
        return Response()

    async def _deletable(self, name: str) -> tuple[Row[ModelServer], Library]:
        """Return the model of a name, and the library that lists it as pulled by a client.

        Raises:
            HTTPError: 403, no client pulled it; 404, there is no such model; 409, it is the only one.
        """
        row = self._named(name)
        if row is None:
            raise unknown_model(name, [known for each in self._table.rows for known in each.spec.listed])
        if self._library is None or not await asyncio.to_thread(self._library.has, row.spec.name):
            raise delete_refused()
        if not [each for each in self._table.rows if each is not row and each not in self._pulls]:
            raise HTTPError(409, f"{row.spec.name} is the only model of this server; pull another one first")
        return row, self._library

    def _named(self, name: str | None) -> Row[ModelServer] | None:
        """Return the model with exactly this name, not one that serves any name."""
        row = self._table.named(name)
        names = () if row is None else (row.spec.name, *row.spec.aliases)
        return row if {*spellings(name or "")} & {*names} else None

    async def _begun(self, name: str) -> Row[ModelServer]:
        """Start to pull a model, unless another request already does."""
        if self._library is None:
            raise pull_refused()
        spec = await asyncio.to_thread(self._library.spec_of, name.removesuffix(":latest"))
        row = self._named(spec.name)
        if row is None:
            row = self._table.add(spec)
            task = self._pulls[row] = asyncio.create_task(self._load(row, self._library))
            task.add_done_callback(lambda task: self._ended(row, task))
        return row

    async def _load(self, row: Row[ModelServer], library: Library) -> None:
        """Load a model, which compiles it first. If that fails, remove it from the table."""
        try:
            (await self._table.lease(row)).release()
            await asyncio.to_thread(library.add, row.spec)
        except BaseException:
            await self._table.remove(row)
            raise

    def _ended(self, row: Row[ModelServer], task: asyncio.Task[None]) -> None:
        del self._pulls[row]
        if not task.cancelled():
            task.exception()  # logged by the table, and reported to the clients that wait

    async def _lines(self, row: Row[ModelServer], task: asyncio.Task[None] | None, path: str) -> AsyncGenerator[bytes]:
        """Yield progress lines until the model is served, or an error."""
        last: StatusReply = _DONE
        if task is not None:
            yield _line(StatusReply("pulling manifest"))
            while not task.done():
                if row.stage is not None and (now := _progress(row.stage, row.fraction)) != last:
                    yield _line(now)
                    last = now
                await asyncio.wait([task], timeout=POLL_S)
            if task.cancelled() or (error := task.exception()) is not None:
                failed = HTTPError(503, "the server is stopping") if task.cancelled() else error
                assert isinstance(failed, Exception)
                yield _line(shaped(failed, path)[1])
                return
        yield _line(_DONE)


def _progress(stage: str, fraction: float | None) -> StatusReply:
    """Return the progress of a stage in percent; Ollama counts bytes."""
    if fraction is None:
        return StatusReply(stage)
    return StatusReply(stage, total=100, completed=int(100 * fraction))


async def _asked(request: Request) -> NamedModel:
    asked = decode_json(await read_json(request, max_bytes=MAX_BODY_BYTES), NamedModel)
    if not asked.model:
        raise HTTPError(400, 'the body names no model; send {"model": NAME}', param="model")
    return asked


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"

"""`/v1/models` with the state of each model, and endpoints that load and unload a model.

Knows the table of models, and the description that each model returned when it was loaded.
"""

from __future__ import annotations

import time
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..server.about import ModelReply, created_at
from ..server.http.request_body import decode_json, read_json
from ..server.models import ANY_OF_SEVERAL, unknown_model
from ..server.openapi import Operation
from ..server.served import json_response
from .model_row import Row, State
from .model_server import ModelServer
from .model_table import ModelTable

MAX_BODY_BYTES = 64 << 10
T = TypeVar("T")


class ListedModel(ModelReply, kw_only=True):
    """A model of a server that loads models on demand. Facts that are unknown until it is loaded are unset."""

    max_input_tokens: int | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    state: State
    num_requests: int  # running ones, and those that wait for it to load
    memory_bytes: int | msgspec.UnsetType = msgspec.UNSET  # of weights, KV cache and states
    pinned: bool
    stage: str | msgspec.UnsetType = msgspec.UNSET  # stage of loading
    percent: int | msgspec.UnsetType = msgspec.UNSET  # progress of loading
    error: str | msgspec.UnsetType = msgspec.UNSET  # why loading failed, or its process ended, the last time


class ListedModels(msgspec.Struct):
    data: list[ListedModel]
    object: str = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class ModelRequest(msgspec.Struct):
    model: str


OPERATIONS = (
    Operation("post", "/models/load", "Load a model", ListedModel, ModelRequest),
    Operation("post", "/models/unload", "Unload a model when its requests have ended", ListedModel, ModelRequest),
)


class Listing:
    """The endpoints that list, load and unload models."""

    def __init__(self, table: ModelTable[ModelServer]) -> None:
        self._table = table
        self._created = int(time.time())
        self._described: dict[str, ModelReply] = {}  # by name; kept after the model is unloaded

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`: list all models with their states."""
        listed = [self.described(row, name) for row in self._table.rows for name in row.spec.listed]
        return json_response(ListedModels(listed, first_id=listed[0].id, last_id=listed[-1].id))

    async def describe_model(self, request: Request) -> Response:
        """`GET /v1/models/{model_id}`: describe one model."""
        name = request.path_params["model_id"]
        return json_response(self.described(self.named(name), name))

    async def load(self, request: Request) -> Response:
        """`POST /models/load`: load a model, and respond when it is loaded."""
        row = await self._row_of(request)
        (await self._table.lease(row)).release()
        return json_response(self.described(row, row.spec.name))

    async def unload(self, request: Request) -> Response:
        """`POST /models/unload`: unload a model, and respond when its requests have ended and it is unloaded."""
        row = await self._row_of(request)
        await self._table.unload(row)
        return json_response(self.described(row, row.spec.name))

    def named(self, name: str | None) -> Row[ModelServer]:
        """Return the model that a request names; the first if it names none.

        Raises:
            HTTPError: 404 if there is no such model.
        """
        row = self._table.named(name)
        if row is None:
            names = [listed for each in self._table.rows for listed in each.spec.listed]
            raise unknown_model(name, names, ANY_OF_SEVERAL)
        return row

    def described(self, row: Row[ModelServer], name: str) -> ListedModel:
        """Return the description of a model under one of its names."""
        if row.worker is not None:
            self._described |= row.worker.described
        known = self._described.get(name) or self._described.get(row.spec.name)
        context_length = row.spec.context_length if known is None else known.max_input_tokens
        return ListedModel(
            id=name,
            created=self._created,
            display_name=name,
            created_at=created_at(self._created),
            max_input_tokens=_or_unset(context_length),
            max_model_len=_or_unset(context_length),
            default_sampling=msgspec.UNSET if known is None else known.default_sampling,
            state=row.state,
            num_requests=row.num_requests,
            memory_bytes=_or_unset(row.bytes_taken or row.bytes_known or row.spec.needed_bytes),
            has_chat_template=msgspec.UNSET if known is None else known.has_chat_template,
            pinned=row.spec.is_pinned,
            parent=_or_unset(row.spec.parent_of(name)),
            stage=_or_unset(row.stage),
            percent=msgspec.UNSET if row.fraction is None else int(100 * row.fraction),
            error=_or_unset(row.error or row.spec.too_large),
        )

    async def _row_of(self, request: Request) -> Row[ModelServer]:
        body = await read_json(request, max_bytes=MAX_BODY_BYTES)
        return self.named(decode_json(body, ModelRequest).model)


def _or_unset(value: T | None) -> T | msgspec.UnsetType:
    return msgspec.UNSET if value is None else value

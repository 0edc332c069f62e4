"""Ollama's lists of models, `/api/tags` and `/api/ps`: descriptions by the loaded models, and names of the others.

Knows the key of the lists, not the fields of their entries.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..server.ollama.names import tagged
from ..server.ollama.replies import NEVER, timestamp
from .model_row import Row
from .model_server import Headers, ModelServer, answer_in_time
from .model_table import ModelTable

_LONGEST_S = 3e9  # a century: what stays longer has no date


class OllamaLists:
    """The endpoints `/api/tags` and `/api/ps`.

    Args:
        headers: headers for requests to the models, with an API key if there are any.
    """

    def __init__(self, table: ModelTable[ModelServer], headers: Headers) -> None:
        self._table, self._headers = table, headers

    async def tags(self, request: Request) -> Response:
        """`GET /api/tags`: list all models. Models that are not loaded have only names and a size."""
        rows = self._table.rows
        lists = await asyncio.gather(*(self._models_of(row, b"/api/tags") for row in rows))
        return _listed([model for row, models in zip(rows, lists, strict=True) for model in models or _unloaded(row)])

    async def loaded(self, request: Request) -> Response:
        """`GET /api/ps`: list the loaded models, and when each is unloaded."""
        rows = self._table.rows
        lists = await asyncio.gather(*(self._models_of(row, b"/api/ps") for row in rows))
        return _listed(
            [
                {**model, "expires_at": self._expires_at(row)}
                for row, models in zip(rows, lists, strict=True)
                for model in models
            ]
        )

    def _expires_at(self, row: Row[ModelServer]) -> str:
        left_s = self._table.expires_in_s(row)
        return timestamp(time.time() + max(0.0, left_s)) if left_s < _LONGEST_S else NEVER

    async def _models_of(self, row: Row[ModelServer], path: bytes) -> list[dict[str, Any]]:
        body = await answer_in_time(row.worker, path, self._headers)
        models: list[dict[str, Any]] = msgspec.json.decode(body).get("models", []) if body is not None else []
        return models


def _unloaded(row: Row[ModelServer]) -> list[dict[str, Any]]:
    names = [tagged(name) for name in row.spec.listed]
    size = row.bytes_known or row.spec.needed_bytes or 0
    return [{"name": name, "model": name, "size": size, "digest": "", "details": {}} for name in names]


def _listed(models: list[dict[str, Any]]) -> Response:
    return Response(msgspec.json.encode({"models": models}), media_type="application/json")

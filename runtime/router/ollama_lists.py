"""Ollama's lists of models, `/api/tags` and `/api/ps`: descriptions by the loaded models, and names of the others.

Knows the key of the lists, not the fields of their entries.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .model_row import Row
from .model_server import Headers, ModelServer, answer_in_time
from .model_table import ModelTable


class OllamaLists:
    """The endpoints `/api/tags` and `/api/ps`.

    Args:
        headers: headers for requests to the models, with an API key if there are any.
    """

    def __init__(self, table: ModelTable[ModelServer], headers: Headers) -> None:
        self._table, self._headers = table, headers

    async def tags(self, request: Request) -> Response:
        """`GET /api/tags`: list all models. Models that are not loaded have only names and a size."""
        lists = await asyncio.gather(*(self._models_of(row, b"/api/tags") for row in self._table.rows))
        return _listed(
            [model for row, models in zip(self._table.rows, lists, strict=True) for model in models or _unloaded(row)]
        )

    async def loaded(self, request: Request) -> Response:
        """`GET /api/ps`: list the loaded models."""
        lists = await asyncio.gather(*(self._models_of(row, b"/api/ps") for row in self._table.rows))
        return _listed([model for models in lists for model in models])

    async def _models_of(self, row: Row[ModelServer], path: bytes) -> list[dict[str, Any]]:
        body = await answer_in_time(row.worker, path, self._headers)
        models: list[dict[str, Any]] = msgspec.json.decode(body).get("models", []) if body is not None else []
        return models


def _unloaded(row: Row[ModelServer]) -> list[dict[str, Any]]:
    names = [name if ":" in name.rpartition("/")[2] else f"{name}:latest" for name in row.spec.listed]
    size = row.bytes_known or row.spec.needed_bytes or 0
    return [{"name": name, "model": name, "size": size, "digest": "", "details": {}} for name in names]


def _listed(models: list[dict[str, Any]]) -> Response:
    return Response(msgspec.json.encode({"models": models}), media_type="application/json")

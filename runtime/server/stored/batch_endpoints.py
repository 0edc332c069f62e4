"""`/v1/files` and `/v1/batches`: upload a file of requests, process it in idle time, and download the results.

Knows paths, forms and bodies. `files.py` and `batches.py` store the files and batches.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...cache.cache_namespace import CacheScope
from ...errors import InvalidParameter
from ..http.api_keys import api_key_of, client_of
from ..http.connection import header_of
from ..http.request_body import read_body, read_json
from ..models import Models
from ..request_fields import require_small
from ..request_log import record_of
from ..served import json_response
from ..unknown_fields import decode_body
from .batch_runner import BatchRunner
from .batches import WINDOW
from .forms import read_form
from .lists import Deleted, page, require_parameters
from .response_endpoints import stored_by

PURPOSES = ("batch", "user_data")
MAX_NAME = 256
BATCH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that batches can call, if the server has them."""


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/batches`."""

    ACTS_ON: ClassVar = frozenset({"metadata"})

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = WINDOW
    metadata: dict[str, str] | None = None


async def files(models: Models, request: Request) -> Response:
    """`GET /v1/files`: list the client's files. `POST`: upload a file."""
    stored, scope = stored_by(models), _scope(request)
    if request.method == "GET":
        purpose = request.query_params.get("purpose")
        found = [msgspec.to_builtins(each) for each in await stored.files.all(scope)]
        wanted = [each for each in found if purpose in (None, each["purpose"])]
        return json_response(page(wanted, request, "purpose"))
    require_parameters(request)
    with models.bodies.reading(client_of(request)) as room:
        most = models.options.max_body_bytes
        body = await read_body(request, max_bytes=most, room=room, is_one_value=False)
        form = await asyncio.to_thread(read_form, header_of(request.scope, b"content-type"), body)
    file, purpose = form.get("file"), form["purpose"].text if "purpose" in form else None
    if file is None or file.filename is None:
        raise InvalidParameter("the form has no file; send one as the field `file`", param="file")
    if purpose not in PURPOSES:
        raise InvalidParameter(f"purpose is {purpose!r:.80}; use {' or '.join(PURPOSES)}", param="purpose")
    return json_response(await stored.files.add(scope, file.filename[:MAX_NAME], purpose, file.content))


async def file(models: Models, request: Request) -> Response:
    """`GET /v1/files/{file_id}`: describe a file. `DELETE`: delete it."""
    require_parameters(request)
    kept, scope, file_id = stored_by(models).files, _scope(request), request.path_params["file_id"]
    if request.method == "GET":
        return json_response(await kept.get(scope, file_id))
    await kept.delete(scope, file_id)
    return json_response(Deleted(file_id, "file"))


async def file_content(models: Models, request: Request) -> Response:
    """`GET /v1/files/{file_id}/content`: return the bytes of a file."""
    require_parameters(request)
    content = await stored_by(models).files.content(_scope(request), request.path_params["file_id"])
    return Response(content, media_type="application/octet-stream")


class BatchEndpoints:
    """The endpoints of batches, which start the runner."""

    def __init__(self, runner: BatchRunner | None) -> None:
        self._runner = runner

    async def batches(self, models: Models, request: Request) -> Response:
        """`GET /v1/batches`: list the client's batches. `POST`: create one."""
        stored, scope = stored_by(models), _scope(request)
        if request.method == "GET":
            found = [msgspec.to_builtins(each) for each in await stored.batches.all(scope)]
            return json_response(page(found, request))
        require_parameters(request)
        body = await self._read(models, request)
        require_small("metadata", body.metadata)
        assert self._runner is not None, "a server that stores batches runs them"
        if body.endpoint not in self._runner.endpoints:
            known = " or ".join(self._runner.endpoints)
            raise InvalidParameter(f"endpoint is {body.endpoint!r:.80}; use {known}", param="endpoint")
        made = await stored.batches.create(scope, body.endpoint, body.input_file_id, body.metadata)
        self._runner.begin()
        return json_response(made)

    async def batch(self, models: Models, request: Request) -> Response:
        """`GET /v1/batches/{batch_id}`: return the state of a batch."""
        require_parameters(request)
        return json_response(await stored_by(models).batches.get(_scope(request), request.path_params["batch_id"]))

    async def cancel(self, models: Models, request: Request) -> Response:
        """`POST /v1/batches/{batch_id}/cancel`: cancel a batch."""
        require_parameters(request)
        stored, scope = stored_by(models), _scope(request)
        batch = await stored.batches.cancel(scope, request.path_params["batch_id"])
        assert self._runner is not None, "a server that stores batches runs them"
        self._runner.begin()  # it may have stopped; it ends the batch
        return json_response(batch)

    async def _read(self, models: Models, request: Request) -> BatchRequest:
        body = await read_json(request, max_bytes=models.options.max_body_bytes)
        value, ignored = decode_body(body, BatchRequest, is_strict=models.options.is_strict)
        record_of(request).ignored = ignored
        return value


def runner_of(models: Models, endpoints: Any) -> BatchRunner | None:
    """Return the batch runner of a server; None if it stores no batches."""
    if models.stored is None:
        return None
    known = {path: endpoints[path] for path in BATCH_PATHS if path in endpoints}
    return BatchRunner(models, models.stored, known)


def batch_routes(runner: BatchRunner | None) -> dict[tuple[str, ...], Any]:
    """Return the endpoints of files and batches by path and methods."""
    batches = BatchEndpoints(runner)
    return {
        ("/v1/files", "GET", "POST"): files,
        ("/v1/files/{file_id}", "GET", "DELETE"): file,
        ("/v1/files/{file_id}/content", "GET"): file_content,
        ("/v1/batches", "GET", "POST"): batches.batches,
        ("/v1/batches/{batch_id}", "GET"): batches.batch,
        ("/v1/batches/{batch_id}/cancel", "POST"): batches.cancel,
    }


def _scope(request: Request) -> CacheScope:
    return CacheScope(api_key_of(request))

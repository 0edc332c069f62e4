"""The application of a server with several models: forwards each request to the process of the model that it names.

Knows the paths of a model's server and where a request names its model, not what any endpoint does: requests to paths
that are not the router's own are forwarded unchanged. A POST loads its model, unless its path has an id: what has an id
is in the process of a loaded model. Other methods, which only read or delete, load no model.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from ..errors import InvalidParameter
from ..server.about import tell_version
from ..server.app import OF_A_MODEL, OF_ALL
from ..server.errors import HTTPError
from ..server.http.access import App, Endpoint, access_middleware
from ..server.http.api_keys import api_key_of, client_of
from ..server.http.connection import while_connected
from ..server.http.forwarding import Forwarded, ServerGone
from ..server.http.request_body import MAX_BODIES, BodyRoom, decode_repaired, is_json, read_body, require_json
from ..server.ollama.about import tell_version as tell_ollamas_version
from ..server.ollama.keep_alive import keep_alive_s
from ..server.ollama.replies import OllamaChatReply, OllamaGenerateReply, OllamaMessageReply, OllamaReply, timestamp
from ..server.openapi import OpenAPI
from ..server.page import page_routes
from ..server.request_log import METRICS_PATHS, RequestLog, record_of
from ..server.served import json_response
from ..server.server_options import ServerOptions
from ..server.stored.batch_endpoints import batch_routes
from .background import Background
from .listing import OPERATIONS, Listing
from .model_row import Lease, Row
from .model_server import Headers, ModelServer, whole_answer
from .model_table import ModelTable
from .ollama_lists import OllamaLists
from .overview import Overview
from .pulling import Library, Pulling

MAX_BYTES_AT_ONCE = 64 << 10  # longer bodies are decoded in a thread
RETRY_AFTER_S = 1
_ASKS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # methods that load no model
_OLLAMA = "/api/"
_IN_BACKGROUND = "/responses"  # the requests that can ask for a reply after they have ended
_BATCHES = "/batches"  # the requests that always do
_FORWARDED = (*((path, "POST") for path in OF_A_MODEL), *OF_ALL, *batch_routes(None))
"""Paths and methods of a model's server. Those that the router has, too, it does not forward."""
_EMPTY = (b"", b"null", b'""', b"[]")  # a prompt or messages in JSON that generate nothing
_LOAD_OR_UNLOAD: Mapping[str, Callable[..., OllamaReply]] = {
    "/api/generate": OllamaGenerateReply,
    "/api/chat": partial(OllamaChatReply, message=OllamaMessageReply()),
}
"""Endpoints that, without a prompt, only load or unload a model, and their replies."""
_ADDED = (b"date", b"server", b"x-request-id")  # added to every response of the router
_OWN_HEADERS = (b"origin", b"forwarded", b"x-request-id")  # not forwarded; the router has checked the first


def router_app(table: ModelTable[ModelServer], options: ServerOptions, library: Library | None = None) -> Starlette:
    """Return an ASGI application that serves the models of a table, and runs the table from startup to shutdown.

    Args:
        library: what clients may pull and delete; None: nothing.

    Raises:
        InvalidParameter: an API key or an origin is invalid.
    """
    keys = tuple(options.api_keys)
    headers: Headers = [(b"authorization", b"Bearer " + keys[0].encode())] if keys else []
    responses = Counter[tuple[str, str]]()
    ollama = OllamaLists(table, headers)
    overview = Overview(table, headers, has_keys=bool(keys), responses=responses)
    listing = Listing(table)
    pulling = Pulling(table, library)
    forwarder = Forwarder(table, listing, max_body_bytes=options.max_body_bytes)
    described = OpenAPI(has_keys=bool(keys), has_choice=True, more=OPERATIONS)

    def route(path: str, answer: Callable[[Request], Any], *methods: str) -> Route:
        return Route(path, Endpoint(answer), methods=methods or ("GET",))

    routes = [
        *(route(path, listing.list_models) for path in ("/v1/models", "/models")),
        route("/v1/models/{model_id:path}", listing.describe_model),
        route("/models/load", listing.load, "POST"),
        route("/models/unload", listing.unload, "POST"),
        route("/v1/cache", forwarder.forget, "DELETE"),
        *(route(path, overview.health) for path in ("/health", "/health/ready")),
        route("/health/live", overview.live),
        route("/api/tags", ollama.tags),
        route("/api/ps", ollama.loaded),
        route("/api/version", lambda request: tell_ollamas_version(None, request)),  # type: ignore[arg-type]
        route("/api/pull", pulling.pull, "POST"),
        route("/api/delete", pulling.delete, "DELETE"),
        *(route(path, overview.metrics) for path in METRICS_PATHS),
        route("/version", lambda request: tell_version(None, request)),  # type: ignore[arg-type]
        route("/openapi.json", described.answer),
        *page_routes(),
    ]
    log = Middleware(RequestLog, routes=[*routes], responses=responses)
    routes += [route(path, forwarder.forward, *methods) for path, *methods in _FORWARDED]

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(table.run())
        try:
            yield
        finally:
            task.cancel()
            await table.close()

    return App(routes=routes, middleware=[log, *access_middleware(options)], lifespan=running)


class Forwarder:
    """Forwards requests to the processes of models."""

    def __init__(self, table: ModelTable[ModelServer], listing: Listing, *, max_body_bytes: int) -> None:
        self._table, self._listing, self._max_body_bytes = table, listing, max_body_bytes
        self._bodies = BodyRoom(MAX_BODIES * max_body_bytes)
        self._background = Background()

    async def forward(self, request: Request) -> Response:
        """Return the response of the model that a request names.

        A request that names none goes to the first model. If that responds 404, as to an id that another model made,
        the other loaded models are tried in turn.

        Raises:
            HTTPError: 404 if there is no such model, 409 if it is not loaded and the request does not load models,
                503 if its process ended.
            ModelUnavailable: it could not be loaded.
        """
        with self._bodies.reading(client_of(request)) as room:
            most = self._max_body_bytes
            body = bytes(await read_body(request, max_bytes=most, room=room, is_one_value=is_json(request)))
            named = await _read(request, body)
            name = named.model_of(request)
            rows = self._rows_of(request, name)
            if named.only_unloads(request) and rows[0].state == "unloaded":
                return _unloaded(request, name or rows[0].spec.name)
            return await while_connected(request.receive, self._first_found(rows, request, body, named))

    async def forget(self, request: Request) -> Response:
        """`DELETE /v1/cache`: clear the cache of the named model, or of all; return the sum of their counts.

        A model with a store on disk is loaded for that.
        """
        name = request.query_params.get("model")
        named = self._table.rows if name is None else (self._listing.named(name),)
        rows = [row for row in named if row.state != "unloaded" or _has_stored(row)]
        headers = _headers_of(request)

        async def forget(row: Row[ModelServer]) -> tuple[int, bytes]:
            lease = await self._table.lease(row, is_use=False)
            try:
                return await whole_answer(lease.worker, "DELETE", _target_of(request, row), headers)
            except ServerGone as error:
                raise _gone(row) from error
            finally:
                lease.release()

        answers = await asyncio.gather(*map(forget, rows), return_exceptions=True)
        sums = Counter[str]({"num_freed_pages": 0, "num_kept_pages": 0, "num_discarded_pages": 0})
        for answer in answers:  # only now: one model's failure must not keep the others from clearing
            if isinstance(answer, BaseException):
                raise answer
            status, body = answer
            if status != 200:
                return Response(body, status, media_type="application/json")
            sums.update({key: number for key, number in msgspec.json.decode(body).items() if key != "object"})
        return JSONResponse({**sums, "object": "cache.cleared"})

    def _rows_of(self, request: Request, name: str | None) -> Sequence[Row[ModelServer]]:
        """Return the models to try, in order."""
        loads = _loads_model(request)
        present = [row for row in self._table.rows if row.state == "loaded" or (not loads and row.worker is not None)]
        if name is None:
            default = self._table.rows[0]
            rows = [default, *(row for row in present if row is not default)] if loads else present
            if not rows:
                message = f"no model is loaded that could answer {request.url.path}; name one with ?model=, and load it"
                raise HTTPError(404, message, code="not_found")
            return rows
        row = self._listing.named(name)
        if not loads and row not in present:
            message = f"{name} is {row.state}, and this request does not load models; send POST /models/load first"
            raise HTTPError(409, message, param="model", code="model_not_loaded")
        return [row]

    async def _first_found(
        self, rows: Sequence[Row[ModelServer]], request: Request, body: bytes, named: _Named
    ) -> Response:
        """Return the first response that is not 404, or the last model's 404."""
        for row in rows:
            lease = await self._table.lease(row, is_use=_loads_model(request))
            messages = lease.worker.ask(request.method, _target_of(request, row), _headers_of(request), body)
            is_forwarded = False
            try:
                start = await anext(messages)
                if start["status"] == 404 and row is not rows[-1]:
                    continue
                is_forwarded = True
                record_of(request).is_forwarded = True
                answer = _whole(start, messages, lambda: _note_end(request))
                return Forwarded(answer, _gone(row), partial(self._ended, lease, named, request))
            except ServerGone as error:
                raise _gone(row) from error
            finally:
                if not is_forwarded:
                    await messages.aclose()
                    lease.release()
        raise AssertionError("there is a model to try")

    def _ended(self, lease: Lease[ModelServer], named: _Named, request: Request) -> None:
        path = request.url.path
        is_batch = path.endswith(_BATCHES) and _loads_model(request)
        if is_batch or (named.background and path.endswith(_IN_BACKGROUND)):  # also "true", which models accept
            self._background.hold(lease, _headers_of(request), api_key_of(request), is_batch=is_batch)
        else:
            lease.release()
        if (seconds := named.keep_alive_s) is not None:
            self._table.keep_alive(lease.row, seconds)


def _unloaded(request: Request, name: str) -> Response:
    """Return the reply of a model's server to a request that only unloads it."""
    reply = _LOAD_OR_UNLOAD[request.scope["path"]]
    return json_response(reply(model=name, created_at=timestamp(time.time()), done=True, done_reason="unload"))


def _loads_model(request: Request) -> bool:
    """Return whether a request loads its model: it creates something, and does not change what has an id."""
    return request.method not in _ASKS and not request.path_params


async def _whole(
    start: Message, messages: AsyncGenerator[Message], broken: Callable[[], None]
) -> AsyncGenerator[Message]:
    """Yield all messages of a response whose first message has arrived."""
    headers = [header for header in start["headers"] if header[0] not in _ADDED]
    async with aclosing(messages):
        yield {**start, "headers": headers}
        try:
            async for message in messages:
                yield message
        except ServerGone:
            broken()
            raise


def _note_end(request: Request) -> None:
    """Let the router log the request, because the model's process has ended and cannot."""
    record = record_of(request)
    record.is_forwarded, record.error = False, "model_gone"


class _Named(msgspec.Struct):
    """The fields of a body that the router reads. `name` is Ollama's older name of `model`."""

    model: object = None
    name: object = None
    keep_alive: object = None
    background: object = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()

    def model_of(self, request: Request) -> str | None:
        """Return the model that the query or the body names, or None."""
        in_body = self.model or (self.name if request.url.path.startswith(_OLLAMA) else None)
        name = request.query_params.get("model", in_body)
        return name if isinstance(name, str) and name else None

    def only_unloads(self, request: Request) -> bool:
        """Return whether the request does nothing but unload its model."""
        path = request.scope["path"]
        if path not in _LOAD_OR_UNLOAD or self.keep_alive_s != 0:
            return False
        return bytes(self.prompt if path == "/api/generate" else self.messages) in _EMPTY

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds for which the model stays loaded after this request. None if the request does not set them."""
        if isinstance(self.keep_alive, bool) or not isinstance(self.keep_alive, int | float | str):
            return None
        with suppress(InvalidParameter):  # the model's own server reports it
            return keep_alive_s(self.keep_alive)
        return None


async def _read(request: Request, body: bytes) -> _Named:
    """Decode the fields of a body that the router reads. A body that is not JSON, such as a form, has none.

    Raises:
        HTTPError: 400 if the body is compressed.
        msgspec.DecodeError: it is declared as JSON, and is not; no model is loaded for it.
    """
    if not body or request.method in _ASKS or not is_json(request):
        return _Named()
    require_json(request)
    named = _named(body) if len(body) <= MAX_BYTES_AT_ONCE else await run_in_threadpool(_named, body)
    if not request.url.path.startswith(_OLLAMA):
        named.keep_alive = None
    return named


def _named(body: bytes) -> _Named:
    return decode_repaired(body, _Named)[0]


def _target_of(request: Request, row: Row[Any]) -> bytes:
    """Return path and query for a model's own server. Only a model with adapters expects `model` there."""
    path: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    if unquote(path) != request.scope["path"]:  # a root path was removed
        path = quote(request.scope["path"]).encode()
    if b"model" in query and not row.spec.loras:
        query = urlencode(
            [(key, value) for key, value in request.query_params.multi_items() if key != "model"]
        ).encode()
    return path + b"?" + query if query else path


def _headers_of(request: Request) -> Headers:
    """Return a request's headers for a model's own server, with the client's address, for fair scheduling there."""
    kept = [
        (name, value)
        for name, value in request.scope["headers"]
        if name not in _OWN_HEADERS and not name.startswith(b"x-forwarded-")
    ]
    address = b"" if request.client is None else request.client.host.encode()
    return [*kept, (b"x-forwarded-for", address), (b"x-request-id", record_of(request).request_id.encode())]


def _has_stored(row: Row[Any]) -> bool:
    return row.spec.store is not None and Path(row.spec.store).exists()


def _gone(row: Row[Any]) -> HTTPError:
    message = f"the process of {row.spec.name} ended; send the request again"
    return HTTPError(503, message, param="model", code="model_gone", headers={"Retry-After": str(RETRY_AFTER_S)})

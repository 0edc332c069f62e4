"""Serve several replicas as one server: a request goes to the replica that has its prefix, never to a dead one.

An ASGI application that answers for all replicas, each of which is the whole server of one engine. Knows HTTP and the
`Replica` protocol; not what carries requests to replicas, or how these are started.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from ...cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity
from ...cache.why_not_more import MatchPolicy
from ...errors import RadixLMError
from ...server.cache import PARAMETERS
from ...server.errors import HTTPError, answer
from ...server.http.access import access_middleware
from ...server.http.api_keys import api_key_of, client_of
from ...server.http.connection import ClientGone
from ...server.http.forwarding import Forwarded, ServerGone
from ...server.http.request_body import MAX_BODIES, BodyRoom, read_body
from ...server.server_options import ServerOptions
from .asgi_messages import plain_scope
from .prefix_router import PrefixRouter, RoutedPrompt, RouterPolicy

REPLICA_HEADER = "x-radixlm-replica"  # names the replica that answered; in a request, the one that must answer
RETRY_S = 2  # the value of Retry-After while no replica lives
MAX_TRIES = 2  # replicas that a request is sent to, so that one that kills replicas kills at most two
MAX_BYTES_AT_ONCE = 64 << 10  # longer bodies are decoded in a thread
_METHODS = ["GET", "POST", "DELETE", "OPTIONS"]


class ReplicaGone(ServerGone):
    """An error of a replica that died, or does not accept requests."""


class Replica(Protocol):
    """A server in another process."""

    def ask(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Yield the messages of the replica's response; if closed early, cancel the request there.

        Raises:
            ReplicaGone: the replica does not accept the request, or dies while it answers.
        """
        ...

    async def wait_until_ready(self) -> None:
        """Return when the replica accepts requests, however long that takes."""
        ...


class ReplicaFront:
    """Counts the requests of every replica, and decides which replica gets the next one."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        *,
        policy: RouterPolicy | None = None,
        max_body_bytes: int = 16 << 20,
        match: MatchPolicy = "text",
    ) -> None:
        self._replicas = replicas
        self._router = PrefixRouter(replicas, policy)
        self._namespaces = CacheNamespaces(ModelIdentity())
        self._max_body_bytes, self._bodies = max_body_bytes, BodyRoom(MAX_BODIES * max_body_bytes)
        self._match = match  # the engines', for requests that do not set one
        self._loads = dict.fromkeys(replicas, 0)
        self._returning: dict[str, asyncio.Task[None]] = {}  # dead ones, until they accept requests again

    def app(
        self, api_keys: Sequence[str] = (), *, hosts: Sequence[str] = (), cors_origins: Sequence[str] = ()
    ) -> Starlette:
        """Return the application; `api_keys`, `hosts` and `cors_origins` as in `create_app`.

        `/metrics` and `GET /v1/cache` describe one replica: the request's `REPLICA_HEADER` chooses it, and the
        response's names it.
        """
        routes = [
            Route("/health", partial(self._health, has_keys=bool(api_keys)), methods=["GET"]),
            Route("/v1/cache", self._forget_everywhere, methods=["DELETE"]),
            Route("/{path:path}", self._forward, methods=_METHODS),
        ]
        clients = ServerOptions(api_keys=api_keys, hosts=hosts, cors_origins=cors_origins)
        app = Starlette(routes=routes, middleware=access_middleware(clients))
        for kind in (RadixLMError, Exception, 404, 405):
            app.add_exception_handler(kind, answer)
        for gone in (ClientGone, ClientDisconnect):
            app.add_exception_handler(gone, _nobody_listens)
        return app

    async def _health(self, request: Request, *, has_keys: bool) -> Response:
        """Answer "ready" while a replica accepts requests. With keys, only authorized clients see the replicas."""
        living = self._living()
        replicas = {
            name: {"status": "ready" if name in living else "gone", "num_requests": load}
            for name, load in self._loads.items()
        }
        if has_keys and api_key_of(request) is None:
            replicas = {}
        status = "ready" if len(living) == len(self._loads) else "degraded" if living else "gone"
        return JSONResponse({"status": status, "replicas": replicas}, 200 if living else 503)

    async def _forget_everywhere(self, request: Request) -> Response:
        """Tell every replica to forget, and add up their numbers."""
        scope = _forwarded_scope(request)
        answers = [*filter(None, await asyncio.gather(*(self._read_response(name, scope) for name in self._living())))]
        if not answers:
            raise _no_replica()
        sums: Counter[str] = Counter()
        for status, body in answers:
            if status != 200:
                return Response(body, status, media_type="application/json")
            sums.update({key: number for key, number in msgspec.json.decode(body).items() if key != "object"})
        of = CacheScope(api_key_of(request), *(request.query_params.get(name) for name in PARAMETERS))
        self._router.forget_namespace(self._namespaces.of(of))
        return JSONResponse({**sums, "object": "cache.cleared"})

    async def _forward(self, request: Request) -> Response:
        with self._bodies.reading(client_of(request)) as room:
            body = bytes(await read_body(request, max_bytes=self._max_body_bytes, room=room))
        api_key, most = api_key_of(request), self._router.max_text_bytes
        read = partial(RoutedPrompt.of, body, api_key, self._namespaces, most, match=self._match)
        prompt = read() if len(body) <= MAX_BYTES_AT_ONCE else await run_in_threadpool(read)
        answer = self.answer(_forwarded_scope(request), body, prompt, request.headers.get(REPLICA_HEADER))
        gone = HTTPError(503, "the replica died while it answered; send the request again", code="replica_gone")
        return Forwarded(answer, gone)

    async def answer(
        self, scope: Mapping[str, Any], body: bytes, prompt: RoutedPrompt, wanted: str | None
    ) -> AsyncGenerator[Message]:
        """Yield the response of a living replica. If it dies before that, send the request to another, once.

        Raises:
            HTTPError: 503 if no replica lives, or `MAX_TRIES` died; 404 if the wanted replica is unknown.
            ReplicaGone: the replica died while it answered.
        """
        if wanted is not None and wanted not in self._replicas:
            raise HTTPError(404, f"there is no replica {wanted!r:.100}; /health names them", code="replica_not_found")
        for num_tried in count():
            loads = {name: self._loads[name] for name in self._living() if wanted in (None, name)}
            if not loads:
                raise _no_replica()
            if num_tried == MAX_TRIES:
                advice = f"{num_tried} replicas died or froze while they had this request; it is sent to no other"
                raise HTTPError(503, advice, code="replica_gone")
            name = self._router.choose(prompt.namespace, prompt.text, loads)
            self._router.record(name, prompt.namespace, prompt.text)
            has_begun = False
            try:
                async with aclosing(self._ask(name, scope, body)) as messages:
                    async for message in messages:
                        has_begun = True
                        yield message
                return
            except ReplicaGone:
                self._exclude_until_return(name)
                if has_begun:
                    raise

    async def _ask(self, name: str, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message]:
        """Yield one replica's messages; the request counts as its load meanwhile."""
        self._loads[name] += 1
        try:
            async with aclosing(self._replicas[name].ask(scope, body)) as batches:
                async for batch in batches:
                    for message in batch:
                        if message["type"] == "http.response.start":
                            header = (REPLICA_HEADER.encode(), name.encode())
                            message = {**message, "headers": [*message.get("headers", ()), header]}
                        yield message
        finally:
            self._loads[name] -= 1

    async def _read_response(self, name: str, scope: Mapping[str, Any]) -> tuple[int, bytes] | None:
        """Return status and body of a replica's response; None if it died, and so forgot everything."""
        try:
            start, *parts = [message async for message in self._ask(name, scope, b"")]
        except ReplicaGone:
            self._exclude_until_return(name)
            return None
        return start["status"], b"".join(part.get("body", b"") for part in parts)

    def _living(self) -> list[str]:
        """Return the names of the replicas that take requests."""
        return [name for name in self._replicas if name not in self._returning]

    def _exclude_until_return(self, name: str) -> None:
        """Send a dead replica no requests until it has returned with an empty cache."""
        if name not in self._returning:
            self._router.forget(name)
            self._returning[name] = asyncio.create_task(self._await_return(name))

    async def _await_return(self, name: str) -> None:
        """Wait until a replica is ready again; then requests are sent to it as before."""
        try:
            await self._replicas[name].wait_until_ready()
        finally:
            del self._returning[name]


def _forwarded_scope(request: Request) -> dict[str, Any]:
    """Return the scope for a replica, without the page's origin, which the front has already checked."""
    scope = plain_scope(request.scope)
    return scope | {"headers": [(name, value) for name, value in scope["headers"] if name != b"origin"]}


def _no_replica() -> HTTPError:
    advice = f"no replica takes requests now; send it again in {RETRY_S} s"
    return HTTPError(503, advice, code="no_replica", headers={"Retry-After": str(RETRY_S)})


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=499)

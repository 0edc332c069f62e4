"""Serve several engines as a Ray Serve application with the server's API: `pip install radixlm[ray]`.

    serve run radixlm.runtime.extras.ray.ray_app:app artifact=/models/smollm2.radixlm num_replicas=4

Each engine is a deployment of one replica, so that the front itself decides which engine gets a request. Serve places
the replicas, watches their health and restarts dead ones. Knows Ray; `replica_front.py` decides where requests go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, get_args

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp, Message

from ...cache.why_not_more import MatchPolicy
from ...engine.engine_options import EngineOptions
from ...errors import EngineError
from ...fields import fields_of
from ...malloc_arenas import share_one_arena
from ...server.http.access import LOCAL_HOSTS
from ...server.truncation import Truncation
from .asgi_messages import answer_of
from .prefix_router import RouterPolicy
from .replica_front import ReplicaFront, ReplicaGone

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    from ...engine.engine import Engine

ACCEPT_S = 10.0  # a replica that does not accept a request within this time counts as dead
MAX_ONGOING_REQUESTS = 10_000  # of a replica: its engine has its own queue, and reports when that is full
MAX_STALL_S = 60.0
_LISTS = frozenset({"api_keys", "hosts", "cors_origins"})  # arguments with several values
_GROUPS = ("engine", "serve")  # flags of `radixlm serve`; a store or a log belongs to one process
_OWN = {"kv_log", "kv_log_bytes"}
_FIELDS = {
    field.about.flag.name.removeprefix("--").replace("-", "_"): field
    for name, field in fields_of(EngineOptions).items()
    if field.about.flag is not None and field.about.flag.group in _GROUPS and name not in _OWN
}
_KNOWN = {*_FIELDS, *_LISTS, "artifact", "num_replicas", "num_cpus", "truncation"}

OpenEngine = Callable[[], "Engine"]
"""Open a replica's engine in the replica's process; cloudpickle sends it there."""


def app(arguments: Mapping[str, str]) -> Application:
    """Build the application that `serve run` starts.

    `artifact` is required. The engine's flags of `radixlm serve` are allowed, `kv_cache_gb=4` for `--kv-cache-gb 4`,
    except those of files. So are `truncation`; `num_replicas`; `num_cpus`, which Ray reserves for each replica; and,
    with commas between their values, `api_keys`, `cors_origins` and `hosts`, the names that requests can be sent to
    (`*`: any).

    Raises:
        ValueError: like `engine_options` and `front_options`.
    """
    options = engine_options(arguments)
    artifact = arguments["artifact"]

    def open_engine() -> Engine:
        from ...engine.engine import Engine

        return Engine(artifact, **options)

    return build_app(
        open_engine,
        num_replicas=int(arguments.get("num_replicas", 2)),
        match=options.get("match", "text"),
        truncation=_one_of(arguments, "truncation", "none", get_args(Truncation)),
        num_cpus=float(arguments.get("num_cpus", 1)),
        **front_options(arguments),
    )


def engine_options(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of each replica's engine, from the arguments of `app`.

    Raises:
        ValueError: an argument is missing or unknown, or its value is not allowed.
    """
    if "artifact" not in arguments or not set(arguments) <= _KNOWN:
        raise ValueError(f"got {', '.join(sorted(arguments)) or 'nothing'}; give artifact=, and only {sorted(_KNOWN)}")
    options: dict[str, Any] = {each.name: each.about.flag.default for each in _FIELDS.values() if each.about.flag}
    options |= {_FIELDS[name].name: _FIELDS[name].parsed(text) for name, text in arguments.items() if name in _FIELDS}
    options = {name: value for name, value in options.items() if value is not None}
    EngineOptions(**options)  # validates before anything is deployed
    return options


def front_options(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the front that restrict its clients, from the arguments of `app`.

    Raises:
        ValueError: a list is empty, or has an empty value.
    """
    options: dict[str, Any] = {}
    for name in _LISTS & set(arguments):
        options[name] = tuple(arguments[name].split(","))
        if not all(options[name]):
            raise ValueError(f"{name}= is {arguments[name]!r}; give values with commas between them, or leave it out")
    if options.get("hosts") == ("*",):
        options["hosts"] = ()
    return options


def _one_of(arguments: Mapping[str, str], name: str, default: str, allowed: Sequence[str]) -> Any:
    """Return an argument, or `default` without it; raise ValueError if it is not an allowed value."""
    value = arguments.get(name, default)
    if value not in allowed:
        raise ValueError(f"{name}= is {value!r}; use one of {', '.join(allowed)}")
    return value


def build_app(
    open_engine: OpenEngine,
    *,
    num_replicas: int = 2,
    api_keys: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    cors_origins: Sequence[str] = (),
    policy: RouterPolicy | None = None,
    num_cpus: float = 1,
    match: MatchPolicy = "text",
    truncation: Truncation = "none",
) -> Application:
    """Build a front and `num_replicas` engines behind it, for `serve.run`.

    Args:
        hosts: names that requests can be sent to; empty: any; None: this machine's own, or any if there are keys.
            Ray may listen on addresses that others reach: they must use a key, or a name that is given here.
        match: match policy of the engines. With `off` the front remembers no prompt, either.
        truncation: like in `create_app`.
    """
    if hosts is None:
        hosts = () if api_keys else LOCAL_HOSTS
    names = [f"engine-{number}" for number in range(num_replicas)]
    engines = [
        serve.deployment(
            _EngineReplica,
            name=name,
            num_replicas=1,
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            ray_actor_options={"num_cpus": num_cpus},
        ).bind(open_engine, tuple(api_keys), truncation)
        for name in names
    ]

    def front_app() -> ASGIApp:
        """Make the front in its own process, which can get the engines' handles."""
        of = serve.get_replica_context().app_name
        replicas = {name: _RayReplica(serve.get_deployment_handle(name, app_name=of)) for name in names}
        front = ReplicaFront(replicas, policy=policy, match=match)
        return front.app(api_keys, hosts=hosts, cors_origins=cors_origins)

    front = serve.deployment(
        serve.ingress(front_app)(),
        name="front",
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(*engines)


class _EngineReplica:
    """An engine and its whole server, without a socket; warmed up when it is made."""

    def __init__(self, open_engine: OpenEngine, api_keys: Sequence[str], truncation: Truncation = "none") -> None:
        from ...server import create_app

        share_one_arena()
        self._engine = open_engine()
        self._app = create_app(self._engine, api_keys=api_keys, tells_cached_text=bool(api_keys), truncation=truncation)
        self._engine.warm_up()  # Serve sends requests once the replica is made

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Yield an empty batch at once, to confirm the request; then the response's messages."""
        yield []
        async with aclosing(answer_of(self._app, dict(scope), body)) as batches:
            async for batch in batches:
                yield batch

    def check_health(self) -> None:
        """Raise if the engine died or stalls; Serve then restarts the replica."""
        stats = self._engine.stats()
        if not stats.alive or stats.stalled_s > MAX_STALL_S:
            raise RuntimeError(f"the engine has not got on for {stats.stalled_s:.0f} s")


class _RayReplica:
    """A `Replica` behind a deployment's handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def ask(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Send a request to the replica, and yield the ASGI messages of its response in batches.

        Raises:
            ReplicaGone: the replica died, or did not accept the request in `ACCEPT_S`.
            EngineError: its server raised an error without a response.
        """
        batches = self._handle.options(method_name="answer", stream=True).remote(dict(scope), body)
        is_whole = False
        try:
            yield await asyncio.wait_for(anext(aiter(batches)), ACCEPT_S)
            async for batch in batches:
                yield batch
            is_whole = True
        except RayTaskError as error:  # it lives, and its server raised without a response
            raise EngineError(f"the replica failed: {error.cause}") from error
        except (RayError, RayServeException, TimeoutError) as error:
            raise ReplicaGone(f"{type(error).__name__}: {error}") from error
        finally:
            if not is_whole:
                batches.cancel()

    async def wait_until_ready(self) -> None:
        """Check the replica's health once a second until it is well."""
        while True:
            try:
                await self._handle.check_health.remote()
                return
            except (RayError, RayServeException):
                await asyncio.sleep(1)

"""The models of one server, by name: which of them answers a request, and reading the body that says so.

Knows names and bodies, not what any endpoint does with them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..cache.why_not_more import MatchPolicy
from ..errors import InvalidParameter
from .errors import HTTPError
from .http.door import client_of
from .http.request_body import MAX_BODIES, BodyRoom, read_json
from .lanes import reading_lane
from .ollama.names import spellings
from .request_log import record_of
from .served import Served
from .server_options import ServerOptions
from .stored.stored import Stored
from .unknown_fields import LeaveOut, decode_body

if TYPE_CHECKING:
    from ..engine.engine import Engine

Body = TypeVar("Body")
Asked = TypeVar("Asked")


@dataclass(frozen=True)
class ModelEndpoint(Generic[Body, Asked]):
    """An endpoint of the model that a request's body names.

    Args:
        body: the type of the body, with a field `model`.
        prepare: makes of a body what is asked of the model; in a thread where the body is long.
        answer: answers that; `errors.describe` knows every error that it raises.
        max_bytes: may lower the server's limit of bodies.
        leave_out: as in `decode_body`.
    """

    body: type[Body]
    prepare: Callable[[Served, Request, Body], Asked]
    answer: Callable[[Served, Request, Asked], Awaitable[Response]]
    max_bytes: int | None = None
    leave_out: LeaveOut | None = None


def unknown_model(asked: str | None, names: Iterable[str]) -> HTTPError:
    """The answer to a request for a model that is none of `names`."""
    known = " and ".join(map(repr, names))
    message = (
        f"there is no model {asked!r:.200} here; this server has {known}. It answers to any name where it is started "
        "with --model-id '*'"
    )
    return HTTPError(404, message, param="model", code="model_not_found")


class Models:
    """All models of a server, the first of which answers requests that name none. The only thing that the application
    owns.

    Args:
        options: of the server, whatever the model.
        stored: what clients leave on it; None: nothing is kept.

    Raises:
        InvalidParameter: there is none, or two have a name in common.
    """

    def __init__(self, rows: Sequence[Served], options: ServerOptions, stored: Stored | None = None) -> None:
        if not rows:
            raise InvalidParameter("there is no model to serve; give one")
        self.rows = tuple(rows)
        self.adapted = tuple(each for served in rows for each in served.adapted)
        self._by_name = {name: served for served in self.all for name in served.names}
        self._any = next((served for served in rows if served.takes_any), None)
        names = [name for served in self.all for name in served.names]
        if len(self._by_name) < len(names) or sum(served.takes_any for served in rows) > 1:
            raise InvalidParameter(f"two models have a name in common, of {', '.join(map(repr, names))}; rename one")
        self.options, self.stored = options, stored
        self.bodies = BodyRoom(MAX_BODIES * options.max_body_bytes)
        self._reading = reading_lane(lambda: (served.engine for served in self.rows))

    @classmethod
    def of(cls, engines: Engine | Mapping[str, Engine], options: ServerOptions) -> Self:
        """One engine by the names of `options.model_ids`, or several, each by its name.

        Raises:
            InvalidParameter: there are several, and `options.model_ids`, which are the names of one.
        """
        each: Iterable[Engine] = engines.values() if isinstance(engines, Mapping) else [engines]
        stored = stored_of(each, options)
        if not isinstance(engines, Mapping):
            return cls([Served.of(engines, options, stored)], options, stored)
        if options.model_ids:
            raise InvalidParameter("model_ids name one model; several have the names that they are given by")
        rows = [Served.of(engine, replace(options, model_ids=(name,)), stored) for name, engine in engines.items()]
        return cls(rows, options, stored)

    @property
    def all(self) -> tuple[Served, ...]:
        """The models, then each with its LoRA adapters."""
        return (*self.rows, *self.adapted)

    @property
    def listed(self) -> list[tuple[Served, str]]:
        """Every model with each of its names, then every adapter with the first of its own."""
        own = [(served, name) for served in self.rows for name in served.names]
        return [*own, *((served, served.name) for served in self.adapted)]

    @property
    def has_several(self) -> bool:
        """Whether there is more than one."""
        return len(self.rows) > 1

    def named(self, asked: str | None) -> Served:
        """The model that a request asks for; the first, if it names none.

        Raises:
            HTTPError: 404, there is no model of this name.
        """
        known = (self._by_name[name] for name in spellings(asked or "") if name in self._by_name)
        served = next(known, self._any) if asked else self.rows[0]
        if served is None:
            raise unknown_model(asked, (name for _, name in self.listed))
        return served

    def of_query(self, request: Request) -> Served:
        """The model that the query names, for requests without a body; the only one, whatever the query has.

        Raises:
            HTTPError: 404, as `named`.
        """
        return self.named(request.query_params.get("model")) if self.has_several else self.rows[0]

    @property
    def match_of_unnamed(self) -> MatchPolicy:
        """How prefixes are found for a request of which it is not known yet whom it asks: `off` if any model is so."""
        matches = [served.engine.match for served in self.rows]
        return "off" if "off" in matches else matches[0]

    async def answer(self, endpoint: ModelEndpoint[Any, Any], request: Request) -> Response:
        """Read a request's body, and have the model answer that it names. Fields that are ignored are noted, and the
        answer lists them.

        Raises:
            HTTPError, msgspec.DecodeError, ClientGone: as `read_json` and `decode_body`.
            EngineOverloaded: too many long bodies wait to be read.
        """
        most = self.options.max_body_bytes
        most = most if endpoint.max_bytes is None else min(endpoint.max_bytes, most)
        with self.bodies.reading(client_of(request)) as room:
            body = await read_json(request, max_bytes=most, room=room)

            def prepare() -> tuple[Served, Any]:
                value, ignored = decode_body(
                    body, endpoint.body, is_strict=self.options.is_strict, leave_out=endpoint.leave_out
                )
                record = record_of(request)
                record.ignored = ignored
                served = self.named(value.model)
                record.match = served.engine.match
                return served, endpoint.prepare(served, request, value)

            served, asked = await self._reading.run(request, prepare)
        return await endpoint.answer(served, request, asked)


def stored_of(engines: Iterable[Engine], options: ServerOptions) -> Stored | None:
    """What keeps what clients leave: in the directory of the first engine that has one, or else in memory."""
    if not options.keeps_responses:
        return None
    directories = (engine.store_directory for engine in engines)
    return Stored(next((each for each in directories if each is not None), None), options)

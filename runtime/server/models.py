"""The models of one server by name, and reading the request body that names one.

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
from .http.api_keys import client_of
from .http.request_body import MAX_BODIES, BodyRoom, read_json
from .ollama.names import spellings
from .request_log import record_of
from .served import Served
from .server_options import ServerOptions
from .stored.stored import Stored
from .unknown_fields import LeaveOut, decode_body
from .work_queues import reading_queue

if TYPE_CHECKING:
    from ..engine.engine import Engine

Body = TypeVar("Body")
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class ModelEndpoint(Generic[Body, Prepared]):
    """An endpoint whose request body names the model.

    Args:
        body: type of the body, with a field `model`.
        prepare: translates a body into a request to the model. Runs in a thread if the body is long.
        answer: responds to that request. `errors.describe` handles every error that it raises.
        max_bytes: a lower limit for bodies than the server's.
        leave_out: as in `decode_body`.
    """

    body: type[Body]
    prepare: Callable[[Served, Request, Body], Prepared]
    answer: Callable[[Served, Request, Prepared], Awaitable[Response]]
    max_bytes: int | None = None
    leave_out: LeaveOut | None = None


ANY_OF_ONE = "start it with --model-id '*'"
ANY_OF_SEVERAL = 'give one model aliases = ["*"] in a TOML file of --models'
"""How a server of one model, or of several, accepts any name."""


def unknown_model(asked: str | None, names: Iterable[str], to_accept_any: str | None = None) -> HTTPError:
    """Return the error for a request to a model that is not among `names`.

    Args:
        to_accept_any: how the server accepts any name; None if the request needs the model's own.
    """
    known = " and ".join(map(repr, names))
    message = f"there is no model {asked!r:.200}; this server has {known}"
    if to_accept_any is not None:
        message += f". To accept any name, {to_accept_any}"
    return HTTPError(404, message, param="model", code="model_not_found")


class Models:
    """All models of a server. The first answers requests that name none. The application owns it.

    Args:
        options: the server's options.
        stored: responses, conversations, files and batches; None: nothing is stored.

    Raises:
        InvalidParameter: there is no model, or two have the same name.
    """

    def __init__(self, rows: Sequence[Served], options: ServerOptions, stored: Stored | None = None) -> None:
        if not rows:
            raise InvalidParameter("there is no model to serve; name one")
        self.rows = tuple(rows)
        self.adapted = tuple(each for served in rows for each in served.adapted)
        self._by_name = {name: served for served in self.all for name in served.names}
        self._any = next((served for served in rows if served.takes_any), None)
        names = [name for served in self.all for name in served.names]
        if len(self._by_name) < len(names) or sum(served.takes_any for served in rows) > 1:
            raise InvalidParameter(f"two models have the same name, among {', '.join(map(repr, names))}; rename one")
        self.options, self.stored = options, stored
        self.bodies = BodyRoom(MAX_BODIES * options.max_body_bytes)
        self._reading = reading_queue(lambda: (served.engine for served in self.rows))

    @classmethod
    def of(cls, engines: Engine | Mapping[str, Engine], options: ServerOptions) -> Self:
        """Return the table of one engine named by `options.model_ids`, or of several, each by its name.

        Raises:
            InvalidParameter: there are several engines, and `options.model_ids` is set.
        """
        each: Iterable[Engine] = engines.values() if isinstance(engines, Mapping) else [engines]
        stored = stored_of(each, options)
        if not isinstance(engines, Mapping):
            return cls([Served.of(engines, options, stored)], options, stored)
        if options.model_ids:
            raise InvalidParameter("model_ids names a single model; several models have their names in the mapping")
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
        """Return whether there is more than one model."""
        return len(self.rows) > 1

    @property
    def has_choice(self) -> bool:
        """Return whether a query string chooses among models, or among the LoRA adapters of one."""
        return len(self.all) > 1

    def named(self, asked: str | None) -> Served:
        """Return the model that a request names; the first if it names none.

        Raises:
            HTTPError: 404 if there is no model of this name.
        """
        known = (self._by_name[name] for name in spellings(asked or "") if name in self._by_name)
        served = next(known, self._any) if asked else self.rows[0]
        if served is None:
            to_accept_any = ANY_OF_SEVERAL if self.has_several else ANY_OF_ONE
            raise unknown_model(asked, (name for _, name in self.listed), to_accept_any)
        return served

    def of_query(self, request: Request) -> Served:
        """Return the model that a query string names, for requests without a body. A single model without
        adapters answers any query.

        Raises:
            HTTPError: 404 if there is no model of this name.
        """
        return self.named(request.query_params.get("model")) if self.has_choice else self.rows[0]

    @property
    def match_of_unnamed(self) -> MatchPolicy:
        """The match policy of requests whose model is not known yet: `off` if any model's policy is off."""
        matches = [served.engine.match for served in self.rows]
        return "off" if "off" in matches else matches[0]

    async def answer(self, endpoint: ModelEndpoint[Any, Any], request: Request) -> Response:
        """Read a request's body, and return the response of the model that it names. Records ignored fields, which the
        response lists in a header.

        Raises:
            HTTPError, msgspec.DecodeError, ClientGone: as `read_json` and `decode_body` do.
            EngineOverloaded: too many long bodies wait to be decoded.
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
    """Return the storage for responses and files: in the store of the first engine that has one, else in memory.

    None if the server stores nothing.
    """
    if not options.keeps_responses:
        return None
    directories = (engine.store_directory for engine in engines)
    return Stored(next((each for each in directories if each is not None), None), options)

"""Lists in OpenAI's paged format, and their query parameters.

Knows objects with an id, not what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from ...errors import InvalidParameter

MAX_LIMIT, DEFAULT_LIMIT = 100, 20
_PAGING = ("limit", "order", "after")


class ObjectList(msgspec.Struct, kw_only=True):
    """One page of a list."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct):
    """The reply for a deleted object."""

    id: str
    object: str
    deleted: bool = True


def page(objects: Sequence[dict[str, Any]], request: Request, *others: str, descends: bool = True) -> ObjectList:
    """Return the page of a list that a query selects with `limit`, `order` and `after`.

    Args:
        objects: all objects, oldest first.
        others: other parameters that the query may have.
        descends: the default order is newest first.

    Raises:
        InvalidParameter: a parameter or its value is not valid, or `after` is not in the list.
    """
    query = request.query_params
    require_parameters(request, *_PAGING, *others)
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order") or ("desc" if descends else "asc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10) or not 1 <= int(limit) <= MAX_LIMIT:
        raise InvalidParameter(f"limit is {limit!r:.80}; send a number from 1 to {MAX_LIMIT}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidParameter(f'order is {order!r:.80}; send "asc" or "desc"', param="order")
    wanted = list(objects) if order == "asc" else list(reversed(objects))
    after = query.get("after")
    if after:
        place = next((place for place, each in enumerate(wanted) if each["id"] == after), None)
        if place is None:
            raise InvalidParameter(f"this list has no object with the id {after!r:.80}", param="after")
        wanted = wanted[place + 1 :]
    part = wanted[: int(limit)]
    ids = [each["id"] for each in part]
    return ObjectList(
        data=part, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=len(part) < len(wanted)
    )


def require_parameters(request: Request, *allowed: str) -> None:
    """Raise InvalidParameter if the query has a parameter that is not allowed.

    `include[]` is ignored, and `model`, by which a server of several models chose this one.
    """
    for name in request.query_params:
        if name not in (*allowed, "include", "include[]", "model"):
            known = f"; use {' or '.join(allowed)}" if allowed else ""
            raise InvalidParameter(f"unknown query parameter {name!r:.80}{known}", param=name)

"""Choose the connection that is closed where there are as many as there may be, so that no client takes them all.

Knows addresses and times, not HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

ABOUT_TO_ASK_S = 1.0  # a connection that was opened, or got an answer, so shortly ago may be about to be used


class Connection(Protocol):
    """A connection whose client has yet to send a request, or the rest of one."""

    @property
    def host(self) -> str | None:
        """The client's address."""
        ...

    @property
    def idle_since(self) -> float:
        """When it was opened, or its last answer ended."""
        ...

    @property
    def has_request(self) -> bool:
        """Whether a part of a request's body is still to come."""
        ...


C = TypeVar("C", bound=Connection)


def connection_to_close(waiting: Sequence[C], newest: C, *, now: float) -> C:
    """The connection that makes room for the newest one, which counts as its client's: of the address that has most of
    those that wait for their client. One without a request goes first, unless it is about to be used, then the oldest.

    Returns:
        `newest` if its address has most, and no other that waits.
    """
    by_host = Counter(each.host for each in waiting)
    by_host[newest.host] += 1
    greediest = max(by_host, key=by_host.__getitem__)

    def order(connection: C) -> tuple[bool, float]:
        is_idle = not connection.has_request and now - connection.idle_since > ABOUT_TO_ASK_S
        return not is_idle, connection.idle_since

    return min((each for each in waiting if each.host == greediest), key=order, default=newest)

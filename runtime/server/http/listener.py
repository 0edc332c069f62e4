"""The socket that a server listens on: an address of TCP, or a Unix socket.

Knows addresses and options of sockets, not HTTP.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

BACKLOG = 1024  # connections that wait for the event loop; the kernel allows fewer where somaxconn is lower
MAX_ACCEPTED = 64  # connections that asyncio accepts in a row, before the first of them is looked at
MAX_CONNECTIONS = 1 << 13
_USUALLY_OPEN = 64  # descriptors, where they cannot be counted


@cache
def max_connections() -> int:
    """How many connections may be open at a time: below what descriptors the process has left when it begins."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):  # not on Windows
        return MAX_CONNECTIONS
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    num_open = _USUALLY_OPEN
    with suppress(OSError):
        num_open = len(os.listdir("/dev/fd"))
    return max(1, min(MAX_CONNECTIONS, limit * 9 // 10 - num_open - MAX_ACCEPTED))


def listen(host: str, port: int) -> socket.socket:
    """Listen on `host` and `port`; port 0 takes any free one.

    Accepted connections inherit TCP_NODELAY. Without it the kernel holds the second packet of an answer back until
    the client acknowledges the first, and clients acknowledge after 40 ms. asyncio sets the option only on sockets
    that were made for IPPROTO_TCP by name, which `socket.create_server` does not do.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listen_on_unix_socket(path: Path) -> socket.socket:
    """Listen on a Unix socket, in place of one that a server left there.

    Raises:
        OSError: the path is too long or cannot be written, or something else is there, such as a server that answers.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return listener.family == socket.AF_UNIX or ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True

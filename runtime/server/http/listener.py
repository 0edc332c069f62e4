"""The socket that a server listens on: a TCP address or a Unix socket.

Knows addresses and options of sockets, not HTTP.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

BACKLOG = 1024  # connections that wait for the event loop; the kernel's somaxconn may lower it
MAX_ACCEPTED = 64  # connections that asyncio accepts in a row before it serves the first
MAX_CONNECTIONS = 1 << 13
_USUALLY_OPEN = 64  # file descriptors, if they cannot be counted


@cache
def max_connections() -> int:
    """Return the maximum number of open connections, limited by the file descriptors that the process has left."""
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
    """Return a socket that listens on `host` and `port`; port 0 takes any free one.

    Accepted connections inherit TCP_NODELAY. Without it the kernel holds back the second packet of a response until the
    client acknowledges the first, which takes 40 ms. asyncio sets the option only on sockets created explicitly for
    IPPROTO_TCP, which `socket.create_server` does not do.

    Raises:
        OSError: listening on the address failed.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listen_on_unix_socket(path: Path) -> socket.socket:
    """Return a socket that listens on a Unix socket; replaces one that a dead server left.

    Raises:
        OSError: the path is too long or not writable, or something else exists there, such as a live server's socket.
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
    """Return whether only this machine can connect to a listening socket."""
    return listener.family == socket.AF_UNIX or ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _answers(path: Path) -> bool:
    """Return whether a process accepts connections on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True

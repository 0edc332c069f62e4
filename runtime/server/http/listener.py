"""The socket that a server listens on.

Knows addresses and options of TCP, not HTTP.
"""

from __future__ import annotations

import socket

BACKLOG = 1024  # connections that wait for the event loop; the kernel allows fewer where somaxconn is lower


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

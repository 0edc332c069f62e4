"""Where a server listens: a port, or a Unix socket, and who can reach it there."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server.http.listener import is_local
from radixlm.runtime.server.http.uvicorn_server import Address
from radixlm.runtime.server.server_options import ServerOptions


@pytest.fixture
def path() -> Iterator[Path]:
    """A short path: a Unix socket's has some 100 characters at most."""
    with tempfile.TemporaryDirectory(prefix="rlm-") as folder:
        yield Path(folder) / "server.sock"


def test_a_unix_socket_that_a_server_left_is_replaced_and_one_that_answers_is_not(path: Path) -> None:
    address = Address(unix_socket=path)
    in_use = pytest.raises(InvalidParameter, match=r"cannot listen on .*server\.sock: Address already in use")
    with address.listen(), in_use:
        address.listen()
    with address.listen() as again:  # the first was closed, and its file is there
        assert is_local(again) and address.url(again, None) == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_file_that_is_no_socket_is_not_replaced(path: Path) -> None:
    path.write_text("text")
    with pytest.raises(InvalidParameter, match="cannot listen on"):
        Address(unix_socket=path).listen()
    assert path.read_text() == "text"


def test_a_port_in_use_is_said_with_what_to_do() -> None:
    with Address(port=0).listen() as listener:
        port = listener.getsockname()[1]
        assert Address(port=port).url(listener, None) == f"http://127.0.0.1:{port}"
        with pytest.raises(InvalidParameter, match=rf"port {port} of 127\.0\.0\.1 is in use .* choose another --port"):
            Address(port=port).listen()


@pytest.mark.parametrize(
    ("host", "keys", "hosts", "tells"),
    [
        ("127.0.0.1", (), ("localhost", "127.0.0.1", "::1", "127.0.0.1"), True),
        ("127.0.0.1", ("sk-one",), (), True),
        ("0.0.0.0", (), (), False),
        ("0.0.0.0", ("sk-one",), (), True),
    ],
)
def test_who_can_connect_decides_which_names_are_answered_and_whether_cached_text_is_told(
    host: str, keys: tuple[str, ...], hosts: tuple[str, ...], tells: bool
) -> None:
    address = Address(host, 0)
    with address.listen() as listener:
        decided = address.decided(listener, ServerOptions(api_keys=keys))
        assert (tuple(decided.hosts), decided.tells_cached_text) == (hosts, tells)
        named = address.decided(listener, ServerOptions(api_keys=keys, hosts=("a.lan",)))
        assert named.hosts[-1] == "a.lan" and "localhost" in named.hosts

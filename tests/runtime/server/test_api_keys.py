"""Keys: out of files one a line, none missing, and none that lets everybody in; and each is known when it comes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.api_keys import checked_keys, read_keys
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine


def test_keys_are_lines_and_the_rest_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the web site\nsk-one\r\n\n  sk-two-ключ  \n# old\n")
    assert read_keys(path) == ("sk-one", "sk-two-ключ")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"# sk-one\n", b"\xff\xfe", b"x" * 1025])
def test_a_file_without_a_key_that_can_be_used_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(InvalidParameter):
        read_keys(path)


@pytest.mark.parametrize("key", ["sk-one\nsk-two", "sk-one\rsk-two"])
def test_a_key_of_several_lines_is_refused_because_no_request_can_send_it(key: str) -> None:
    with pytest.raises(InvalidParameter, match="several lines"):
        checked_keys([key])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="cannot read API keys"):
        read_keys(tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["voilà", "bleu Å", "Ё", "correct horse battery"])
def test_a_key_is_known_whatever_bytes_it_begins_and_ends_with(engine: FakeEngine, key: str) -> None:
    """Headers are Latin-1 to the server, where the last byte of an `à` in UTF-8 is a space, and that of an `Å` a line's
    end: such a key was never accepted."""
    client = TestClient(create_app(engine, api_keys=(key,)))  # type: ignore[arg-type]
    for header in (f"Bearer {key}", f"bearer  {key} "):
        assert client.get("/v1/models", headers={"authorization": header.encode()}).status_code == 200
    for other in (key[:-1], key + "a", key.split()[-1] + "b"):
        assert client.get("/v1/models", headers={"authorization": f"Bearer {other}".encode()}).status_code == 401


def _metrics_statuses(engine: FakeEngine, path: str, **options: object) -> list[int]:
    """Statuses with no key, a wrong one, the key of metrics, and a client's."""
    client = TestClient(create_app(engine, **options))  # type: ignore[arg-type]
    keys = (None, "wrong", "for-metrics", "sk-one")
    headers = [{} if key is None else {"authorization": f"Bearer {key}"} for key in keys]
    return [client.get(path, headers=each).status_code for each in headers]


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/metrics"])
def test_the_metrics_key_opens_metrics_and_nothing_else(engine: FakeEngine, path: str) -> None:
    both = {"metrics_key": "for-metrics", "api_keys": ("sk-one",)}
    assert _metrics_statuses(engine, path, **both) == [401, 401, 200, 200]
    assert _metrics_statuses(engine, "/v1/models", **both) == [401, 401, 401, 200]
    assert _metrics_statuses(engine, path, metrics_key="for-metrics") == [401, 401, 200, 401]
    assert _metrics_statuses(engine, "/v1/models", metrics_key="for-metrics") == [200] * 4
    assert _metrics_statuses(engine, path, api_keys=("sk-one",)) == [401, 401, 401, 200]


@pytest.mark.parametrize("key", ["", " sk", "a\nb"])
def test_a_metrics_key_that_no_header_has_is_refused(engine: FakeEngine, key: str) -> None:
    with pytest.raises(InvalidParameter):
        create_app(engine, metrics_key=key)  # type: ignore[arg-type]

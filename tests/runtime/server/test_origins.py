"""Pages of other sites: turned away unless asked in, and never shown what they may not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.access import local_hosts
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

SITE = "https://example.com"
PREFLIGHT = {"origin": SITE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def client_of(engine: FakeEngine, **options: Any) -> TestClient:
    return TestClient(create_app(engine, **options), raise_server_exceptions=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("origin", [SITE, "null", "http://testserver.example.com", "http://testserver:81", "file://"])
def test_a_page_of_another_site_may_not_send_requests(client: TestClient, engine: FakeEngine, origin: str) -> None:
    for method, path in (("POST", "/v1/completions"), ("DELETE", "/v1/cache")):
        response = client.request(method, path, headers={"origin": origin}, json={"prompt": "Hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert engine.asked == engine.namespaces_cleared == []


def test_unless_asked_no_page_may_read_an_answer(client: TestClient) -> None:
    response = client.get("/v1/cache", headers={"origin": SITE})
    assert "access-control-allow-origin" not in response.headers
    assert client.options("/v1/completions", headers=PREFLIGHT).status_code == 405


@pytest.mark.parametrize("headers", [{}, {"origin": "http://testserver"}, {"origin": "https://testserver"}])
def test_the_servers_own_page_and_who_is_no_page_may(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 200


@pytest.mark.parametrize("allowed", [SITE, "*"])
def test_an_origin_that_was_asked_in_may_send_and_read(engine: FakeEngine, allowed: str) -> None:
    client = client_of(engine, cors_origins=(allowed,), api_keys=("sk-one",))
    preflight = client.options("/v1/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200, "it comes without a key"
    assert preflight.headers["access-control-allow-origin"] == allowed
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    private = client.options("/v1/completions", headers={**PREFLIGHT, "access-control-request-private-network": "true"})
    assert (private.status_code, private.headers["access-control-allow-private-network"]) == (200, "true")
    headers = {"origin": SITE, "authorization": "Bearer sk-one"}
    response = client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, allowed)
    assert client.post("/v1/completions", json={"prompt": "Hi"}, headers={"origin": SITE}).status_code == 401


def test_another_origin_than_the_one_that_was_asked_in_may_not(engine: FakeEngine) -> None:
    client = client_of(engine, cors_origins=(SITE,))
    headers = {"origin": "https://example.com.evil.net"}
    response = client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origin", ["", "example.com", "https://example.com/", "https://a@example.com", "https://"])
def test_what_is_no_origin_is_refused_at_the_start(engine: FakeEngine, origin: str) -> None:
    with pytest.raises(InvalidParameter):
        create_app(engine, cors_origins=(origin,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host",
    ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::2]", "10.0.0.1", "evillocalhost"],
)
def test_a_page_that_made_its_own_name_point_here_may_nothing(engine: FakeEngine, host: str) -> None:
    """DNS rebinding: to the browser it is the page's own server, and Origin and Host agree."""
    client = client_of(engine, hosts=local_hosts("127.0.0.1"))
    for method, path in (("GET", "/v1/cache"), ("DELETE", "/v1/cache"), ("GET", "/"), ("POST", "/v1/completions")):
        headers = {"host": host, "origin": f"http://{host}"}
        response = client.request(method, path, headers=headers, json={"prompt": "Hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "--api-key" in response.json()["error"]["message"], "an operator with a proxy in front needs to know"
    assert engine.asked == engine.namespaces_cleared == engine.namespaces_asked == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost.:8000",
        "LocalHost:1",
        "a.localhost",
        "127.0.0.1:8000",
        "127.0.0.2",
        "[::1]:8000",
        "[::1]",
        "[0:0:0:0:0:0:0:1]:80",
        "[::ffff:127.0.0.1]",
        "my-laptop:8000",
    ],
)
def test_this_machines_own_names_may_everything(engine: FakeEngine, host: str) -> None:
    client = client_of(engine, hosts=local_hosts("my-laptop"))
    headers = {"host": host, "origin": f"http://{host}"}
    assert client.get("/v1/cache", headers=headers).status_code == 200
    assert client.post("/v1/completions", headers=headers, json={"prompt": "Hi"}).status_code == 200


def test_an_address_is_one_of_its_names_in_brackets_or_not(engine: FakeEngine) -> None:
    client = client_of(engine, hosts=local_hosts("::1"))
    assert client.get("/v1/models", headers={"host": "[::1]:8000"}).status_code == 200


def test_a_server_that_others_may_reach_has_any_name(client: TestClient) -> None:
    assert client.get("/v1/models", headers={"host": "gpu.example.com"}).status_code == 200

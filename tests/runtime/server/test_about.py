"""What the server says of itself, and what it says it does not do."""

from __future__ import annotations

from importlib.metadata import version

from starlette.testclient import TestClient


def test_the_version_is_the_packages(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": version("radixlm")}


def test_embeddings_are_501_and_not_to_be_tried_again(client: TestClient) -> None:
    response = client.post("/v1/embeddings", json={"input": "Hi", "model": "fake"})
    assert response.status_code == 501
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "not_implemented"

"""What the server says of itself, and what it says it does not do."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

from starlette.testclient import TestClient


def test_the_version_is_the_packages(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": version("radixlm")}


def test_embeddings_are_501_and_not_to_be_tried_again(client: TestClient) -> None:
    response = client.post("/v1/embeddings", json={"input": "Hi", "model": "fake"})
    assert response.status_code == 501
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "not_implemented"


def test_the_model_is_described_in_both_dialects(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    [model] = listed["data"]
    assert client.get(f"/v1/models/{model['id']}").json() == model
    assert (listed["object"], model["object"], model["max_model_len"]) == ("list", "model", 512)
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "fake")
    assert (model["type"], model["display_name"], model["max_input_tokens"]) == ("model", "fake", 512)
    created = datetime.strptime(model["created_at"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert created.timestamp() == model["created"]

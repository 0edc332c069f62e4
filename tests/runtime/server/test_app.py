"""What is not a completion: models, health, and the errors of every path."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient


def test_models_are_listed_and_found_by_name(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["fake"]
    assert client.get("/v1/models/fake").json() == listed["data"][0]


@pytest.mark.parametrize("path", ["/v1/models/other", "/v1/models/org/other"])
def test_an_unknown_model_is_404_and_names_the_one_there_is(client: TestClient, path: str) -> None:
    error = client.get(path)
    assert error.status_code == 404
    assert error.json()["error"]["code"] == "model_not_found"
    assert "'fake'" in error.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_for_another_model_is_404(client: TestClient, path: str) -> None:
    body = (
        {"model": "other", "messages": [{"role": "user", "content": "Hi"}]}
        if "chat" in path
        else {"model": "other", "prompt": "Hi"}
    )
    response = client.post(path, json=body)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


def test_an_unknown_route_is_404_in_openais_shape(client: TestClient) -> None:
    response = client.get("/v2/models")
    assert response.status_code == 404
    assert "/v2/models" in response.json()["error"]["message"]


def test_a_wrong_method_is_405_and_names_the_right_one(client: TestClient) -> None:
    response = client.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "use POST" in response.json()["error"]["message"]


def test_a_body_over_the_limit_is_413_whether_its_length_is_known_or_not(client: TestClient) -> None:
    long = b'{"prompt": "' + b"x" * 10_000 + b'"}'
    for content in (long, iter([long[:6000], long[6000:]])):
        response = client.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "at most 10000" in response.json()["error"]["message"]

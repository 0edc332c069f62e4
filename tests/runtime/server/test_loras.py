"""LoRA adapters over HTTP: their names, their list, and requests that name them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from radixlm.runtime.cache.cache_namespace import CacheScope, adapted_namespace
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from .conftest import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.fixture
def adapted() -> FakeEngine:
    return FakeEngine(adapters=SimpleNamespace(names=("sql", "law"), named=lambda name: SimpleNamespace(digest=name)))


@pytest.fixture
def adapted_client(adapted: FakeEngine) -> TestClient:
    return TestClient(create_app(adapted, model_ids=("small", "s")), raise_server_exceptions=False)  # type: ignore[arg-type]


def test_adapters_are_listed_with_their_parent(adapted_client: TestClient) -> None:
    listed = adapted_client.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [
        *(("small", None), ("s", None), ("small:sql", "small"), ("small:law", "small")),
    ]
    assert adapted_client.get("/v1/models/sql").json()["parent"] == "small"


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        *(("small", None), ("s", None), (None, None), ("sql", "sql"), ("small:sql", "sql"), ("s:law", "law")),
        *(("small:latest", None), ("law:latest", "law")),
    ],
)
def test_the_model_of_a_request_names_its_adapter(
    model: str | None, lora: str | None, adapted: FakeEngine, adapted_client: TestClient
) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 3}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False}),
    ):
        if model is None and path in ("/v1/messages", "/api/chat"):
            continue
        reply = adapted_client.post(path, json=body if model is None else body | {"model": model})
        assert reply.status_code == 200, reply.text
        assert adapted.options[-1].lora == lora, path
        assert reply.json()["model"] == (model or "small")


def test_an_unknown_adapter_is_an_unknown_model(adapted_client: TestClient) -> None:
    reply = adapted_client.post("/v1/chat/completions", json=CHAT | {"model": "small:poems"})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert "'small' and 's' and 'small:sql' and 'small:law'" in reply.json()["error"]["message"]


def test_an_adapter_has_a_fingerprint_of_its_own(adapted_client: TestClient) -> None:
    told = {
        adapted_client.post("/v1/chat/completions", json=CHAT | {"model": model}).json()["system_fingerprint"]
        for model in ("small", "sql", "small:sql", "law")
    }
    assert len(told) == 3


def test_an_adapter_cannot_have_the_models_name(adapted: FakeEngine) -> None:
    with pytest.raises(InvalidParameter, match="two models have the same name"):
        create_app(adapted, model_ids=("sql",))  # type: ignore[arg-type]


def test_the_cache_of_an_adapter_is_shown_and_deleted_by_its_name(
    adapted: FakeEngine, adapted_client: TestClient
) -> None:
    namespace = adapted.namespaces.of(CacheScope(cache_salt="s"))
    spaces = {"small": namespace, "small:sql": adapted_namespace(namespace, "sql"), None: namespace}
    for model, space in spaces.items():
        query = {"cache_salt": "s"} if model is None else {"cache_salt": "s", "model": model}
        shown = adapted_client.get("/v1/cache", params=query)
        assert shown.status_code == 200 and adapted.namespaces_asked.pop() == space, shown.text
        adapted_client.get("/v1/cache", params=query | {"run": "any"})
        assert adapted.namespaces_asked.pop() == space
        adapted_client.delete("/v1/cache", params=query)
        assert adapted.namespaces_cleared[-1] == space
    assert adapted_client.get("/v1/cache", params={"model": "poems"}).status_code == 404

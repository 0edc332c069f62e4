"""What Ollama's clients are told of models, by whatever name they call them, and what they may not do with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.engine.vectors.results import Embedding
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server import create_app
from radixlm.runtime.server.ollama.keep_alive import keep_alive_s
from radixlm.runtime.server.ollama.names import spellings, tagged
from radixlm.runtime.server.page import OLLAMA_IS_RUNNING
from starlette.testclient import TestClient

from ..tool_templates import QWEN
from .scripted import Scripted

if TYPE_CHECKING:
    from .conftest import FakeEngine

NAMES = st.from_regex(r"[a-z0-9.]{1,4}(/[a-z]{1,3})?(:[a-z0-9]{1,7})?", fullmatch=True)


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with Scripted.serving(QWEN) as model:
        yield model


def test_models_are_listed_with_their_tag(model: Scripted) -> None:
    [listed] = model.client.get("/api/tags").json()["models"]
    manifest = model.engine.manifest
    assert listed["name"] == listed["model"] == f"{manifest.name}:latest"
    assert (listed["digest"], listed["size"]) == (manifest.digest, sum(file.size for file in manifest.files.values()))
    assert listed["modified_at"].endswith("Z")
    assert listed["details"].keys() == {
        "parent_model",
        "format",
        "family",
        "families",
        "parameter_size",
        "quantization_level",
    }


def test_a_model_that_is_loaded_has_a_context_and_no_end(model: Scripted) -> None:
    [loaded] = model.client.get("/api/ps").json()["models"]
    assert loaded["context_length"] == model.engine.context_length and loaded["expires_at"].startswith("9999")


@pytest.mark.parametrize("field", ["model", "name"])
@pytest.mark.parametrize("tag", ["", ":latest"])
def test_a_model_is_shown_by_either_name(field: str, tag: str, model: Scripted) -> None:
    shown = model.client.post("/api/show", json={field: model.engine.manifest.name + tag, "verbose": True}).json()
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.context_length"] == model.engine.context_length
    assert shown["model_info"]["general.architecture"] == family
    assert shown["capabilities"] == ["completion", "tools"] and shown["template"] == QWEN
    assert "temperature" in shown["parameters"] and "repeat_penalty" in shown["parameters"]


def test_a_model_that_is_not_here_is_not_shown(model: Scripted) -> None:
    response = model.client.post("/api/show", json={"model": "gpt-oss"})
    assert response.status_code == 404 and "not found" in response.json()["error"]


def test_the_version_is_one_that_clients_take(client: TestClient) -> None:
    """Some refuse servers before 0.6.4."""
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4)


def test_a_model_that_is_here_is_pulled_already(client: TestClient) -> None:
    response = client.post("/api/pull", json={"model": "fake"})
    assert response.text == '{"status":"success"}\n' and "ndjson" in response.headers["content-type"]
    response = client.post("/api/pull", json={"name": "fake:latest", "stream": False, "insecure": True})
    assert response.json() == {"status": "success"}


def test_models_are_neither_fetched_nor_deleted(client: TestClient) -> None:
    response = client.post("/api/pull", json={"model": "gpt-oss"})
    assert response.status_code == 403 and "radixlm pull" in response.json()["error"]
    response = client.request("DELETE", "/api/delete", json={"model": "fake"})
    assert response.status_code == 403 and "radixlm rm" in response.json()["error"]


@pytest.mark.parametrize(("path", "body"), [("embed", {"input": ["a"]}), ("embeddings", {"prompt": "a"})])
def test_a_model_that_writes_text_makes_no_vectors(path: str, body: Any, client: TestClient) -> None:
    response = client.post(f"/api/{path}", json={"model": "fake", "keep_alive": "5m", "options": {}, **body})
    assert response.status_code == 400 and "no embeddings" in response.json()["error"]
    assert client.post(f"/api/{path}", json={"model": "other", **body}).status_code == 404


def test_vectors_come_in_order_with_their_tokens(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def vectors_of(*arguments: Any, dimensions: int | None = None) -> list[Embedding]:
        return [Embedding(np.full(dimensions or 3, len(text), np.float32), len(text), 0) for text in arguments[2]]

    monkeypatch.setattr("radixlm.runtime.server.ollama.embed.vectors_of", vectors_of)
    reply = client.post("/api/embed", json={"input": ["a", "abc"], "dimensions": 2, "truncate": True}).json()
    assert (reply["embeddings"], reply["prompt_eval_count"]) == ([[1.0, 1.0], [3.0, 3.0]], 4)
    assert client.post("/api/embed", json={"input": "ab"}).json()["embeddings"] == [[2.0, 2.0, 2.0]]
    assert client.post("/api/embeddings", json={"prompt": "ab"}).json() == {"embedding": [2.0, 2.0, 2.0]}


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_clients_see_that_a_server_runs_and_browsers_get_the_page(accept: str, client: TestClient) -> None:
    response = client.get("/", headers={"accept": accept})
    assert response.text == OLLAMA_IS_RUNNING and response.headers["vary"] == "Accept"
    page = client.get("/", headers={"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"})
    assert page.text.startswith("<!doctype html>") and page.headers["vary"] == "Accept"
    assert page.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags"])
def test_clients_probe_without_a_body(path: str, model: Scripted) -> None:
    response = model.client.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_probes_need_no_key_and_models_do(engine: FakeEngine) -> None:
    locked = TestClient(create_app(engine, api_keys=("sk-one",)))  # type: ignore[arg-type]
    assert locked.head("/").status_code == 200
    assert locked.get("/api/tags").status_code == 401
    assert locked.get("/api/version", headers={"authorization": "Bearer sk-one"}).status_code == 200


@given(names=st.lists(NAMES, min_size=1, max_size=4, unique_by=tagged), asked=NAMES)
def test_a_name_means_the_model_with_the_same_name_and_tag(names: list[str], asked: str) -> None:
    """As Ollama says it: a name without a tag has the tag `latest`."""
    found = [name for name in names if name in spellings(asked)]
    assert found == [name for name in names if tagged(name) == tagged(asked)]


def test_a_model_that_is_called_latest_is_found_without_its_tag(engine: FakeEngine) -> None:
    client = TestClient(create_app({"a:latest": engine, "b": engine}))  # type: ignore[dict-item]
    for name in ("a", "a:latest", "b", "b:latest"):
        body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/v1/chat/completions", json=body).json()["model"] == name
    assert client.post("/v1/chat/completions", json={**body, "model": "b:7b"}).status_code == 404


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["h", "m", "s", "ms"])), min_size=1, max_size=4))
def test_durations_are_sums_of_their_parts(parts: list[tuple[int, str]]) -> None:
    units = {"h": 3600, "m": 60, "s": 1, "ms": 0.001}
    text = "".join(f"{number}{unit}" for number, unit in parts)
    seconds = sum(number * units[unit] for number, unit in parts)
    assert math.isclose(keep_alive_s(text), seconds, abs_tol=1e-9)
    assert keep_alive_s(f"-{text}") == (math.inf if seconds else 0)


@pytest.mark.parametrize(
    "value", ["1" * 5000 + "x", "1." * 3000, "9" * 5000, "1h" * 100, 10**400, "", "-", "1h x", "."]
)
def test_a_long_or_huge_duration_is_refused_at_once(value: str | int) -> None:
    """Digits without a unit took time that grew with the third power of their number, and all requests waited."""
    with pytest.raises(InvalidParameter, match="keep_alive is"):
        keep_alive_s(value)

"""What the server says of itself, and what it says it does not do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from radixlm.runtime.artifact.manifest import SamplingDefaults
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.server import create_app
from radixlm.runtime.version import VERSION
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine


def test_the_version_is_the_packages(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": VERSION}


def test_a_model_has_several_names_and_replies_have_the_one_that_was_asked_for(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, model_ids=["small", "smollm2", "small"]))  # type: ignore[arg-type]
    listed = client.get("/v1/models").json()
    assert ([model["id"] for model in listed["data"]], listed["last_id"]) == (["small", "smollm2"], "smollm2")
    assert [asked(client, name).json()["model"] for name in ("smollm2", "small", None, "")] == [
        "smollm2",
        *["small"] * 3,
    ]
    refused = asked(client, "fake")
    assert refused.status_code == 404 and "'small' and 'smollm2'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("names", "own"), [(["*"], "fake"), (["small", "*"], "small")])
def test_a_star_is_any_name(engine: FakeEngine, names: list[str], own: str) -> None:
    client = TestClient(create_app(engine, model_ids=names))  # type: ignore[arg-type]
    assert [asked(client, name).json()["model"] for name in ("gpt-4o", None)] == ["gpt-4o", own]
    assert client.get("/v1/models/org/any").json()["id"] == "org/any"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [own]
    message = {"model": "claude", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    assert client.post("/v1/messages", json=message).json()["model"] == "claude"
    assert client.post("/v1/responses", json={"model": "gpt-5", "input": "Hi"}).json()["model"] == "gpt-5"


def asked(client: TestClient, name: str | None) -> Any:
    return client.post("/v1/completions", json={"prompt": "Hi", "model": name})


def test_the_model_is_described_in_both_dialects(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    [model] = listed["data"]
    assert client.get(f"/v1/models/{model['id']}").json() == model
    assert (listed["object"], model["object"], model["max_model_len"]) == ("list", "model", 512)
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "fake")
    assert (model["type"], model["display_name"], model["max_input_tokens"]) == ("model", "fake", 512)
    none = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert model["default_sampling"] == {"temperature": 0.3, **none}
    created = datetime.strptime(model["created_at"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert created.timestamp() == model["created"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    ],
)
def test_a_request_that_says_one_number_keeps_the_other_defaults(
    engine: FakeEngine, client: TestClient, path: str, asked: dict[str, Any]
) -> None:
    defaults = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
    engine.default_params = SamplingParams.recommended(defaults)
    assert client.post(path, json={"model": "fake", "temperature": 0.5, **asked}).status_code == 200
    assert engine.asked[-1][1].defaults == msgspec.structs.replace(defaults, temperature=0.5)

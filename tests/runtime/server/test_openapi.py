"""The description of the API: that it is whole, refers to what is there, and is true."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec import inspect
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.fields import fields_of
from radixlm.runtime.server import create_app
from radixlm.runtime.server.openai.replies import ChatReply, TextReply
from radixlm.runtime.server.openai.response_replies import ResponseReply
from radixlm.runtime.server.openai.tokenize import TokenizeReply
from radixlm.runtime.server.openapi import OPERATIONS
from radixlm.runtime.server.page import page_routes
from starlette.routing import Route
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import FakeEngine


@pytest.fixture
def document(client: TestClient) -> Any:
    return client.get("/openapi.json").json()


def test_every_route_but_the_page_is_described(engine: FakeEngine, document: Any) -> None:
    app = create_app(engine)  # type: ignore[arg-type]
    pages = {route.path for route in page_routes() if isinstance(route, Route)}
    routes = [route for route in app.routes if isinstance(route, Route) and route.path not in pages]
    served = {
        (re.sub(r":path}", "}", route.path), method.lower())
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert served == {(path, method) for path, methods in document["paths"].items() for method in methods}


def test_every_reference_has_its_schema(document: Any) -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode()))
    assert names == set(document["components"]["schemas"])
    assert "ChatRequest" in names and "ErrorReply" in names


def test_a_request_has_its_fields_and_no_others(document: Any) -> None:
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is False
    assert {"temperature", "n", "echo", "cache_salt"} <= set(schema["properties"])


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "ResponseRequest"])
def test_every_request_may_say_that_its_match_is_off(document: Any, name: str) -> None:
    asked = document["components"]["schemas"][name]["properties"]["cache_match"]
    assert {"exact", "seam", "text", "off"} in [set(choice.get("enum", ())) for choice in asked["anyOf"]]


@pytest.mark.parametrize(
    ("path", "body", "type"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}, ChatReply),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "return_token_ids": True}, TextReply),
        ("/v1/responses", {"input": "Hi"}, ResponseReply),
        ("/tokenize", {"prompt": "Hi"}, TokenizeReply),
    ],
)
def test_replies_are_of_the_types_that_are_described(client: TestClient, path: str, body: Any, type: Any) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 200
    assert msgspec.json.decode(response.content, type=type, strict=True)


def test_a_server_with_keys_says_so_and_asks_for_one_here_too(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, api_keys=("sk-one",)))  # type: ignore[arg-type]
    assert client.get("/openapi.json").status_code == 401
    document = client.get("/openapi.json", headers={"authorization": "Bearer sk-one"}).json()
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_progress_is_described_where_it_is_asked_for_and_told(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for asked in ("ChatRequest", "CompletionRequest", "ResponseRequest"):
        assert "prompt_progress" in msgspec.json.encode(schemas[asked]["properties"]["return_progress"]).decode()
    told = schemas["PromptProgressReply"]
    assert set(told["properties"]) == {"total", "cache", "processed", "time_ms"} and told["description"]


def test_guesses_are_described_where_they_are_asked_for(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for asked in ("ChatRequest", "CompletionRequest"):
        assert "guessed" in msgspec.json.encode(schemas[asked]["properties"]["return_guesses"]).decode()
    assert schemas["TextChoice"]["properties"]["guessed"]["items"] == {"type": "boolean"}
    assert "return_guesses" not in schemas["ResponseRequest"]["properties"]


def test_a_server_without_keys_describes_none(document: Any) -> None:
    assert "security" not in document


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "ResponseRequest", "MessagesRequest"])
def test_every_sampling_parameter_is_described(document: Any, name: str) -> None:
    """They had bounds, and no word of what they mean."""
    properties = document["components"]["schemas"][name]["properties"]
    described = {each: msgspec.json.encode(schema).decode() for each, schema in properties.items()}
    for field in fields_of(SamplingParams).values():
        for wire_name in {field.name, *field.about.names.values()} & described.keys() - OF_ENDPOINTS:
            assert msgspec.json.encode(field.about.doc).decode() in described[wire_name], wire_name


OF_ENDPOINTS = {"max_tokens", "max_output_tokens", "logprobs", "prompt_logprobs"}
"""Which requests declare themselves."""


def bounds_of(schema: Any) -> dict[str, float]:
    """The bounds of a number that may be null."""
    [number] = [kind for kind in schema["anyOf"] if kind.get("type") in ("integer", "number")]
    names = ("minimum", "exclusiveMinimum", "maximum")
    return {name: number[name] for name in names if name in number}


def test_the_bounds_that_are_described_are_those_that_hold(client: TestClient, document: Any) -> None:
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    num_bounds = 0
    for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
                 "presence_penalty", "frequency_penalty", "seed", "n", "logprobs", "prompt_logprobs"):  # fmt: skip
        step = 1 if name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs") else 0.001
        for bound, value in bounds_of(properties[name]).items():
            beyond = value + step if bound == "maximum" else value if bound == "exclusiveMinimum" else value - step
            within = value + step if bound == "exclusiveMinimum" else value
            assert client.post("/v1/completions", json={"prompt": "Hi", name: within}).status_code == 200
            response = client.post("/v1/completions", json={"prompt": "Hi", name: beyond})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            num_bounds += 1
    assert num_bounds == 23


@pytest.mark.parametrize("body", [one.body for one in OPERATIONS if one.body], ids=lambda body: body.__name__)
def test_a_tag_stands_only_where_there_are_several(body: Any) -> None:
    """msgspec describes a lone type's tag as required, and does not miss it: `output_format` went without its type."""
    assert list(_lone_tags(inspect.type_info(body), set())) == []


def test_a_lone_tag_is_seen() -> None:
    lone = msgspec.defstruct("Lone", [("value", int)], tag_field="type", tag="lone")
    held = msgspec.defstruct("Held", [("lone", lone | None, None)])
    assert list(_lone_tags(inspect.type_info(held), set())) == ["Lone"]


def test_a_lone_tag_is_seen_also_behind_a_place_where_it_may_stand() -> None:
    first, second = (msgspec.defstruct(name, [("value", int)], tag_field="type", tag=name) for name in ("one", "two"))
    held = msgspec.defstruct("Held", [("several", first | second), ("lone", first)])  # type: ignore[operator]
    assert list(_lone_tags(inspect.type_info(held), set())) == ["one"]


def _lone_tags(info: inspect.Type, seen: set[type]) -> Iterator[str]:
    """Names of tagged types that stand in a place where no other tagged type may."""
    if isinstance(info, inspect.UnionType):
        structs = [kind for kind in info.types if isinstance(kind, inspect.StructType)]
        inner = [kind for kind in info.types if not isinstance(kind, inspect.StructType)]
        if len(structs) == 1:
            inner += structs
        else:
            inner += [field.type for kind in structs for field in _fields(kind, seen)]
    elif isinstance(info, inspect.StructType):
        if info.tag is not None:  # seen or not: it may have stood beside others elsewhere
            yield info.cls.__name__
        inner = [field.type for field in _fields(info, seen)]
    elif isinstance(info, inspect.DictType):
        inner = [info.key_type, info.value_type]
    else:
        inner = [info.item_type] if hasattr(info, "item_type") else []
    for kind in inner:
        yield from _lone_tags(kind, seen)


def _fields(info: inspect.StructType, seen: set[type]) -> tuple[inspect.Field, ...]:
    """The fields of a type that was not seen yet."""
    if info.cls in seen:
        return ()
    seen.add(info.cls)
    return info.fields

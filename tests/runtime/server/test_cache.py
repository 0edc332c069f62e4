"""Whose cache a request may use, see and clear: keys, salts and cache keys, on every path."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from radixlm.runtime.cache.cache_namespace import CacheScope
from radixlm.runtime.cache.why_not_more import WhyNotMore
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server import create_app
from radixlm.runtime.server.page import PAGE_PATHS
from radixlm.runtime.server.request_log import HEALTH_PATHS
from starlette.routing import Route
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

KEYS = ("sk-one", "sk-two-ключ")
CHAT: Mapping[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: Mapping[str, object] = {"prompt": "Hi"}


def client_of(engine: FakeEngine, **options: Any) -> TestClient:
    return TestClient(create_app(engine, **options), raise_server_exceptions=False)  # type: ignore[arg-type]


def authorized(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def post(client: TestClient, body: Mapping[str, object], headers: Any = None) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return client.post(path, json=dict(body), headers=headers)


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_the_way_to_match_is_the_requests_choice(client: TestClient, engine: FakeEngine, body: Any) -> None:
    for policy in ("exact", "seam", "text", "off", None):
        assert post(client, {**body, "cache_match": policy}).status_code == 200
    assert post(client, body).status_code == 200
    assert engine.matches_asked == ["exact", "seam", "text", "off", None, None]


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_salts_and_cache_keys_make_namespaces(client: TestClient, engine: FakeEngine, body: Any) -> None:
    sent = [{}, {"cache_salt": ""}, {"cache_salt": "a"}, {"prompt_cache_key": "a"}, {"cache_salt": "b"}, {"user": "a"}]
    for fields in sent:
        post(client, {**body, **fields})
    bare, *others, of_user = engine.namespaces_asked
    assert len({bare, *others}) == 5
    assert of_user == bare, "`user` is the client's own note, and no proof"


def test_each_api_key_has_a_namespace_of_its_own(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=KEYS)
    for key, body in itertools.product(KEYS, (CHAT, TEXT)):
        assert post(client, body, authorized(key)).status_code == 200
    one, also_one, two, also_two = engine.namespaces_asked
    assert one == also_one != two == also_two
    assert one == engine.namespaces.of(CacheScope(api_key=KEYS[0]))


def test_without_keys_on_the_server_what_clients_send_as_one_is_nothing(client: TestClient, engine: FakeEngine) -> None:
    post(client, CHAT)
    post(client, CHAT, authorized("sk-whatever"))
    assert len(set(engine.namespaces_asked)) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sk-on"},
        {"authorization": "Bearer sk-one-more"},
        {"authorization": "Basic sk-one"},
        {"authorization": "sk-one"},
        {"x-api-key": "sk-on"},
        {"x-api-key": "Bearer sk-one"},
        {"api-key": "sk-one"},
        {b"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_without_a_known_key_every_path_but_health_and_the_page_is_401(engine: FakeEngine, headers: Any) -> None:
    app = create_app(engine, api_keys=KEYS)  # type: ignore[arg-type]
    client = TestClient(app, raise_server_exceptions=False)
    routes = [route for route in app.routes if isinstance(route, Route)]
    asked = [(method, route.path) for route in routes for method in route.methods or ()]
    assert len(asked) > 6
    for method, path in [*asked, ("GET", "/static"), ("GET", "/v2"), ("OPTIONS", "/v1/models"), ("GET", "/health/")]:
        response = client.request(method, path, headers=headers)
        if path in HEALTH_PATHS or path in PAGE_PATHS:
            assert response.status_code == 200
            continue
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
        if method != "HEAD":
            error = response.json()["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
            elif path.startswith("/api/"):  # Ollama's errors are a text
                assert "key" in error
            else:
                assert error["code"] == "invalid_api_key"
            assert "sk-one" not in response.text
    assert engine.namespaces_asked == engine.namespaces_cleared == []


@pytest.mark.parametrize("key", ["", " ", "a ", "x" * 1025])
def test_a_key_that_none_or_all_could_send_is_refused_at_the_start(engine: FakeEngine, key: str) -> None:
    with pytest.raises(InvalidParameter):
        create_app(engine, api_keys=("good", key))  # type: ignore[arg-type]


def test_the_schemes_name_may_be_written_in_any_case(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=KEYS)
    assert client.get("/v1/models", headers={"authorization": "bearer  sk-one"}).status_code == 200


def test_the_tree_has_sums_and_runs_of_the_callers_namespace(client: TestClient, engine: FakeEngine) -> None:
    tree = client.get("/v1/cache").json()
    runs, running, ended = tree.pop("runs"), *tree.pop("requests")
    assert tree == {
        "object": "cache",
        "num_runs": 3,
        "num_tokens": 70,
        "num_pages": 5,
        "num_used_pages": 2,
        "num_aliases": 1,
        "num_states": 0,
        "is_whole": False,
        "is_counted": True,
    }
    assert [re.fullmatch("[0-9a-f]{8}", run["id"]) is not None for run in runs] == [True, True]
    assert runs[0].pop("id") != runs[1]["id"]
    assert runs[0] == {
        "parent": None,
        "start": 0,
        "num_tokens": 48,
        "num_generated": 16,
        "num_pages": 3,
        "num_users": 1,
        "num_children": 2,
        "num_states": 0,
        "unused_s": 12.346,
        "num_shared": 0,
        "begins": "Hello wörld",
        "begins_after": "Hello wörld",
    }
    assert (runs[1]["parent"], runs[1]["begins"]) == (0, " wörld")
    assert (running["state"], running["run"], running["running_s"], running["ended_s"]) == ("running", 1, 2.0, None)
    assert (running["num_prompt_tokens"], running["num_cached_tokens"], running["why_not_more"]) == (64, 48, None)
    assert (ended["state"], ended["run"], ended["running_s"], ended["ended_s"]) == ("ended", None, 5.5, 4.5)
    assert (ended["finish_reason"], ended["num_generated_tokens"]) == ("stop", 9)
    assert ended["why_not_more"]["kind"] == "retokenized" and ended["why_not_more"]["cached_text"] == "Hello wörld"
    assert re.fullmatch("[0-9a-f]{8}", running["id"]) and running["id"] != ended["id"]
    client.get("/v1/cache", params={"cache_salt": "a", "prompt_cache_key": "b"})
    post(client, {**CHAT, "cache_salt": "a", "prompt_cache_key": "b"})
    bare, salted, of_chat = engine.namespaces_asked
    assert bare == engine.namespaces.of(CacheScope()) != salted == of_chat


def test_one_run_is_told_whole_by_its_id(client: TestClient, engine: FakeEngine) -> None:
    first, second = client.get("/v1/cache").json()["runs"]
    whole = {"start": 48, "token_ids": [1, 0, 1], "text": " wörldHello wörld", "object": "cache.run"}
    assert client.get("/v1/cache", params={"run": second["id"]}).json() == {"id": second["id"], **whole}
    for run, code in ((first["id"], "run_not_found"), ("0" * 8, "run_not_found"), ("", "run_not_found")):
        gone = client.get("/v1/cache", params={"run": run})  # the first is evicted by the time that it is asked for
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, code)
    assert client.delete("/v1/cache", params={"run": second["id"]}).status_code == 400
    assert engine.namespaces_cleared == []


def test_clearing_is_of_the_callers_namespace_and_tells_what_stays(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=KEYS)
    response = client.delete("/v1/cache", headers=authorized(KEYS[1]))
    numbers = {"num_freed_pages": 3, "num_kept_pages": 2, "num_discarded_pages": 0}
    assert response.json() == {"object": "cache.cleared", **numbers}
    client.delete("/v1/cache?cache_salt=a", headers=authorized(KEYS[1]))
    assert engine.namespaces_cleared == [
        engine.namespaces.of(CacheScope(api_key=KEYS[1])),
        engine.namespaces.of(CacheScope(api_key=KEYS[1], cache_salt="a")),
    ]


def test_what_the_cache_is_asked_wrongly_is_400(client: TestClient, engine: FakeEngine) -> None:
    for query in ("?namespace=a", "?cache_salt=" + "x" * 1025):
        for method in ("GET", "DELETE"):
            assert client.request(method, "/v1/cache" + query).status_code == 400
    assert engine.namespaces_asked == engine.namespaces_cleared == []
    response = client.post("/v1/cache")
    assert response.status_code == 405 and {"GET", "DELETE"} <= set(response.headers["allow"].split(", "))


def test_clients_without_trust_are_not_told_each_others_tokens(engine: FakeEngine) -> None:
    client = client_of(engine, tells_cached_text=False)
    tree = client.get("/v1/cache").json()
    assert [(run["begins"], run["begins_after"]) for run in tree["runs"]] == [(None, None)] * 2
    whole = client.get("/v1/cache", params={"run": tree["runs"][1]["id"]})
    assert (whole.status_code, whole.json()["error"]["code"]) == (403, "cached_text_withheld")
    assert tree["requests"][1]["why_not_more"]["cached_text"] is None
    for body in (CHAT, TEXT):
        answer = post(client, body)
        assert "Hello" not in answer.json()["usage"]["prompt_tokens_details"]["why_not_more"]["message"]
        assert answer.json()["usage"]["prompt_tokens_details"]["why_not_more"] == {
            "kind": "differs",
            "position": 2,
            "wanted_ids": [2],
            "wanted_text": "!",
            "cached_ids": [],
            "cached_text": None,
            "message": "at token 2 the cache has something else, the prompt [2] '!'",
        }


@pytest.mark.parametrize("why", [None, "complete"])
def test_a_reply_that_reused_all_there_was_needs_no_reason(
    client: TestClient, engine: FakeEngine, why: str | None
) -> None:
    engine.why_not_more = None if why is None else WhyNotMore("complete", 2)
    assert post(client, CHAT).json()["usage"]["prompt_tokens_details"]["why_not_more"] is None

"""One line a request: what was counted, never what was said."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.cli.log_config import JSONFormatter
from radixlm.runtime.errors import StepFailed
from radixlm.runtime.server import create_app
from radixlm.runtime.server.request_log import line_of, new_id
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from radixlm.runtime.cache.why_not_more import MatchPolicy

    from .conftest import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "a secret question"}]}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "radixlm.requests")
    return caplog


def fields(logged: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [record for record in logged.records if record.name == "radixlm.requests"]
    return record.fields  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_has_counts_times_and_the_reason_of_its_end(
    client: TestClient, engine: FakeEngine, logged: pytest.LogCaptureFixture, stream: bool
) -> None:
    client.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers={"x-request-id": "mine-1"})
    said = fields(logged)
    assert said.pop("total_s") >= 0
    assert said == {
        "id": "mine-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "client": "testclient",
        "namespace": engine.namespaces_asked[0].hex()[:12],
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "generated_tokens": 3,
        "queue_s": 0.05,
        "ttft_s": 0.1,
        "tpot_s": 0.1,
        "finish_reason": "stop",
    }
    line = logged.records[-1].getMessage()
    assert "id=mine-1" in line and "secret" not in line and "Hello" not in line and "\n" not in line


@pytest.mark.parametrize(("keys", "number"), [((), None), (("sk-first",), None), (("sk-first", "sk-other"), 2)])
def test_who_asked_is_logged_by_address_and_the_number_of_the_key(
    engine: FakeEngine, logged: pytest.LogCaptureFixture, keys: tuple[str, ...], number: int | None
) -> None:
    headers = {"authorization": f"Bearer {keys[-1]}"} if keys else {}
    with TestClient(create_app(engine, api_keys=keys)) as client:  # type: ignore[arg-type]
        client.post("/v1/chat/completions", json=CHAT, headers=headers)
    said = fields(logged)
    assert (said["client"], said.get("key")) == ("testclient", number)
    assert "sk-" not in logged.records[-1].getMessage()
    assert (f" client=testclient key={number} " in logged.records[-1].getMessage()) == (number is not None)


def test_choices_are_counted_together(client: TestClient, logged: pytest.LogCaptureFixture) -> None:
    client.post("/v1/chat/completions", json=CHAT | {"n": 3})
    assert (fields(logged)["generated_tokens"], fields(logged)["finish_reason"]) == (9, "stop")


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("POST", "/v1/chat/completions", {"messages": ["secret"]}, "invalid_request_error"),
        ("POST", "/v1/chat/completions", CHAT | {"model": "other"}, "model_not_found"),
        ("GET", "/v2", None, "not_found"),
    ],
)
def test_who_is_refused_is_logged_by_the_errors_code(
    client: TestClient, logged: pytest.LogCaptureFixture, method: str, path: str, body: Any, error: str
) -> None:
    client.request(method, path, json=body)
    assert fields(logged)["error"] == error
    assert "secret" not in logged.records[-1].getMessage()


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/chat/completions", CHAT, "server_error"),
        ("/v1/completions", {"prompt": "a"}, "server_error"),
        ("/v1/responses", {"input": "a"}, "server_error"),
        ("/v1/messages", CHAT | {"max_tokens": 2}, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_says_how(
    client: TestClient,
    engine: FakeEngine,
    logged: pytest.LogCaptureFixture,
    path: str,
    body: Any,
    error: str,
    stream: bool,
) -> None:
    engine.words = ["Hello", StepFailed("secret")]
    client.post(path, json=body | {"stream": stream})
    assert (fields(logged)["status"], fields(logged)["error"]) == (500, error)


def test_a_mistake_of_ours_is_500_with_the_requests_id(
    client: TestClient, engine: FakeEngine, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise TypeError("secret")

    monkeypatch.setattr(engine, "stream_chat", broken)
    response = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine-1")
    assert response.json()["error"]["type"] == "server_error" and "secret" not in response.text
    assert (fields(logged)["status"], fields(logged)["error"]) == (500, "TypeError")


def test_what_the_page_and_probes_poll_does_not_drown_the_log(
    client: TestClient, logged: pytest.LogCaptureFixture
) -> None:
    for path in ("/health", "/metrics", "/v1/cache"):
        assert client.get(path).status_code == 200
    assert not logged.records
    assert client.delete("/v1/cache").status_code == 200  # which changes something
    assert fields(logged)["method"] == "DELETE"
    logged.clear()
    logged.set_level(logging.DEBUG, "radixlm.requests")
    client.get("/v1/cache")
    assert fields(logged)["path"] == "/v1/cache"


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [("mine-1", True), (None, False), ("", False), ("x" * 129, False), ("two words", False), ("caf\xe9", False)],
)
def test_every_answer_has_an_id_and_the_clients_own_if_it_is_fit(
    client: TestClient, given: str | None, is_taken: bool
) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    for response in (client.get("/v1/models", headers=headers), client.get("/nothing", headers=headers)):
        answered = response.headers["x-request-id"]
        assert answered == given if is_taken else answered.startswith("req-") and len(answered) == 36


def test_prompts_are_logged_only_if_asked_for(engine: FakeEngine, logged: pytest.LogCaptureFixture) -> None:
    client = TestClient(create_app(engine, logs_prompts=True))  # type: ignore[arg-type]
    client.post("/v1/chat/completions", json=CHAT)
    assert fields(logged)["prompt"] == CHAT["messages"]


@pytest.mark.parametrize(
    ("server", "asked", "is_logged"), [("text", "off", False), ("off", None, False), ("off", "text", True)]
)
def test_a_prompt_whose_match_is_off_is_never_logged(
    engine: FakeEngine, logged: pytest.LogCaptureFixture, server: MatchPolicy, asked: str | None, is_logged: bool
) -> None:
    engine.match = server
    client = TestClient(create_app(engine, logs_prompts=True))  # type: ignore[arg-type]
    for wrong in ({}, {"temperature": "warm"}):  # a request that is refused is no exception
        logged.clear()
        client.post("/v1/chat/completions", json={**CHAT, "cache_match": asked, **wrong})
        assert fields(logged)["prompt"] == (CHAT["messages"] if is_logged else None)


def test_json_lines_have_the_fields_and_other_messages_theirs(
    client: TestClient, logged: pytest.LogCaptureFixture
) -> None:
    client.post("/v1/completions", json={"prompt": "secret\nquestion"})
    said = json.loads(JSONFormatter().format(logged.records[-1]))
    assert (said["level"], said["path"], said["generated_tokens"]) == ("info", "/v1/completions", 3)
    other = logging.LogRecord("x", logging.ERROR, "", 0, "it %s", ("failed",), None)
    assert json.loads(JSONFormatter().format(other))["message"] == "it failed"


def test_a_forked_process_makes_other_ids_than_its_parent() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, new_id("req-").encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read) as pipe:
        assert pipe.read() not in ("", new_id("req-"))


@pytest.mark.parametrize("letter", ["\x9b", "\u202e", "\u2066", "\u200b", "\xad", "\U000e0041", "\x1b", "\x7f"])
def test_what_steers_a_terminal_is_escaped_in_the_log(letter: str) -> None:
    line = line_of({"path": f"/a{letter}31mX"})
    assert letter not in line and json.loads(line.removeprefix("path=")) == f"/a{letter}31mX"
    assert line_of({"path": "/é/日本"}) == "path=/é/日本"

"""A stream says how far its prompt is, to clients that ask for it and to no others."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .real_server import RealServer, real_server

if TYPE_CHECKING:
    from starlette.testclient import TestClient

WORDS = "once there was a tree and it was old " * 3
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.fixture
def server() -> Iterator[RealServer]:
    with real_server(max_num_batched_tokens=16) as server:
        yield server


def body_of(path: str, prompt: str = WORDS) -> dict[str, Any]:
    if "chat" in path:
        return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3, "seed": 1, "ignore_eos": True}
    if "responses" in path:
        return {"input": prompt, "max_output_tokens": 3, "min_tokens": 3, "seed": 1}
    return {"prompt": prompt, "max_tokens": 3, "seed": 1, "ignore_eos": True}


def events(server: RealServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    text = server.client.post(server.url + path, json=body_of(path) | {"stream": True} | fields).text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def progress_of(event: dict[str, Any]) -> dict[str, int] | None:
    found: dict[str, int] | None = (event.get("response") or event).get("prompt_progress")
    return found


def said(event: dict[str, Any]) -> Any:
    """The text of an event, whichever endpoint's it is."""
    if "choices" not in event:
        return event.get("delta")
    choice = event["choices"][0]
    return choice["delta"].get("content") if "delta" in choice else choice["text"]


@pytest.mark.parametrize("path", PATHS)
def test_progress_rises_to_the_whole_prompt_before_any_text(server: RealServer, path: str) -> None:
    sent = events(server, path, return_progress=True)
    told = [(place, progress) for place, event in enumerate(sent) if (progress := progress_of(event)) is not None]
    totals = {progress["total"] for _, progress in told}
    (total,) = totals
    there = [progress["processed"] for _, progress in told]
    assert there == [*range(0, total, 16), total] and total > 32
    assert all(progress["cache"] == 0 and progress["time_ms"] >= 0 for _, progress in told)
    assert all(not said(sent[place]) for place, _ in told)
    assert told[-1][0] < min(place for place, event in enumerate(sent) if said(event))


@pytest.mark.parametrize("path", PATHS)
def test_what_was_cached_is_told_at_the_start(server: RealServer, path: str) -> None:
    first = [progress for event in events(server, path, return_progress=True) if (progress := progress_of(event))]
    again = [progress for event in events(server, path, return_progress=True) if (progress := progress_of(event))]
    cached = first[-1]["total"] - 1
    assert [(one["cache"], one["processed"]) for one in again] == [(cached, cached), (cached, cached + 1)]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_it_is_sent_unless_asked(server: RealServer, path: str) -> None:
    plain = events(server, path)
    assert not any("prompt_progress" in json.dumps(event) for event in plain)
    asked = [event for event in events(server, path, return_progress=True) if progress_of(event) is None]
    assert [said(event) for event in asked] == [said(event) for event in plain]


def test_progress_says_which_choices_prompt_it_is_of(server: RealServer) -> None:
    prompts = {"prompt": [WORDS, "once there was"]}
    totals = {
        event["choices"][0]["index"]: progress["total"]
        for event in events(server, "/v1/completions", return_progress=True, **prompts)
        if (progress := progress_of(event)) is not None
    }
    assert set(totals) == {0, 1} and totals[0] > totals[1]


@pytest.mark.parametrize("path", PATHS)
def test_progress_of_a_reply_that_is_no_stream_is_400(client: TestClient, path: str) -> None:
    error = client.post(path, json=body_of(path) | {"return_progress": True}).json()["error"]
    assert error["param"] == "return_progress" and "stream" in error["message"]


def test_the_name_of_a_request_reaches_the_engine(server: RealServer, caplog: pytest.LogCaptureFixture) -> None:
    """The log of a step that fails has it, too."""

    def broken(batch: object) -> None:
        server.model.before = lambda batch: None
        raise MemoryError("no room")

    caplog.set_level(logging.INFO)
    server.model.before = broken
    asked = server.client.post(server.url + PATHS[0], json=body_of(PATHS[0]), headers={"x-request-id": "mine-1"})
    assert (asked.status_code, asked.headers["x-request-id"]) == (500, "mine-1")
    assert any("mine-1" in record.getMessage() for record in caplog.records if record.name != "radixlm.requests")


def test_anthropics_stream_begins_with_what_was_found_and_pings_while_the_rest_is_computed(server: RealServer) -> None:
    body = body_of("chat") | {"stream": True, "return_progress": True}
    del body["ignore_eos"]
    for num_cached in (0, None):
        text = server.client.post(server.url + "/v1/messages", json=body).text
        sent = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]
        usage = sent[0]["message"]["usage"]
        total = usage["cache_read_input_tokens"] + usage["input_tokens"]
        found = total - 1 if num_cached is None else num_cached
        assert (sent[0]["type"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (
            "message_start",
            found,
            0,
        )
        pings = [event["prompt_progress"]["processed"] for event in sent if event["type"] == "ping"]
        assert pings == ([*range(16, total, 16), total] if num_cached == 0 else [total])
        kinds = [event["type"] for event in sent]
        assert kinds[: 1 + len(pings)] == ["message_start", *["ping"] * len(pings)]
        assert sent[-2]["usage"]["cache_read_input_tokens"] == found

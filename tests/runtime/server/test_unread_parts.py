"""Images and documents where models read text: refused where users attach them, noted where tools bring them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

HEADER = "x-radixlm-ignored"
URL = "data:image/png;base64,iVBORw0KGgo="
SEEN = {"type": "input_image", "image_url": URL, "detail": "high"}
READ = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PAPER = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}, "title": "a"}
IMAGE_NOTE = "[image left out: this model reads text only, and cannot see it]"
DOCUMENT_NOTE = "[document left out: this model reads text only, and cannot see it]"
USER = {"role": "user", "content": "Look."}


@pytest.fixture
def strict(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, is_strict=True)) as client:  # type: ignore[arg-type]
        yield client


def chat(client: TestClient, *content: dict[str, Any], legacy: bool = False, **fields: object) -> Any:
    """Ask as an agent does whose tool has brought a picture."""
    call: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": list(content)}
    said: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if legacy:
        said = {"role": "assistant", "function_call": call["function"]}
        result = {"role": "function", "name": "view", "content": list(content)}
    return client.post("/v1/chat/completions", json={"messages": [USER, said, result], **fields})


def respond(client: TestClient, *output: dict[str, Any], **fields: object) -> Any:
    """Ask as Codex does after its tool `view_image`."""
    call = {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": '{"path": "a.png"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": list(output)}
    return client.post("/v1/responses", json={"input": [USER, call, result], **fields})


def message(client: TestClient, *content: dict[str, Any], path: str = "/v1/messages", **fields: object) -> Any:
    """Ask as Claude Code does after it read a picture."""
    call = {"type": "tool_use", "id": "c1", "name": "Read", "input": {"file_path": "a.png"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": list(content), **fields}
    said = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": "fake", "messages": said}
    return client.post(path, json=body if path.endswith("count_tokens") else {**body, "max_tokens": 9})


def test_an_image_in_a_result_of_responses_becomes_a_note(client: TestClient, engine: FakeEngine) -> None:
    text = {"type": "input_text", "text": "a.png: "}
    response = respond(client, text, SEEN, READ, instructions="Be brief.")
    assert response.status_code == 200, response.text
    assert engine.asked[-1][0][-1]["content"] == f"a.png: {IMAGE_NOTE}{DOCUMENT_NOTE}"
    assert response.headers[HEADER] == "input.output.input_file, input.output.input_image"


def test_an_image_in_a_result_of_messages_becomes_a_note(client: TestClient, engine: FakeEngine) -> None:
    response = message(client, {"type": "text", "text": "a.png: "}, PICTURE, PAPER, is_error=False)
    assert response.status_code == 200, response.text
    assert engine.asked[-1][0][-1]["content"] == f"a.png: {IMAGE_NOTE}{DOCUMENT_NOTE}"
    assert response.headers[HEADER] == "messages.content.content.document, messages.content.content.image"
    counted = message(client, PICTURE, path="/v1/messages/count_tokens")
    assert counted.status_code == 200, counted.text


@pytest.mark.parametrize("legacy", [False, True], ids=["tool", "function"])
def test_an_image_in_a_result_of_chats_becomes_a_note(client: TestClient, engine: FakeEngine, legacy: bool) -> None:
    """It was refused, and with it every later request of the conversation, though the tool had run."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "a.png: "},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "of_mine", "of_mine": 1},
    ]
    response = chat(client, *parts, legacy=legacy)
    assert response.status_code == 200, response.text
    others = (f"[{kind} left out: this model reads text only, and cannot see it]" for kind in ("audio", "attachment"))
    assert engine.asked[-1][0][-1]["content"] == "".join(["a.png: ", IMAGE_NOTE, DOCUMENT_NOTE, *others])
    kinds = ("file", "image_url", "input_audio", "of_mine")
    listed = {f"messages.content.{kind}" for kind in kinds}
    assert set(response.headers[HEADER].split(", ")) == listed


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_what_a_message_of_chats_holds_is_refused_clearly(client: TestClient, role: str) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    response = client.post("/v1/chat/completions", json={"messages": [USER, {"role": role, "content": [part]}]})
    assert response.status_code == 400
    assert "a part has the type 'image_url'; models read and write text only" in response.json()["error"]["message"]


def test_what_another_model_refused_or_spoke_does_not_end_a_conversation(
    client: TestClient, engine: FakeEngine
) -> None:
    """OpenAI's clients send a reply back as they got it, from whichever server."""
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    spoken = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    response = client.post("/v1/chat/completions", json={"messages": [USER, refused, USER, parts, USER, spoken, USER]})
    assert response.status_code == 200, response.text
    said = [message["content"] for message in engine.asked[-1][0] if message["role"] == "assistant"]
    assert said == ["I will not.", "I will not.", ""]
    assert response.headers[HEADER] == "messages.audio"
    for field in ({"refusal": "no"}, {"audio": {"id": "a"}}):
        response = client.post("/v1/chat/completions", json={"messages": [{**USER, **field}]})
        assert response.status_code == 400 and "only assistant messages" in response.json()["error"]["message"]


def test_results_of_text_list_nothing(client: TestClient) -> None:
    assert HEADER not in chat(client, {"type": "text", "text": "a"}).headers
    assert HEADER not in respond(client, {"type": "input_text", "text": "a"}).headers
    assert HEADER not in message(client, {"type": "text", "text": "a"}).headers


def test_a_strict_server_refuses_them_all(strict: TestClient) -> None:
    image = {"type": "image_url", "image_url": {"url": URL}}
    for response in (respond(strict, SEEN), message(strict, PICTURE), chat(strict, image)):
        assert response.status_code == 400
        assert " cannot be read: the models read text" in response.json()["error"]["message"]
    assert respond(strict, {"type": "input_text", "text": "a"}).status_code == 200


@pytest.mark.parametrize("part", [SEEN, READ], ids=["image", "file"])
@pytest.mark.parametrize("role", ["user", "developer", "assistant"])
def test_what_a_message_of_responses_holds_is_refused_clearly(
    client: TestClient, role: str, part: dict[str, Any]
) -> None:
    response = client.post("/v1/responses", json={"input": [{"role": role, "content": [part]}]})
    assert response.status_code == 400
    expected = f"a part of the type {part['type']!r} cannot be read: the models read text only; remove it"
    assert expected in response.json()["error"]["message"]


@pytest.mark.parametrize("block", [PICTURE, PAPER], ids=["image", "document"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_what_a_message_of_messages_holds_is_refused_clearly(
    client: TestClient, role: str, block: dict[str, Any]
) -> None:
    said = [USER, {"role": role, "content": [block]}]
    response = client.post("/v1/messages", json={"model": "fake", "max_tokens": 9, "messages": said})
    assert response.status_code == 400
    expected = f"messages[1].content[0]: {block['type']} blocks cannot be read: the models read text only; remove it"
    assert response.json()["error"]["message"] == expected


def test_a_part_is_a_text_or_an_image_and_not_both(client: TestClient) -> None:
    for part in ({"type": "refusal"}, {"type": "input_text", "text": "a", "image_url": URL}):
        assert respond(client, part).status_code == 400

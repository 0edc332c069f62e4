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


def test_results_of_text_list_nothing(client: TestClient) -> None:
    assert HEADER not in respond(client, {"type": "input_text", "text": "a"}).headers
    assert HEADER not in message(client, {"type": "text", "text": "a"}).headers


def test_a_strict_server_refuses_both(strict: TestClient) -> None:
    for response in (respond(strict, SEEN), message(strict, PICTURE)):
        assert response.status_code == 400
        assert "image cannot be read: models here read text" in response.json()["error"]["message"]
    assert respond(strict, {"type": "input_text", "text": "a"}).status_code == 200


@pytest.mark.parametrize("part", [SEEN, READ], ids=["image", "file"])
@pytest.mark.parametrize("role", ["user", "developer", "assistant"])
def test_what_a_message_of_responses_holds_is_refused_clearly(
    client: TestClient, role: str, part: dict[str, Any]
) -> None:
    response = client.post("/v1/responses", json={"input": [{"role": role, "content": [part]}]})
    assert response.status_code == 400
    expected = f"a part of the type {part['type']!r} cannot be read: models here read text; leave it out"
    assert expected in response.json()["error"]["message"]


@pytest.mark.parametrize("block", [PICTURE, PAPER], ids=["image", "document"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_what_a_message_of_messages_holds_is_refused_clearly(
    client: TestClient, role: str, block: dict[str, Any]
) -> None:
    said = [USER, {"role": role, "content": [block]}]
    response = client.post("/v1/messages", json={"model": "fake", "max_tokens": 9, "messages": said})
    assert response.status_code == 400
    expected = f"messages[1].content[0]: {block['type']} blocks cannot be read: models here read text; leave it out"
    assert response.json()["error"]["message"] == expected


def test_a_part_is_a_text_or_an_image_and_not_both(client: TestClient) -> None:
    for part in ({"type": "input_text"}, {"type": "input_text", "text": "a", "image_url": URL}):
        assert respond(client, part).status_code == 400

"""Ollama's replies to one prompt: through the chat template, or to the text as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ..thought_templates import HYBRID
from .scripted import Scripted
from .test_ollama_chat import FIGURES, lines

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from .conftest import FakeEngine

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}


def generate(client: TestClient, **fields: object) -> Any:
    response = client.post("/api/generate", json={"model": "fake", "prompt": "Hi", "stream": False, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, **fields: object) -> str:
    response = client.post("/api/generate", json={"model": "fake", "prompt": "Hi", **fields})
    assert response.status_code == 400, response.text
    return str(response.json()["error"])


def test_a_prompt_is_a_message_of_the_user(engine: FakeEngine, client: TestClient) -> None:
    reply = generate(client)
    assert (reply["response"], reply["done_reason"], engine.asked[-1][0]) == ("Hello wörld!", "stop", [USER])
    assert reply.keys() >= FIGURES and "message" not in reply and "context" not in reply
    generate(client, system="Be brief.")
    assert engine.asked[-1][0] == [SYSTEM, USER]


def test_a_prompt_is_streamed(client: TestClient) -> None:
    *said, last = lines(client, "/api/generate")
    assert [line["response"] for line in said] == ["Hello", " wörld", "!"]
    assert last["response"] == "" and last["done"] and last.keys() >= FIGURES


def test_a_raw_prompt_is_the_text_itself(engine: FakeEngine, client: TestClient) -> None:
    assert generate(client, raw=True)["response"] == "Hello wörld!"
    assert engine.asked[-1][0] == "Hi"
    assert [line["response"] for line in lines(client, "/api/generate", raw=True)] == ["Hello", " wörld", "!", ""]


def test_a_model_without_a_template_goes_on_with_the_prompt(engine: FakeEngine, client: TestClient) -> None:
    engine.prompts.chat_template = None
    generate(client)
    assert engine.asked[-1][0] == "Hi"


def test_what_official_clients_send_without_being_asked_to_is_taken(engine: FakeEngine, client: TestClient) -> None:
    generate(client, suffix="", system="", template="", raw=False, format="", images=[], context=[])
    assert engine.asked[-1][0] == [USER]


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "return"), ("template", "{{ .Prompt }}"), ("context", [1, 2]), ("images", ["aGk="]), ("think", True)],
)
def test_what_would_change_the_reply_is_refused(field: str, value: object, client: TestClient) -> None:
    assert field in refused(client, **{field: value})


@pytest.mark.parametrize("field", [{"system": "Be brief."}, {"think": True}])
def test_a_raw_prompt_has_no_system_and_no_switch_for_thinking(field: Any, client: TestClient) -> None:
    assert "raw" in refused(client, raw=True, **field)


def test_reasoning_is_apart_from_the_reply() -> None:
    with Scripted.serving(HYBRID) as model:
        model.say("<think>\nHm, é.\n</think>\n\nYes.")
        asked = {"options": {"temperature": 0}, "think": True}
        reply = generate(model.client, **asked)
        assert (reply["thinking"], reply["response"]) == ("Hm, é.", "Yes.")
        model.say("<think>\nHm, é.\n</think>\n\nYes.")
        said = lines(model.client, "/api/generate", **asked)
        assert "".join(line.get("thinking", "") for line in said) == "Hm, é."
        assert "".join(line["response"] for line in said) == "Yes."
        assert not [line for line in said if line.get("thinking") and line["response"]]
        assert (
            "thinking"
            in model.client.post("/api/show", json={"model": model.engine.manifest.name}).json()["capabilities"]
        )
        message = model.client.post("/api/chat", json={"messages": [USER], "stream": False, **asked}).json()["message"]
        assert message["role"] == "assistant"

"""Responses with tools and thoughts, as Codex asks for them: items, their events, and their way back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from radixlm.runtime.server.openai import response_tools

from ..thought_templates import HYBRID
from .scripted import OSLO, USER, WEATHER, Scripted

FUNCTION = {"type": "function", "name": "get_weather", "description": "Rain?", "strict": False, "parameters": WEATHER}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'},
}
SPACE = {"type": "namespace", "name": "mcp", "description": "A server's.", "tools": [{**FUNCTION, "name": "look"}]}
SEARCH = {"type": "web_search", "search_context_size": "low", "filters": {"allowed_domains": ["a"]}}
TOOLS = [FUNCTION, PATCH, SPACE, SEARCH]
SEAL = "reasoning.encrypted_content"
PATCH_TEXT = '*** Begin\n+a = "é"\n'
CODEX = {
    "instructions": "You are an agent.",
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": [SEAL],
    "prompt_cache_key": "a thread",
    "client_metadata": {"x": "y"},
    "text": {"verbosity": "medium"},
}
MESSAGE_EVENTS = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]


def call_of(name: str, arguments: object) -> str:
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


WEATHER_CALL = call_of(OSLO[0], json.loads(OSLO[1]))


class Codex:
    """Asks a scripted model."""

    def __init__(self, model: Scripted) -> None:
        self.model = model

    def post(self, says: str, items: object = "Hi", **body: object) -> Any:
        self.model.say(says)
        asked = {"input": items, "temperature": 0, "max_output_tokens": 300, **CODEX, **body}
        return self.model.client.post("/v1/responses", json=asked)

    def whole(self, says: str, items: object = "Hi", **body: object) -> Any:
        response = self.post(says, items, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, says: str, items: object = "Hi", **body: object) -> list[Any]:
        text = self.post(says, items, stream=True, **body).text
        values = [json.loads(event.split("\ndata: ")[1]) for event in text.split("\n\n") if event]
        assert [value["sequence_number"] for value in values] == list(range(len(values)))
        return values


@pytest.fixture(scope="module")
def codex() -> Iterator[Codex]:
    with Scripted.serving(HYBRID) as model:
        yield Codex(model)


def kinds(values: list[Any]) -> list[str]:
    """The events' types, repeated ones once."""
    named = [value["type"].removeprefix("response.") for value in values]
    return [name for place, name in enumerate(named) if place == 0 or named[place - 1] != name]


def without_ids(items: list[Any]) -> list[Any]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def test_a_thought_words_and_calls_are_items_in_this_order(codex: Codex) -> None:
    reply = codex.whole(f"<think>\nHm.\n</think>\n\nI look.\n{WEATHER_CALL}\n{WEATHER_CALL}")
    thought, message, first, second = reply["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    for call in (first, second):
        assert (call["type"], call["name"], call["arguments"], call["status"]) == ("function_call", *OSLO, "completed")
    assert first["call_id"] != second["call_id"] and len({item["id"] for item in reply["output"]}) == 4
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    assert (reply["status"], reply["store"], reply["tools"], reply["tool_choice"]) == (
        "completed",
        False,
        TOOLS,
        "auto",
    )
    assert reply["reasoning"] == {"effort": "medium", "summary": "auto"}


def test_events_come_in_the_order_that_clients_expect(codex: Codex) -> None:
    says = f"<think>\nHm.\n</think>\n\nI look.\n{WEATHER_CALL}"
    values = codex.events(says)
    assert kinds(values) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        *MESSAGE_EVENTS,
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    last = values[-1]["response"]
    assert [value["item"] for value in values if value["type"].endswith("item.done")] == last["output"]
    assert without_ids(last["output"]) == without_ids(codex.whole(says)["output"])
    for place, item in enumerate(last["output"]):
        own = [value for value in values if value.get("output_index") == place]
        assert {value["item_id"] for value in own if "item_id" in value} == {item["id"]}
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"]["status"] == "completed"
    deltas = [value["delta"] for value in values if value["type"].endswith("arguments.delta")]
    assert len(deltas) > 2 and "".join(deltas) == OSLO[1]


def test_a_custom_tool_gets_a_text(codex: Codex) -> None:
    says = call_of("apply_patch", {"input": PATCH_TEXT})
    [call] = codex.whole(says)["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH_TEXT)
    values = codex.events(says)
    assert kinds(values)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert "".join(value["delta"] for value in values if value["type"].endswith("input.delta")) == PATCH_TEXT


def test_a_tool_in_a_namespace_has_its_own_name_and_the_namespace(codex: Codex) -> None:
    [call] = codex.whole(call_of("mcp.look", json.loads(OSLO[1])))["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp", "look")


def test_any_number_of_tools_in_namespaces_is_refused_before_one_is_looked_at(
    codex: Codex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60,000 of them held the event loop for a second and a half."""
    monkeypatch.setattr(response_tools, "_converted", lambda *_: pytest.fail("one was looked at"))
    tools = [{**FUNCTION, "name": f"look_{number}"} for number in range(171)]
    response = codex.post("", tools=[{**SPACE, "tools": tools}, {**SPACE, "tools": [*tools, *tools]}])
    assert response.status_code == 400 and "513 entries" in response.json()["error"]["message"]


def test_unknown_fields_of_a_tool_are_bounded_as_those_of_a_body(codex: Codex) -> None:
    response = codex.post("", tools=[FUNCTION | {f"mine_{number}": 1 for number in range(65)}])
    assert response.status_code == 400 and "more than 64 unknown fields" in response.json()["error"]["message"]


def test_tools_that_cannot_be_run_here_are_named_as_ignored(codex: Codex) -> None:
    others = [{"type": "image_generation", "quality": "low"}, {"type": "mcp", "server_label": "a", "headers": {}}]
    response = codex.post("Hi.", tools=[*TOOLS, *others])
    assert response.status_code == 200
    named = set(response.headers["x-radixlm-ignored"].split(", "))
    assert named == {"tools.web_search", "tools.image_generation", "tools.mcp", "client_metadata", "text.verbosity"}
    plain, more = (codex.whole("Hi.", tools=tools)["usage"]["input_tokens"] for tools in (TOOLS[:3], TOOLS))
    assert plain == more


@pytest.mark.parametrize("drops_text", [False, True], ids=["as they came", "as Codex keeps them"])
def test_items_that_come_back_make_the_prompt_that_the_reply_stands_behind(codex: Codex, drops_text: bool) -> None:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"Oslo? {drops_text}"}]},
    ]
    num_before = 0
    calls = [WEATHER_CALL, call_of("apply_patch", {"input": PATCH_TEXT}), call_of("mcp.look", json.loads(OSLO[1]))]
    for turn, said in enumerate(calls):
        reply = codex.whole(f"<think>\nTurn {turn}, é.\n</think>\n\nI look.\n{said}", items)
        assert reply["usage"]["input_tokens_details"]["cached_tokens"] >= num_before, turn
        num_before = reply["usage"]["total_tokens"] - 1  # its last token is not computed
        for item in reply["output"]:
            if item["type"] == "reasoning" and drops_text:
                item = {key: item[key] for key in ("type", "id", "summary", "encrypted_content")}
            items.append(item)
        call = reply["output"][-1]
        kind = call["type"].removesuffix("_call") + "_call_output"
        output: object = f"rain {turn}" if turn else [{"type": "input_text", "text": "rain 0"}]
        items.append({"type": kind, "call_id": call["call_id"], "output": output})


def test_thoughts_are_sealed_only_if_that_is_asked_for(codex: Codex) -> None:
    says = "<think>\nHm, é.\n</think>\n\nYes."
    sealed, plain = (codex.whole(says, include=include)["output"][0] for include in ([SEAL], []))
    assert sealed["encrypted_content"] and plain["encrypted_content"] is None
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA=="}
    items = [USER, foreign, {"role": "assistant", "content": "Yes."}, USER]
    others = [item for item in items if item is not foreign]
    tokens = [codex.whole("Yes.", each)["usage"]["input_tokens"] for each in (items, others)]
    assert tokens[0] == tokens[1]


def test_a_choice_may_name_a_tool_or_several(codex: Codex) -> None:
    asked = {"parallel_tool_calls": False, "tools": TOOLS}
    for choice, name in (
        ({"type": "function", "name": "get_weather"}, "get_weather"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            "apply_patch",
        ),
        ("required", "get_weather"),
    ):
        says = call_of(name, {"input": "a"} if name == "apply_patch" else json.loads(OSLO[1]))
        [call] = codex.whole(says, tool_choice=choice, **asked)["output"]
        assert call["name"] == name
    [item] = codex.whole("Hi.", tool_choice="none")["output"]
    assert item["type"] == "message"


def test_a_call_that_is_cut_is_incomplete_and_not_lost(codex: Codex) -> None:
    for says, key in ((WEATHER_CALL, "arguments"), (call_of("apply_patch", {"input": PATCH_TEXT * 9}), "input")):
        values = codex.events(says, max_output_tokens=24)
        last = values[-1]
        assert last["type"] == "response.incomplete"
        call = last["response"]["output"][-1]
        assert call["status"] == "incomplete" and call[key]
        assert values[-2]["item"] == call


def test_logprobs_are_those_of_the_words_whole_and_streamed(codex: Codex) -> None:
    asked = {"include": ["message.output_text.logprobs"], "tools": []}
    says = "<think>\nHm, é.\n</think>\n\nYes, it is."
    reply = codex.whole(says, **asked)
    part = reply["output"][1]["content"][0]
    num_words = reply["usage"]["output_tokens"] - reply["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert len(part["logprobs"]) == num_words > 3
    values = codex.events(says, **asked)
    streamed = [
        entry for value in values if value["type"] == "response.output_text.delta" for entry in value["logprobs"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in part["logprobs"]]
    assert values[-1]["response"]["output"][1]["content"][0]["logprobs"] == streamed


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [FUNCTION, FUNCTION]}, "twice"),
        ({"tools": [{**SPACE, "tools": [SPACE]}]}, "tools[0].tools[0] is a namespace in a namespace"),
        ({"tool_choice": {"type": "allowed_tools", "tools": ["get_weather"]}}, "tool_choice is"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": {}, "namespace": []}]}}, "tool_choice is"),
        ({"tools": [{**FUNCTION, "parameters": {"type": "string"}, "strict": True}]}, "tools[0].parameters"),
        ({"tools": [{**SPACE, "tools": [{"type": "function"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0]"),
        ({"tools": [{**FUNCTION, "parameter": {}}]}, "parameters"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "no"}}, "no"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "[1"}]}, "'b'"),
        ({"input": [{"type": "message", "content": "a"}]}, "role"),
    ],
)
def test_what_is_wrong_is_a_400_that_says_where(codex: Codex, body: dict[str, object], words: str) -> None:
    response = codex.post("Hi.", **body) if "input" not in body else codex.post("Hi.", body["input"])
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


def test_a_tool_whose_schema_cannot_be_followed_is_called_and_listed(codex: Codex) -> None:
    """Zod's way to write that a text is an address of mail had every request refused."""
    odd = {
        "properties": {"city": {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z]*@"}, "days": {"type": "integer"}}
    }
    tools = [
        SEARCH,
        {**FUNCTION, "parameters": odd},
        {**SPACE, "tools": [{**FUNCTION, "name": "look", "parameters": odd}]},
    ]
    response = codex.post(WEATHER_CALL, tools=tools)
    assert [item["type"] for item in response.json()["output"]] == ["function_call"]
    listed = set(response.headers["x-radixlm-ignored"].split(", "))
    assert {"tools.get_weather.parameters", "tools.mcp.look.parameters"} <= listed
    strict = codex.post("Hi.", tools=[{**FUNCTION, "parameters": odd, "strict": True}])
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "tools[0].parameters"


def test_fields_of_tools_are_ignored_and_refused_as_elsewhere(codex: Codex) -> None:
    marked = {**FUNCTION, "defer_loading": True, "of_mine": 1}
    named = codex.post("Hi.", tools=[marked]).headers["x-radixlm-ignored"]
    assert {"tools.defer_loading", "tools.of_mine"} <= set(named.split(", "))

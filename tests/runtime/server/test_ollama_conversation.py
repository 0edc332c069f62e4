"""Conversations in Ollama's shapes: each result belongs to a call, whatever the client says of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.chat.tools.tool_calls import ToolCall
from radixlm.runtime.server.ollama.conversation import OllamaMessage, for_template, known_as

if TYPE_CHECKING:
    from starlette.testclient import TestClient

TOOLS = ("read", "write")
OWN = "call_" + "a1" * 12
CALLS = st.lists(
    st.tuples(st.sampled_from(TOOLS), st.dictionaries(st.sampled_from("ab"), st.integers(0, 2), max_size=2)),
    min_size=1,
    max_size=4,
    unique_by=lambda call: (call[0], *sorted(call[1].items())),
)


def told(*messages: Any) -> list[Any]:
    return for_template(msgspec.convert(messages, list[OllamaMessage]))


def call(name: str = "read", arguments: object = None, **fields: object) -> Any:
    return {"function": {"name": name, "arguments": arguments or {}}, **fields}


def said(*calls: Any) -> Any:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def result(**fields: object) -> Any:
    return {"role": "tool", "content": "done", **fields}


@given(calls=CALLS, names_tools=st.booleans(), has_ids=st.booleans(), data=st.data())
def test_results_belong_to_calls_by_id_or_by_tool_or_by_order(
    calls: list[tuple[str, dict[str, int]]], names_tools: bool, has_ids: bool, data: st.DataObject
) -> None:
    """Compared with a search of all calls for each result."""
    order = data.draw(st.permutations(range(len(calls)))) if has_ids else list(range(len(calls)))
    if names_tools and not has_ids:  # the tools in any order, the results of each in that of its calls
        first = data.draw(st.sampled_from(TOOLS))
        order.sort(key=lambda place: calls[place][0] != first)
    sent = [call(name, arguments, **({"id": f"id{n}"} if has_ids else {})) for n, (name, arguments) in enumerate(calls)]
    results = [
        result(**({"tool_call_id": f"id{n}"} if has_ids else {"tool_name": calls[n][0]} if names_tools else {}))
        for n in order
    ]
    message, *answers = told(said(*sent), *results)
    ids = [each["id"] for each in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert [answer["tool_call_id"] for answer in answers] == [ids[n] for n in order]


@given(calls=CALLS)
def test_a_call_is_known_by_its_content_in_any_order_of_keys(calls: list[tuple[str, dict[str, int]]]) -> None:
    for name, arguments in calls:
        text = msgspec.json.encode(arguments).decode()
        own, by_content = known_as(ToolCall(OWN, name, text))
        assert own.call_id == OWN and by_content.arguments == text
        for back in (arguments, dict(reversed(arguments.items())), text):
            assert told(said(call(name, back)))[0]["tool_calls"][0]["id"] == by_content.call_id
        assert told(said(call(name + "_", arguments)))[0]["tool_calls"][0]["id"] != by_content.call_id
        assert told(said(call(name, {**arguments, "c": 1})))[0]["tool_calls"][0]["id"] != by_content.call_id


def test_an_id_of_ours_is_kept_and_any_other_is_not() -> None:
    assert told(said(call(id=OWN)))[0]["tool_calls"][0]["id"] == OWN
    assert told(said(call(id="other")))[0]["tool_calls"][0]["id"] == told(said(call()))[0]["tool_calls"][0]["id"]
    assert told(said(call(id=OWN)), result(tool_call_id=OWN))[1]["tool_call_id"] == OWN


def test_a_result_without_a_call_is_told_as_it_comes() -> None:
    [first] = told(result(tool_name="read"))
    assert first == {"role": "tool", "content": "done", "tool_call_id": "result_1", "name": "read"}


def test_results_answer_the_last_calls_alone() -> None:
    *_, answer = told(said(call("read", {"a": 1})), said(call("read", {"a": 2})), result())
    assert answer["tool_call_id"] == told(said(call("read", {"a": 2})))[0]["tool_calls"][0]["id"]


@pytest.mark.parametrize("arguments", ["[1]", "{", "1", '"a"'])
def test_arguments_are_an_object(arguments: str, client: TestClient) -> None:
    messages = [{"role": "user", "content": "Hi"}, said(call("read", arguments))]
    response = client.post("/api/chat", json={"messages": messages})
    assert response.status_code == 400 and "messages[1].tool_calls[0].function.arguments" in response.json()["error"]


def test_deep_arguments_are_no_failure(client: TestClient) -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    messages = [{"role": "user", "content": "Hi"}, said(call("read", deep)), result()]
    assert client.post("/api/chat", json={"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "robot", "content": "Hi"}, "role"),
        ({"role": "user", "content": "Hi", "thinking": "Hm."}, "thinking"),
        ({"role": "user", "content": "", "tool_calls": [call()]}, "tool_calls"),
    ],
)
def test_a_message_of_another_shape_is_refused(message: Any, named: str, client: TestClient) -> None:
    response = client.post("/api/chat", json={"messages": [message]})
    assert response.status_code == 400 and named in response.json()["error"]


def test_roles_come_in_capitals_and_content_may_be_null() -> None:
    assert told({"role": "User", "content": None}) == [{"role": "user", "content": ""}]
    assert told({"role": "developer", "content": "Be brief."})[0]["role"] == "system"
    assert told({"role": "assistant", "content": "Yes.", "thinking": "Hm."})[0]["reasoning_content"] == "Hm."


def test_many_results_are_matched_without_looking_through_all_calls() -> None:
    counts = []
    for num_calls in (50, 200):
        calls = [call("read", {"a": number}) for number in range(num_calls)]
        results = [result(tool_name="read") if number % 2 else result(tool_call_id="x") for number in range(num_calls)]
        messages = msgspec.convert([said(*calls), *results], list[OllamaMessage])
        events = list[str]()
        sys.setprofile(lambda frame, event, argument, seen=events: seen.append(event))
        try:
            for_template(messages)
        finally:
            sys.setprofile(None)
        counts.append(len(events))
    assert counts[1] < 5 * counts[0]

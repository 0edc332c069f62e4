"""Ollama's chats: whole, and as lines of JSON; with the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import EngineOverloaded, StepFailed
from radixlm.runtime.server import create_app
from radixlm.runtime.server.ollama.requests import OllamaOptions
from starlette.testclient import TestClient

from ..tool_templates import QWEN
from .scripted import OSLO, TOOLS, Scripted
from .test_sampling_fields import FIELDS, VALUES

if TYPE_CHECKING:
    from types import SimpleNamespace

    from .conftest import FakeEngine

HEADER = "x-radixlm-ignored"
USER = {"role": "user", "content": "Hi"}
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


def ask(client: TestClient, messages: list[Any] | None = None, **fields: object) -> Any:
    body = {"model": "fake", "messages": [USER] if messages is None else messages, **fields}
    return client.post("/api/chat", json=body)


def whole(client: TestClient, messages: list[Any] | None = None, **fields: object) -> Any:
    response = ask(client, messages, stream=False, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def lines(client: TestClient, path: str = "/api/chat", **fields: object) -> list[Any]:
    """The lines of a stream, each a JSON object."""
    body = {"model": "fake", **({"messages": [USER]} if path == "/api/chat" else {"prompt": "Hi"}), **fields}
    response = client.post(path, json=body)
    assert response.headers["content-type"].startswith("application/x-ndjson"), response.text
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def refused(client: TestClient, messages: list[Any] | None = None, status: int = 400, **fields: object) -> str:
    """The message of an error, whose body has nothing else."""
    response = ask(client, messages, **fields)
    assert response.status_code == status, response.text
    [(name, message)] = response.json().items()
    assert name == "error"
    return str(message)


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with Scripted.serving(QWEN) as model:
        yield model


def test_a_whole_reply_has_a_message_a_reason_and_figures(client: TestClient) -> None:
    reply = whole(client)
    assert reply.pop("created_at").endswith("Z")
    assert reply.pop("prompt_tokens_details")["cached_tokens"] == 2
    assert {name: reply.pop(name) for name in FIGURES} == {
        "total_duration": 200_000_000,
        "load_duration": 50_000_000,
        "prompt_eval_duration": 50_000_000,
        "eval_duration": 100_000_000,
        "prompt_eval_count": 3,
        "eval_count": 3,
    }
    said = {"role": "assistant", "content": "Hello wörld!"}
    assert reply == {"model": "fake", "message": said, "done": True, "done_reason": "stop"}


def test_a_reply_is_streamed_unless_it_is_not_wanted(client: TestClient) -> None:
    *said, last = lines(client)
    assert [line["message"]["content"] for line in said] == ["Hello", " wörld", "!"]
    assert all(line["done"] is False and not FIGURES & line.keys() for line in said)
    assert last["done"] is True and last["done_reason"] == "stop" and last.keys() >= FIGURES
    assert last["message"] == {"role": "assistant", "content": ""}


def test_the_model_is_called_as_the_client_calls_it(client: TestClient) -> None:
    for name in ("fake", "fake:latest"):
        assert ask(client, model=name, stream=False).json()["model"] == name
    assert refused(client, model="fake:7b", status=404).startswith("model not found: there is no model 'fake:7b'")


@pytest.mark.parametrize("name", VALUES)
def test_options_are_the_sampling_parameters_of_all_apis(name: str, engine: FakeEngine, client: TestClient) -> None:
    sent, got = VALUES[name]
    wire_name = FIELDS[name].about.names.get("ollama", name)
    limits = {} if name == "max_tokens" else {"num_predict": 100}
    whole(client, options={**limits, wire_name: sent})
    assert getattr(engine.asked[-1][1], name) == got


@pytest.mark.parametrize("sent", [-1, -2])
def test_a_reply_may_be_as_long_as_there_is_room(sent: int, engine: FakeEngine, client: TestClient) -> None:
    whole(client, options={"num_predict": sent})
    assert engine.asked[-1][1].max_tokens is None


def test_numbers_come_as_other_languages_write_them(engine: FakeEngine, client: TestClient) -> None:
    whole(client, options={"num_predict": 7.0, "top_k": "5", "num_ctx": 512.0})
    assert (engine.asked[-1][1].max_tokens, engine.asked[-1][1].top_k) == (7, 5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mirostat", 1),
        ("typical_p", 0.7),
        ("tfs_z", 0.5),
        ("penalize_newline", False),
        ("max_tokens", 5),
        ("repeat_penality", 1.2),
        ("temperature", -1),
    ],
)
def test_an_option_that_would_change_the_reply_is_refused(option: str, value: object, client: TestClient) -> None:
    assert option in refused(client, options={option: value})


def test_options_that_ask_for_nothing_are_taken(client: TestClient) -> None:
    neutral = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "penalize_newline": True, "stop": [], "num_ctx": 512}
    response = ask(client, stream=False, options=neutral)
    assert response.status_code == 200 and HEADER not in response.headers


def test_options_of_the_machine_are_listed(client: TestClient) -> None:
    machine = {"num_gpu": 1, "num_thread": 8, "use_mmap": True, "num_keep": 5, "mirostat_tau": 0.8, "num_ctx": 4096}
    response = ask(client, stream=False, options=machine, keep_alive="5m")
    assert response.headers[HEADER].split(", ") == ["keep_alive", *sorted(f"options.{name}" for name in machine)]


def test_a_penalty_of_few_tokens_is_refused_and_none_of_no_tokens(engine: FakeEngine, client: TestClient) -> None:
    for last_n in (-1, 512, 10_000):
        whole(client, options={"repeat_penalty": 1.2, "repeat_last_n": last_n})
        assert engine.asked[-1][1].repetition_penalty == 1.2
    whole(client, options={"repeat_penalty": 1.2, "repeat_last_n": 0})
    assert engine.asked[-1][1].repetition_penalty == 1.0
    whole(client, options={"repeat_last_n": 64})
    assert "repeat_last_n is 64" in refused(client, options={"repeat_penalty": 1.2, "repeat_last_n": 64})


def test_a_penalty_of_the_model_is_one_too() -> None:
    options = OllamaOptions(repeat_last_n=64)
    with pytest.raises(Exception, match="repeat_last_n is 64"):
        options.sampling_params(SamplingParams(repetition_penalty=1.1), logprobs=None, context_length=512)


@pytest.mark.parametrize(
    ("think", "told"),
    [
        (None, None),
        (False, {"enable_thinking": False}),
        (True, {"enable_thinking": True}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("max", {"enable_thinking": True, "reasoning_effort": "max"}),
    ],
)
def test_thinking_is_a_variable_of_the_template(
    think: object, told: object, engine: FakeEngine, client: TestClient
) -> None:
    thinking(engine.prompts)
    whole(client, think=think)
    assert engine.options[-1].template_kwargs == told


def thinking(prompts: SimpleNamespace) -> None:
    """Have the model think."""
    prompts.reasoning.format = object()


@pytest.mark.parametrize("think", [True, "high"])
def test_a_model_that_does_not_think_is_not_asked_to(think: object, client: TestClient) -> None:
    assert refused(client, think=think) == "'fake' does not support thinking; remove think"
    assert whole(client, think=False)["done"]


def test_a_level_that_there_is_not_is_refused(client: TestClient) -> None:
    assert "think" in refused(client, think="very hard")


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(..., "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")]
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_that_says_nothing_loads_or_unloads(
    path: str, keep_alive: object, reason: str, engine: FakeEngine, client: TestClient
) -> None:
    body = {"model": "fake"} | ({} if keep_alive is ... else {"keep_alive": keep_alive})
    reply = client.post(path, json=body).json()
    assert (reply["done"], reply["done_reason"], engine.asked) == (True, reason, [])
    assert reply["message" if path == "/api/chat" else "response"] in ({"role": "assistant", "content": ""}, "")


@pytest.mark.parametrize("fields", [{"options": {"dry_base": -3.0}}, {"options": {"num_ctx": 0.5}}, {"kv_budget": 7}])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_what_is_wrong_is_refused_also_where_nothing_is_asked(
    path: str, fields: dict[str, object], client: TestClient
) -> None:
    assert client.post(path, json={"model": "fake", **fields}).status_code == 400


@pytest.mark.parametrize("value", ["soon", "5 minutes", "", "m", "5m!"])
def test_a_duration_that_is_none_is_refused(value: str, client: TestClient) -> None:
    assert "keep_alive" in refused(client, keep_alive=value)


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("raw", [False, True])
def test_a_reply_keeps_to_a_format(path: str, raw: bool, format: object, model: Scripted) -> None:
    model.say('{"a": 1} and more')
    body = {"messages": [USER]} if path == "/api/chat" else {"prompt": "Hi", "raw": raw}
    asked = body | {"format": format, "stream": False, "options": {"temperature": 0, "num_predict": 20}}
    reply = model.client.post(path, json=asked).json()
    assert reply.get("response", reply.get("message", {}).get("content")) == '{"a": 1}'


def test_an_empty_format_is_none(engine: FakeEngine, client: TestClient) -> None:
    whole(client, format="")
    assert engine.options[-1].constraint is None
    assert "format" in refused(client, format="yaml")


def test_images_are_refused_wherever_they_are(client: TestClient) -> None:
    assert "images" in refused(client, [USER | {"images": ["aGk="]}])
    assert whole(client, [USER | {"images": []}])["done"]
    assert "images" in client.post("/api/generate", json={"prompt": "Hi", "images": ["aGk="]}).json()["error"]


def test_logprobs_are_a_list_with_the_text_they_belong_to(client: TestClient) -> None:
    first = whole(client, logprobs=True, top_logprobs=1)["logprobs"][0]
    assert (first["token"], first["logprob"]) == ("Hello", -0.5) and len(first["top_logprobs"]) == 1
    assert [len(line.get("logprobs", ())) for line in lines(client, logprobs=True)] == [1, 1, 1, 0]
    assert "top_logprobs" in refused(client, logprobs=True, top_logprobs=21)


def test_progress_comes_before_the_text_if_asked_for(client: TestClient) -> None:
    first, second, *_ = lines(client, return_progress=True)
    assert (first["prompt_progress"]["processed"], second["prompt_progress"]["total"]) == (2, 3)


def test_an_error_on_the_way_is_the_last_line(engine: FakeEngine, client: TestClient) -> None:
    engine.words[1] = StepFailed("out of luck")
    assert lines(client)[1:] == [{"error": "out of luck"}]
    engine.words[0] = EngineOverloaded(3, 2, 1)
    response = ask(client)
    assert response.status_code == 503 and list(response.json()) == ["error"]


def test_errors_have_ollamas_shape_whatever_refuses(engine: FakeEngine, client: TestClient) -> None:
    assert (
        "not valid JSON"
        in client.post("/api/chat", content=b"{", headers={"content-type": "application/json"}).json()["error"]
    )
    assert client.get("/api/chat").status_code == 405 and list(client.get("/api/chat").json()) == ["error"]
    assert "no endpoint /api/copy" in client.post("/api/copy", json={}).json()["error"]
    locked = TestClient(create_app(engine, api_keys=("sk-one",)))  # type: ignore[arg-type]
    response = ask(locked)
    assert response.status_code == 401 and list(response.json()) == ["error"]


def test_history_is_truncated_where_that_is_asked_for(client: TestClient, engine: FakeEngine) -> None:
    assert whole(client, truncate=True)["truncation"] == {
        "strategy": "middle",
        "dropped_messages": [],
        "num_dropped_tokens": 0,
    }
    assert "truncation" not in whole(client, truncate=False)


TOOL = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}
EDIT = ("edit", '{"path": "a b.txt", "line": 1, "text": "\u00dcn\\n"}')


def call_back(call: Any) -> Any:
    """A call as the Python client keeps it, its keys in another order."""
    arguments = call["function"]["arguments"]
    return {"function": {"name": call["function"]["name"], "arguments": dict(sorted(arguments.items()))}}


def own_id(call: Any) -> Any:
    """A call as LangChain sends it back, under an id of its own."""
    return {**call_back(call), "type": "function", "id": "8d1f3b5e-0000"}


@pytest.mark.parametrize("write", [dict, call_back, own_id])
@pytest.mark.parametrize("result", [{}, {"tool_name": "edit"}])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_call_is_known_when_it_comes_back_whatever_the_client_keeps_of_it(
    write: Any, result: Any, num_calls: int, model: Scripted
) -> None:
    """Law: what was generated is not computed again."""
    model.client.delete("/v1/cache")
    first, calls = called(model, [EDIT] * num_calls, tools=[TOOL])
    assert calls[0]["function"] == {"name": "edit", "arguments": json.loads(EDIT[1]), "index": 0}
    said = {"role": "assistant", "content": "", "tool_calls": [write(call) for call in calls]}
    results = [{"role": "tool", "content": "done", **result}] * num_calls
    second, _ = called(model, [], [USER, said, *results], tools=[TOOL])
    generated = first["prompt_eval_count"] + first["eval_count"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= generated - 1


def test_other_arguments_are_another_call(model: Scripted) -> None:
    model.client.delete("/v1/cache")
    first, [call] = called(model, [EDIT], tools=[TOOL])
    call["function"]["arguments"]["line"] = 1.0
    said = {"role": "assistant", "content": "", "tool_calls": [call_back(call)]}
    second, _ = called(model, [], [USER, said, {"role": "tool", "content": "done"}], tools=[TOOL])
    generated = first["prompt_eval_count"] + first["eval_count"]
    assert second["prompt_tokens_details"]["cached_tokens"] < generated - 1


def test_several_calls_come_in_order_each_whole(model: Scripted) -> None:
    last, calls = called(model, [OSLO, OSLO, ("now", "{}")])
    assert [(call["function"]["name"], call["function"]["index"]) for call in calls] == [
        ("get_weather", 0),
        ("get_weather", 1),
        ("now", 2),
    ]
    assert last["done_reason"] == "stop" and len({call["id"] for call in calls}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_cut_is_not_given_to_be_run(stream: bool, model: Scripted) -> None:
    last, calls = called(model, [OSLO, OSLO], stream=stream, options={"temperature": 0, "num_predict": 45})
    assert (last["done_reason"], [call["function"]["name"] for call in calls]) == ("length", ["get_weather"])


def called(
    model: Scripted, calls: list[tuple[str, str]], messages: list[Any] | None = None, **fields: object
) -> tuple[Any, list[Any]]:
    """The last line of a reply that calls tools, and the calls of all lines."""
    model.say(model.format.text_of(calls) if calls else "Rain.")
    body = {"messages": messages or [USER], "tools": TOOLS, "options": {"temperature": 0}, **fields}
    said = [json.loads(line) for line in model.client.post("/api/chat", json=body).text.splitlines()]
    return said[-1], [call for line in said for call in line["message"].get("tool_calls", ())]

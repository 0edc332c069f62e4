"""A call that comes back is found again, however the client has written its arguments.

The law: the ids that are fed are those that were generated. Where the call is not the one that was given, the prompt is
rendered from what the client sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from radixlm.runtime.chat.tools.known_formats import HERMES, LLAMA3, PLAIN

from ..tool_templates import LLAMA, NO_TOOLS, QWEN
from .scripted import USER, Scripted

ARGUMENTS = '{"path": "a b.txt", "line": 1, "text": "Ünï\\n\\"x\\"", "deep": {"z": [1, 2.0, true], "a": null}}'
TOOL = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}
MODELS = {"hermes": (QWEN, HERMES), "llama3": (LLAMA, LLAMA3), "plain": (NO_TOOLS, PLAIN)}
Write = Callable[[str], str]


def written(**options: Any) -> Write:
    """Reads the arguments and writes them with other options."""
    return lambda text: json.dumps(json.loads(text), **options)


CLIENTS: dict[str, Write] = {
    "as it came": str,
    "no spaces": written(separators=(",", ":")),
    "sorted keys": written(sort_keys=True),
    "escaped": written(ensure_ascii=True),
    "unescaped": written(ensure_ascii=False, indent=2),
}
OTHER_CALLS: dict[str, Write] = {
    "a float": lambda text: text.replace('"line": 1', '"line": 1.0'),
    "true": lambda text: text.replace('"line": 1', '"line": true'),
    "a text": lambda text: text.replace('"line": 1', '"line": "1"'),
    "an integer": lambda text: text.replace("2.0", "2"),
    "a key twice": lambda text: text.replace("{", '{"line": 2, ', 1),
    "a key more": lambda text: text.replace('"line": 1', '"line": 1, "more": null'),
    "a key less": lambda text: text.replace('"line": 1, ', ""),
    "another text": lambda text: text.replace("a b", "a  b"),
    "another order of a list": lambda text: text.replace("[1, 2.0", "[2.0, 1"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    model = Scripted(*MODELS[request.param])
    with model.engine, model.client:
        yield model


@pytest.fixture(scope="module")
def hermes() -> Iterator[Scripted]:
    with Scripted.serving(QWEN) as model:
        yield model


class Loop:
    """A first turn that calls `edit`, and a second one with whatever the client makes of it."""

    def __init__(self, model: Scripted, said: str | None = None, **body: Any) -> None:
        model.client.delete("/v1/cache")
        self.model, self.body = model, {"tools": [TOOL], "return_token_ids": True, **body}
        first = model.ask(said or model.format.text_of([("edit", ARGUMENTS)]), **self.body).json()
        choice = first["choices"][0]
        self.message = choice["message"]
        self.generated = [*first["prompt_token_ids"], *choice["token_ids"]]

    def goes_on(self, message: Any = None, **body: Any) -> Any:
        """The second turn."""
        message = self.message if message is None else message
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in message["tool_calls"]]
        return self.model.ask("Hm.", [USER, message, *results], **{**self.body, **body}).json()

    def changed(self, write: Write = str, **fields: Any) -> Any:
        """The message with its first call written otherwise, and with other fields of it."""
        first, *others = self.message["tool_calls"]
        function = {**first["function"], "arguments": write(first["function"]["arguments"])}
        return {**self.message, "tool_calls": [{**first, "function": function, **fields}, *others]}

    def is_found(self, second: Any) -> bool:
        """Whether the second prompt begins with what was generated, and all of that had keys and values."""
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        is_fed = second["prompt_token_ids"][: len(self.generated)] == self.generated
        assert is_fed == (cached >= len(self.generated) - 1)
        return is_fed


@pytest.mark.parametrize("client", CLIENTS)
def test_the_ids_that_are_fed_are_those_that_were_generated(model: Scripted, client: str) -> None:
    loop = Loop(model)
    assert loop.is_found(loop.goes_on(loop.changed(CLIENTS[client])))


@pytest.mark.parametrize("other", OTHER_CALLS)
def test_arguments_of_another_value_or_type_are_another_call(hermes: Scripted, other: str) -> None:
    loop = Loop(hermes)
    changed = loop.changed(OTHER_CALLS[other])
    assert json.loads(changed["tool_calls"][0]["function"]["arguments"])
    assert not loop.is_found(loop.goes_on(changed))


def test_the_call_of_another_id_name_or_namespace_is_rendered_as_it_came(hermes: Scripted) -> None:
    loop = Loop(hermes)
    sorted_keys = CLIENTS["sorted keys"]
    other_name = {"name": "edit_", "arguments": sorted_keys(ARGUMENTS)}
    for changed in (loop.changed(sorted_keys, id="call_other"), loop.changed(function=other_name)):
        second = loop.goes_on(changed)
        assert not loop.is_found(second)
        as_it_came = json.dumps(json.loads(ARGUMENTS), ensure_ascii=False, sort_keys=True)
        assert as_it_came in hermes.engine.decode(second["prompt_token_ids"])
    assert not loop.is_found(loop.goes_on(loop.changed(sorted_keys), cache_salt="of another"))
    assert loop.is_found(loop.goes_on(loop.changed(sorted_keys)))


def test_other_words_around_the_call_are_another_turn(hermes: Scripted) -> None:
    loop = Loop(hermes, "Let me see.\n" + HERMES.text_of([("edit", ARGUMENTS)]))
    changed = loop.changed(CLIENTS["sorted keys"])
    assert not loop.is_found(loop.goes_on({**changed, "content": "Let me look."}))
    assert loop.is_found(loop.goes_on(changed))


def test_all_calls_of_a_turn_are_those_that_were_given_or_none_is(hermes: Scripted) -> None:
    loop = Loop(hermes, HERMES.text_of([("edit", ARGUMENTS), ("edit", '{"b": 1, "a": 2}')]))
    changed = loop.changed(CLIENTS["sorted keys"])
    first, second = changed["tool_calls"]
    assert loop.is_found(loop.goes_on(changed))
    wrong = {**changed, "tool_calls": [first, {**second, "id": "call_other"}]}
    assert not loop.is_found(loop.goes_on(wrong))
    assert not loop.is_found(loop.goes_on({**changed, "tool_calls": [second, first]}))
    assert not loop.is_found(loop.goes_on({**changed, "tool_calls": [first]}))


@pytest.mark.parametrize("blanks", ["\n\n", " \n", "\n\n\n"])
def test_white_space_before_a_call_is_known_though_no_client_is_given_it(hermes: Scripted, blanks: str) -> None:
    loop = Loop(hermes, f"Let me see.{blanks}" + HERMES.text_of([("edit", ARGUMENTS)]))
    second = loop.goes_on(loop.changed(CLIENTS["sorted keys"]))
    assert loop.is_found(second)
    assert second["usage"]["prompt_tokens_details"]["cache_match"] == "alias"


def test_an_alias_of_a_call_needs_its_words(hermes: Scripted) -> None:
    loop = Loop(hermes, "Let me see.\n\n" + HERMES.text_of([("edit", ARGUMENTS)]))
    assert not loop.is_found(loop.goes_on({**loop.changed(CLIENTS["sorted keys"]), "content": "Let me look."}))


@pytest.mark.parametrize("off", [{"cache_match": "off"}, {"cache_match": "exact"}])
def test_calls_are_known_only_where_prompts_are_matched_by_text(hermes: Scripted, off: dict[str, str]) -> None:
    for turns in ((off, {}), ({}, off)):
        loop = Loop(hermes, **turns[0])
        if turns[0] == off == {"cache_match": "off"}:
            assert len(hermes.engine.prompts.call_history) == 0
        changed = loop.changed(CLIENTS["sorted keys"])
        assert not loop.is_found(loop.goes_on(changed, **{"cache_match": "text", **turns[1]}))


def test_calls_are_forgotten_with_the_cache(hermes: Scripted) -> None:
    loop = Loop(hermes)
    assert len(hermes.engine.prompts.call_history) == 1
    hermes.client.delete("/v1/cache")
    assert len(hermes.engine.prompts.call_history) == 0
    ids = loop.goes_on(loop.changed(CLIENTS["sorted keys"]))["prompt_token_ids"]
    assert ids[: len(loop.generated)] != loop.generated


def test_a_streamed_call_is_known_as_soon_as_its_last_piece_is_sent(hermes: Scripted) -> None:
    hermes.client.delete("/v1/cache")
    response = hermes.ask(HERMES.text_of([("edit", ARGUMENTS)]), tools=[TOOL], stream=True)
    assert response.status_code == 200
    assert len(hermes.engine.prompts.call_history) == 1


def test_a_call_that_was_cut_is_not_known(hermes: Scripted) -> None:
    hermes.client.delete("/v1/cache")
    assert hermes.reply(HERMES.text_of([("edit", ARGUMENTS)]), tools=[TOOL], max_tokens=20)["finish_reason"] == "length"
    assert len(hermes.engine.prompts.call_history) == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_call_that_was_cut_comes_back_with_what_can_be_read_of_it(model: Scripted, path: str) -> None:
    """It was refused in every later request of its conversation: its arguments are no JSON."""
    says = model.format.text_of([("edit", ARGUMENTS)])
    model.say(says)
    most = len(model.engine.tokenizer.encode_inside(says[: says.index("deep")]))
    parameters = {"type": "object"}
    if path == "/v1/chat/completions":
        body: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "max_tokens": most}
    elif path == "/v1/responses":
        function = {"type": "function", "name": "edit", "parameters": parameters}
        body = {"input": [USER], "tools": [function], "max_output_tokens": most}
    else:
        body = {"messages": [USER], "tools": [{"name": "edit", "input_schema": parameters}], "max_tokens": most}
    cut = model.client.post(path, json={**body, "temperature": 0}).json()
    if path == "/v1/chat/completions":
        message = cut["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"].startswith('{"path": "a b.txt", "line": 1')
        result: Any = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "It was cut."}
        body["messages"] += [message, result]
    elif path == "/v1/responses":
        [call] = cut["output"]
        assert call["status"] == "incomplete"
        body["input"] += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "It was cut."}]
    else:
        result = {"type": "tool_result", "tool_use_id": cut["content"][0]["id"], "content": "It was cut."}
        said = {"role": "assistant", "content": cut["content"]}
        body["messages"] += [said, {"role": "user", "content": [result]}]
    model.say("Hm.")
    again = model.client.post(path, json={**body, "temperature": 0})
    assert again.status_code == 200, again.text
    if path == "/v1/chat/completions":
        ids = model.client.post(path, json={**body, "return_token_ids": True}).json()["prompt_token_ids"]
        assert json.dumps({"path": "a b.txt", "line": 1})[:-1] in model.engine.decode(ids)


@pytest.mark.parametrize("arguments", ["[1", "5", '"{"', '{"a": ' + "[" * 3000 + "]" * 3000 + "}"])
def test_arguments_that_are_no_object_are_refused_in_chats_and_responses(hermes: Scripted, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
    answers = [
        hermes.ask("Hm.", [USER, {"role": "assistant", "tool_calls": [call]}]),
        hermes.client.post(
            "/v1/responses",
            json={"input": [{"type": "function_call", "call_id": "1", "name": "edit", "arguments": arguments}]},
        ),
    ]
    for answer in answers:
        assert answer.status_code == 400 and "must be a JSON object" in answer.json()["error"]["message"]


# The other dialects. Their calls are objects, or texts of custom tools.


def messages_loop(model: Scripted, write: Callable[[Any], Any], **fields: Any) -> tuple[int, int]:
    """Tokens cached for the second turn over /v1/messages, and those that had keys and values."""
    model.say("Let me see.\n\n" + HERMES.text_of([("edit", ARGUMENTS)]))
    tool = {"name": "edit", "input_schema": {"type": "object"}}
    body = {"model": "fake", "tools": [tool], "temperature": 0.0, "max_tokens": 300, **fields}
    first = model.client.post("/v1/messages", json={**body, "messages": [USER]}).json()
    words, call = first["content"]
    model.say("Hm.")
    said = {"role": "assistant", "content": [words, {**call, "input": write(call["input"])}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "done"}]}
    second = model.client.post("/v1/messages", json={**body, "messages": [USER, said, result]}).json()
    used = first["usage"]
    num_prompt = sum(used[key] for key in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    return second["usage"]["cache_read_input_tokens"], num_prompt + used["output_tokens"] - 1


def turned(arguments: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(arguments.items()))


def test_messages_know_their_calls(hermes: Scripted) -> None:
    for write in (dict, turned):
        hermes.client.delete("/v1/cache")
        cached, held = messages_loop(hermes, write)
        assert cached >= held
    hermes.client.delete("/v1/cache")
    cached, held = messages_loop(hermes, lambda arguments: {**turned(arguments), "line": 1.5})
    assert cached < held


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_responses_know_their_calls(hermes: Scripted, kind: str) -> None:
    hermes.client.delete("/v1/cache")
    tool = {"type": kind, "name": "edit"} | ({"parameters": {"type": "object"}} if kind == "function" else {})
    arguments = ARGUMENTS if kind == "function" else json.dumps({"input": "** café"}, ensure_ascii=False)
    body = {"tools": [tool], "temperature": 0.0, "max_output_tokens": 300}
    hermes.say(HERMES.text_of([("edit", arguments)]))
    first = hermes.client.post("/v1/responses", json={**body, "input": "Hi"}).json()
    [call] = first["output"]
    if kind == "function":
        call = {**call, "arguments": CLIENTS["sorted keys"](call["arguments"])}
    else:
        assert call["input"] == "** café"
    hermes.say("Hm.")
    result = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "done"}
    items = [{"role": "user", "content": "Hi"}, call, result]
    second = hermes.client.post("/v1/responses", json={**body, "input": items}).json()
    held = first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 1
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= held


# What a client changes every turn.


def test_what_a_client_changes_every_turn_is_told_in_its_words_and_to_its_own_namespace_alone(hermes: Scripted) -> None:
    hermes.client.delete("/v1/cache")

    def ask(day: str, **body: object) -> Any:
        system = {"role": "system", "content": f"You are an agent. Today is Monday, the {day} of November. Be brief."}
        answer = hermes.ask("Hm.", [system, USER], tools=None, **body).json()
        return answer["usage"]["prompt_tokens_details"]["why_not_more"]

    assert "change" not in ask("22nd")
    assert ask("23rd")["change"] == {
        "before": "You are an agent. Today is Monday, the 2",
        "was": "2nd of November. Be brief.<|im_end|>\n<|im_start|>user\nWeather in Oslo?<|im_end|>",
        "now": "3rd of November. Be brief.<|im_end|>\n<|im_start|>user\nWeather in Oslo?<|im_end|>",
    }
    shown = hermes.client.get("/v1/cache").json()["requests"][0]["why_not_more"]
    assert shown["change"]["now"].startswith("3rd of November")
    assert "change" not in (ask("24th", cache_salt="of a third") or {})


# Words of the system in the middle.


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_words_of_the_system_behind_each_result_stand_there_and_what_is_before_them_is_found(
    hermes: Scripted, path: str
) -> None:
    """Hoisted to the front, they had all of a long loop computed in every turn."""
    hermes.client.delete("/v1/cache")
    talk: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    if path == "/v1/messages":
        talk = [USER]
    body: dict[str, Any] = {"temperature": 0.0, "model": "fake"}
    body |= {"max_output_tokens": 20} if path == "/v1/responses" else {"max_tokens": 20}
    held = 0
    for number in range(4):
        hermes.say(f"Step {number} is done.")
        answer = hermes.client.post(path, json={**body, "input" if path == "/v1/responses" else "messages": talk})
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens")
        for details in ("prompt_tokens_details", "input_tokens_details"):
            cached = usage.get(details, {}).get("cached_tokens") if cached is None else cached
        assert cached >= held, (number, usage)
        prompt = [usage.get(key, 0) for key in ("prompt_tokens", "input_tokens")]
        prompt += [usage.get(key, 0) for key in ("cache_read_input_tokens", "cache_creation_input_tokens")]
        held = sum(prompt) + usage.get("completion_tokens", usage.get("output_tokens", 0)) - 1
        talk += [
            {"role": "assistant", "content": f"Step {number} is done."},
            {"role": "user", "content": f"Go on to {number + 1}."},
            {"role": "system", "content": f"Reminder {number}: be brief."},
        ]

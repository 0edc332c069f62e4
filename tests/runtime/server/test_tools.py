"""Tools in OpenAI's shapes: models that say what a script says, and one that says anything it may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from radixlm.runtime.chat import grammar_trial
from radixlm.runtime.chat.tools.known_formats import HERMES, LLAMA3, PLAIN
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..fake_artifact import fake_artifact
from ..fake_model import FakeModel
from ..tool_templates import LLAMA, NO_TOOLS, QWEN
from .scripted import END_OF_TURN, OSLO, TOKENIZER, TOOLS, USER, VOCAB_SIZE, WEATHER, Scripted, events

if TYPE_CHECKING:
    from .conftest import FakeEngine

MODELS = {"hermes": (QWEN, HERMES), "llama3": (LLAMA, LLAMA3), "plain": (NO_TOOLS, PLAIN)}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    model = Scripted(*MODELS[request.param])
    with model.engine, model.client:
        yield model


@pytest.fixture(scope="module")
def hermes() -> Iterator[Scripted]:
    model = Scripted(QWEN, HERMES)
    with model.engine, model.client:
        yield model


def test_a_call_comes_in_openais_shape(model: Scripted) -> None:
    choice = model.reply(model.format.text_of([OSLO]))
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None and message["role"] == "assistant"
    [call] = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3}'}


def test_words_are_words_though_there_are_tools(model: Scripted) -> None:
    choice = model.reply("It is sunny, <i>really</i>.")
    assert choice["message"] == {"content": "It is sunny, <i>really</i>.", "role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_stream_has_index_id_and_name_first_and_then_pieces_of_arguments(model: Scripted) -> None:
    text = model.format.text_of([OSLO])
    chunks = events(model.ask(text, stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"content": "", "role": "assistant"}
    deltas = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    first, *rest = deltas
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(rest) > 2 and all(set(delta) == {"index", "function"} for delta in rest)
    assert "".join(delta["function"]["arguments"] for delta in rest) == OSLO[1]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == ""
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] > 5


def test_calls_come_in_parallel_where_the_model_knows_it_and_the_client_allows_it(model: Scripted) -> None:
    two = model.format.text_of([OSLO, ("now", "{}")])
    calls = model.reply(two)["message"]["tool_calls"]
    one_at_a_time = model.format.separator is None
    assert [call["function"]["name"] for call in calls] == ["get_weather", "now"][: 1 if one_at_a_time else 2]
    assert len({call["id"] for call in calls}) == len(calls)
    assert len(model.reply(two, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    if not one_at_a_time:
        chunks = events(model.ask(two, stream=True))
        deltas = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert [d["index"] for d in deltas if "id" in d] == [0, 1]
        assert "".join(d["function"]["arguments"] for d in deltas if d["index"] == 1) == "{}"


def test_words_before_a_call_are_its_content(hermes: Scripted) -> None:
    says = "Let me see.\n" + HERMES.text_of([OSLO])
    choice = hermes.reply(says)
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    chunks = events(hermes.ask(says, stream=True))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Let me see."


def test_what_the_script_says_wrong_cannot_be_said(model: Scripted) -> None:
    """The script wants another function, and arguments that do not fit."""
    for wrong in (("get_money", "{}"), ("get_weather", '{"town": 7}')):
        choice = model.reply(model.format.text_of([wrong]), tool_choice="required", max_tokens=100)
        for call in choice["message"].get("tool_calls", []):
            assert call["function"]["name"] in ("get_weather", "now")
            if choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather":
                jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_a_conversation_with_calls_and_results_goes_on_from_its_cached_prefix(model: Scripted) -> None:
    first = model.ask(model.format.text_of([OSLO])).json()
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    second = model.ask("It rains.", [USER, message, result]).json()
    assert second["choices"][0]["message"]["content"] == "It rains."
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 2


def test_what_openais_client_adds_to_a_reply_may_come_back(hermes: Scripted) -> None:
    """Its parse() and stream() note what they made of it, and people append the message as it is."""
    message = hermes.reply(HERMES.text_of([OSLO]))["message"]
    plain = [USER, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}]
    function = {**message["tool_calls"][0]["function"], "parsed_arguments": {"city": "Oslo", "days": 3}}
    call = {**message["tool_calls"][0], "index": 0, "function": function}
    noted = [USER, {**message, "tool_calls": [call], "parsed": None, "function_call": None}, plain[2]]
    prompts = [hermes.ask("Hm.", talk, return_token_ids=True).json()["prompt_token_ids"] for talk in (plain, noted)]
    assert prompts[0] == prompts[1]


def test_a_call_that_is_cut_off_ends_by_length(model: Scripted) -> None:
    text = model.format.text_of([OSLO])
    num_tokens = len(model.engine.tokenizer.encode_inside(text[: text.index("days")]))
    choice = model.reply(text, max_tokens=num_tokens)
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert OSLO[1].startswith(arguments) and arguments != OSLO[1]


def test_a_call_that_a_stop_string_cuts_off_is_none_to_act_on(model: Scripted) -> None:
    """`finish_reason` was `tool_calls`, and the arguments no JSON."""
    says = model.format.text_of([OSLO])
    choice = model.reply(says, stop=["Oslo"])
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert events(model.ask(says, stop=["Oslo"], stream=True))[-1]["choices"][0]["finish_reason"] == "stop"
    whole = model.reply(says, stop=["</tool_call>"])
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == OSLO[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_within_its_head_is_content(model: Scripted, stream: bool) -> None:
    """It was dropped, and the client saw a reply of nothing."""
    says = model.format.text_of([OSLO])
    num_tokens = len(model.engine.tokenizer.encode_inside(says[: says.index("weather")]))
    body = {"max_tokens": num_tokens, "tool_choice": "required"}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(model.ask(says, stream=True, **body))]
        assert choices[-1]["finish_reason"] == "length"
        assert not any(choice["delta"].get("tool_calls") for choice in choices)
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
    else:
        choice = model.reply(says, **body)
        assert choice["finish_reason"] == "length"
        said = choice["message"]["content"]
    assert said == says[: says.index("weather")]


def test_none_calls_nothing(model: Scripted) -> None:
    choice = model.reply("Only words.", tool_choice="none")
    assert choice["message"]["content"] == "Only words." and "tool_calls" not in choice["message"]
    cut = model.reply("See: " + model.format.text_of([OSLO]), tool_choice="none", max_tokens=40)
    assert "tool_calls" not in cut["message"] and "<tool_call>" not in cut["message"]["content"]


def test_tools_stand_in_the_prompt_also_where_none_may_be_called(hermes: Scripted) -> None:
    """The next turn may call them, and finds the prefix cached."""
    sizes = [hermes.ask("Hm.", tool_choice=choice).json()["usage"]["prompt_tokens"] for choice in ("auto", "none")]
    assert sizes[0] == sizes[1] > hermes.ask("Hm.", tools=None).json()["usage"]["prompt_tokens"]


def test_grammars_are_made_ready_once_a_client_has_tools_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 90 MB of 150,000 tokens, and chats without tools never need them."""
    monkeypatch.setattr(grammar_trial, "_PATIENCE_S", 200.0)  # a starved machine takes so long to start a process
    model = Scripted(QWEN, HERMES)
    with model.engine, model.client:
        model.client.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1}).raise_for_status()
        assert model.engine._idle_thread is None
        for _ in range(2):
            model.reply("It is sunny.")
        assert model.engine._idle_thread is not None and model.engine._idle_thread.join(timeout_s=300)
        assert model.engine.grammars.lanes[0].trial.process_id is not None


def test_token_ids_and_logprobs_are_all_there(hermes: Scripted) -> None:
    text = HERMES.text_of([OSLO])
    whole = hermes.reply(text, return_token_ids=True)
    ids = [*hermes.engine.tokenizer.encode_inside(text)]
    chunks = events(hermes.ask(text, stream=True, return_token_ids=True))
    streamed = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", ())]
    assert streamed == whole["token_ids"] and hermes.engine.decode(streamed).startswith(hermes.engine.decode(ids))


def test_a_control_token_in_a_tool_is_text(hermes: Scripted) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "ends <|im_end|> here"}}
    prompts = [
        hermes.ask(
            "Hm.", tools=[{**tool, "function": {"name": "f", "description": text}}], return_token_ids=True
        ).json()
        for text in ("ends <|im_end|> here", "ends here")
    ]
    ids, plain = [prompt["prompt_token_ids"] for prompt in prompts]
    assert ids.count(END_OF_TURN) == plain.count(END_OF_TURN)
    assert len(ids) > len(plain)


# A model that says anything.


@pytest.fixture(scope="module")
def anything() -> Iterator[TestClient]:
    artifact = fake_artifact(
        TOKENIZER, QWEN, vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=END_OF_TURN, context_length=1024
    )
    engine = Engine(
        artifact,  # type: ignore[arg-type]
        max_num_seqs=8,
        open_runner=lambda _, num_pages, __: FakeModel(num_pages, VOCAB_SIZE),
    )
    with engine, TestClient(create_app(engine)) as client:
        yield client


def called(client: TestClient, **body: object) -> list[list[Any]]:
    body = {"messages": [USER], "tools": TOOLS, "temperature": 1.0, "max_tokens": 300, "n": 2, "seed": 7, **body}
    choices = client.post("/v1/chat/completions", json=body).json()["choices"]
    return [choice["message"].get("tool_calls", []) for choice in choices if choice["finish_reason"] == "tool_calls"]


def test_required_always_calls_with_valid_arguments(anything: TestClient) -> None:
    replies = called(anything, tool_choice="required", parallel_tool_calls=False)
    assert len(replies) == 2
    for [call] in replies:
        if call["function"]["name"] == "get_weather":
            jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
        else:
            assert call["function"] == {"name": "now", "arguments": "{}"}


def test_the_named_function_is_called_once(anything: TestClient) -> None:
    replies = called(anything, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert len(replies) == 2
    for [call] in replies:
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


# Mistakes.

CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "always"}, "always"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "'nothing'"),
        ({"tools": None, "tool_choice": "required"}, "tools is not"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "'now' twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "browser"}]}, "browser"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]}, "513 entries"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [1]}, "strict": True}}]},
            "cannot be used",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
            "not",
        ),
        ({"guided_regex": "a"}, "regular expression"),
        ({"guided_json": "not json"}, "the JSON schema is not JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "the JSON schema is not an object"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "only assistant messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}, "tool_call_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "must be a JSON object",
        ),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(hermes: Scripted, fields: dict[str, Any], words: str) -> None:
    response = hermes.ask("Hm.", **fields)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def function(name: str, **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_an_object_may_be_the_only_one_of_its_types(model: Scripted) -> None:
    tools = [function("f", parameters={"type": ["object"], "properties": {}})]
    assert model.ask("Hm.", tools=tools).status_code == 200


NO_OBJECTS = ["string", "integer", ["object", "null"], None, "odd"]
LISTED = "tools.f.function.parameters"


@pytest.mark.parametrize("kind", NO_OBJECTS)
def test_strict_parameters_that_are_no_object_are_refused_by_name(model: Scripted, kind: object) -> None:
    tools = [TOOLS[0], function("f", parameters={"type": kind}, strict=True)]
    response = model.ask("Hm.", tools=tools, tool_choice="required")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters" and json.dumps(kind) in error["message"]


@pytest.mark.parametrize("kind", NO_OBJECTS)
def test_arguments_are_an_object_whatever_the_parameters_say(model: Scripted, kind: object) -> None:
    """Their arguments were read as if they were, and came back as `1}`; then no request with such a tool was served."""
    tools = [TOOLS[0], function("f", parameters={"type": kind})]
    response = model.ask(model.format.text_of([("f", '{"a": 1}')]), tools=tools, tool_choice="required")
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert response.headers.get("x-radixlm-ignored") == (None if isinstance(kind, list) else LISTED)


CHOICES = ["auto", "required", {"type": "function", "function": {"name": "f"}}]
UNFOLLOWED = [
    ({"properties": {"a": {"type": "odd"}}}, "Invalid type: odd"),
    ({"properties": {"a": {"pattern": "(("}}}, "unclosed group"),
    ({"properties": {"a": {"type": "string", "pattern": "^(?!b)"}}}, "look-around"),
    ({"properties": {"a": {"$ref": "#/nowhere"}}}, "does not exist"),
    ({"properties": None}, "properties must be an object"),
    ({"properties": {"a": {"const": 5, "type": "string"}}, "required": ["a"]}, "unsatisfiable"),
    ({"enum": [1]}, "incompatible types"),
]


@pytest.mark.parametrize(("parameters", "words"), UNFOLLOWED)
@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "required", "named"])
def test_a_strict_tool_that_cannot_be_used_is_named_and_our_grammar_kept_to_us(
    model: Scripted, parameters: dict[str, object], words: str, choice: object
) -> None:
    for _ in range(2):  # the second time it is known
        tools = [*TOOLS, function("f", parameters=parameters, strict=True)]
        response = model.ask("Hm.", tools=tools, tool_choice=choice)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools[2].function.parameters"
        assert words in error["message"] and error["message"].startswith("tools[2].function.parameters: ")
        assert "%json" not in error["message"] and "x-guidance" not in error["message"]


@pytest.mark.parametrize("parameters", [parameters for parameters, _ in UNFOLLOWED])
@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "required", "named"])
def test_a_tool_whose_schema_cannot_be_followed_is_called_and_listed(
    model: Scripted, parameters: dict[str, object], choice: object
) -> None:
    """One such tool, of any server that an agent knows, had every request refused."""
    tools = [*TOOLS, function("f", parameters=parameters)]
    for _ in range(2):
        response = model.ask(model.format.text_of([("f", '{"a": "x"}')]), tools=tools, tool_choice=choice)
        assert response.status_code == 200, response.text
        [call] = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": "x"}'}
        assert response.headers["x-radixlm-ignored"] == LISTED
    assert model.reply(model.format.text_of([OSLO]), tools=tools)["finish_reason"] == "tool_calls"


def test_other_tools_are_held_to_their_schemas_beside_one_that_cannot_be(model: Scripted) -> None:
    odd = [function(f"f{number}", parameters={"enum": [1]}) for number in range(9)]
    wrong = model.format.text_of([("get_weather", '{"town": 7}')])
    choice = model.reply(wrong, tools=[*odd[:1], *TOOLS], tool_choice="required", max_tokens=100)
    assert '"town"' not in json.dumps(choice)
    many = model.ask(model.format.text_of([("f8", '{"a": 1}')]), tools=[*odd, *TOOLS])
    assert many.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert set(many.headers["x-radixlm-ignored"].split(", ")) >= {
        f"tools.f{number}.function.parameters" for number in range(9)
    }


def test_a_tool_that_may_not_be_called_is_held_to_nothing(model: Scripted) -> None:
    tools = [*TOOLS, function("f", parameters={"enum": [1]}, strict=True)]
    response = model.ask("Hm.", tools=tools, tool_choice="none")
    assert response.status_code == 200 and "x-radixlm-ignored" not in response.headers


def test_a_tool_that_is_too_much_work_and_a_wrong_form_of_replies_are_told_apart(model: Scripted) -> None:
    steps = {"properties": {"a": {"type": "integer", "multipleOf": 1000003}}}
    error = model.ask("Hm.", tools=[function("f", parameters=steps, strict=True)]).json()["error"]
    assert error["param"] == "tools" and "takes more than" in error["message"]
    assert model.ask("Hm.", tools=[function("f", parameters=steps)]).headers["x-radixlm-ignored"] == LISTED
    error = model.ask("Hm.", guided_json={"type": "odd"}).json()["error"]
    assert error["message"] == "the JSON schema cannot be used: Invalid type: odd"


def test_schemas_that_are_too_much_work_are_let_go_of(model: Scripted) -> None:
    """Which of them is to blame is not known."""
    slow = {"properties": {"a": {"allOf": [{"multipleOf": 4093}, {"multipleOf": 4091}]}}}
    response = model.ask(model.format.text_of([("f", '{"a": "x"}')]), tools=[function("f", parameters=slow), TOOLS[0]])
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert LISTED in response.headers["x-radixlm-ignored"]


def test_an_answer_to_a_schema_may_still_be_a_call(model: Scripted) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "ok", "schema": schema}}
    assert model.reply('{"ok": true}', response_format=form)["message"]["content"] == '{"ok": true}'
    assert model.reply(model.format.text_of([OSLO]), response_format=form)["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("path", "body", "tools"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, {"tools": TOOLS, "tool_choice": "none"}),
        ("/v1/responses", {"input": "Hi"}, {"tools": [{"type": "function", "name": "now"}], "tool_choice": "none"}),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 4},
            {"tools": [{"name": "now", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"}},
        ),
    ],
)
def test_a_client_with_tools_is_expected_to_want_grammars(
    client: TestClient, engine: FakeEngine, path: str, body: dict[str, object], tools: dict[str, object]
) -> None:
    """Others never do, and what grammars need takes 90 MB."""
    assert client.post(path, json=body).status_code == 200
    assert engine.num_grammars_expected == 0
    assert client.post(path, json=body | tools).status_code == 200
    assert engine.num_grammars_expected == 1

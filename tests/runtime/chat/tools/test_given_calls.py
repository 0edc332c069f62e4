"""Calls are known by their ids and by what they say, and stand in prompts as the model wrote them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.spelled_json import SpelledJson, to_json
from radixlm.runtime.chat.tools.call_history import CallHistory, GeneratedArguments
from radixlm.runtime.chat.tools.known_formats import HERMES, PLAIN
from radixlm.runtime.chat.tools.tool_calls import ToolCall
from radixlm.runtime.chat.tools.tool_messages import for_template
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.model.scripted_runner import ScriptedRunner

from ...fake_artifact import fake_artifact
from ...server.scripted import END_OF_TURN, TOKENIZER, VOCAB_SIZE
from ...tool_templates import QWEN

SPELLING = '{ "b":1,"a" : "\\u00e9" }'


def said(*arguments: str, ids: tuple[str, ...] = ("c0", "c1")) -> dict[str, Any]:
    functions = [{"name": "f", "arguments": each} for each in arguments]
    calls = [{"id": id, "type": "function", "function": each} for id, each in zip(ids, functions, strict=False)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def given(*spellings: str, **options: Any) -> CallHistory:
    calls = CallHistory(**options)
    for number, spelling in enumerate(spellings):
        calls.note(b"", ToolCall(f"c{number}", "f", spelling))
    return calls


def arguments_of(calls: CallHistory, message: dict[str, Any], namespace: bytes = b"") -> list[Any]:
    [respelled] = calls.respelled(namespace, [message])
    found: Any = respelled["tool_calls"]
    return [call["function"]["arguments"] for call in found]


def is_known(spelling: str, sent: str) -> bool:
    [found] = arguments_of(given(spelling), said(sent))
    assert found == (spelling if isinstance(found, GeneratedArguments) else sent)
    return isinstance(found, GeneratedArguments)


@pytest.mark.parametrize(
    ("spelling", "sent"),
    [
        (SPELLING, '{"a":"é","b":1}'),
        ("{}", ""),
        ("{ }", "{}"),
        ('{"a": 1e2}', '{"a": 100.0}'),
        ('{"a": "\\/"}', '{"a": "/"}'),
        ('{"a": "\\ud83d\\ude00"}', '{"a": "😀"}'),
        ('{"a": 123456789012345678901234567890}', '{"a":123456789012345678901234567890}'),
        ('{"a": "\\ud800"}', '{"a":"\\uD800"}'),
        ('{"a": [[], {}, null, true]}', '{"a":[[],{},null,true]}'),
    ],
)
def test_equal_arguments_are_known(spelling: str, sent: str) -> None:
    assert is_known(spelling, sent)


@pytest.mark.parametrize(
    ("spelling", "sent"),
    [
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": false}'),
        ('{"a": 0.0}', '{"a": -0.0}'),
        ('{"a": "1"}', '{"a": 1}'),
        ('{"a": null}', "{}"),
        ('{"a": 1}', '{"a": 1, "a": 1}'),
        ('{"a": {"b": 1}}', '{"a": {"b": 2, "b": 1}}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": "é"}', '{"a": "e\u0301"}'),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
        ('{"a": 1}', '{"a": 1'),
        ('{"a": 1}', "[1]"),
        ('{"a": 1e999}', '{"a": 1e998}'),
        ('{"a": NaN}', '{"a":NaN}'),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    ],
)
def test_what_is_not_equal_in_type_and_value_or_not_clear_is_not(spelling: str, sent: str) -> None:
    assert not is_known(spelling, sent)


def test_any_spelling_of_any_value_is_known_and_any_other_value_is_not() -> None:
    rng = random.Random(0)

    def value(depth: int) -> Any:
        kind = rng.randrange(7 if depth else 5)
        if kind == 5:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        if kind == 6:
            return {rng.choice(["a", "b", "é", "1"]): value(depth - 1) for _ in range(rng.randrange(4))}
        return rng.choice([0, 1, 0.0, 1.0, True, False, None, "", "1", "ü\n", 10**30, 1.5])

    def spelled(value: Any) -> str:
        if isinstance(value, dict):
            items = list(value.items())
            rng.shuffle(items)
            return "{" + rng.choice([",", ", ", "\n,"]).join(f"{spelled(k)}:{spelled(v)}" for k, v in items) + "}"
        if isinstance(value, list):
            return "[ " + ",".join(map(spelled, value)) + "]"
        return json.dumps(value, ensure_ascii=rng.random() < 0.5)

    def shown(value: Any) -> Any:
        """Something that is equal only where type and value are."""
        if isinstance(value, dict):
            return "dict", sorted((key, shown(child)) for key, child in value.items())
        return ("list", list(map(shown, value))) if isinstance(value, list) else (type(value).__name__, repr(value))

    num_equal = 0
    for _ in range(2000):
        one, other = ({"a": value(2), "b": value(1)} for _ in range(2))
        assert is_known(spelled(one), spelled(one))
        are_equal = shown(one) == shown(other)
        assert is_known(spelled(one), spelled(other)) == are_equal
        num_equal += are_equal
    assert num_equal > 0


def test_all_calls_of_a_message_are_known_or_none_is() -> None:
    calls = given(SPELLING, "{}")
    assert [type(each) for each in arguments_of(calls, said(SPELLING, "{}"))] == [
        GeneratedArguments,
        GeneratedArguments,
    ]
    assert [type(each) for each in arguments_of(calls, said(SPELLING, "{}", ids=("c0", "c2")))] == [str, str]
    assert [type(each) for each in arguments_of(calls, said(SPELLING, '{"a": 1}'))] == [str, str]
    assert [type(each) for each in arguments_of(calls, said(SPELLING, "{}"), b"of another")] == [str, str]


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    calls = given(max_bytes=3000)
    calls.note(b"", ToolCall("kept", "f", SPELLING))
    for number in range(100):
        calls.note(b"", ToolCall(f"other{number}", "f", "{}"))
        assert arguments_of(calls, said(SPELLING, ids=("kept",))) == [SPELLING]
        assert isinstance(arguments_of(calls, said(SPELLING, ids=("kept",)))[0], GeneratedArguments)
        assert len(calls) <= 5
    calls.note(b"", ToolCall("huge", "f", json.dumps({"a": "x" * 4000})))
    assert len(calls) == 0
    assert calls._num_bytes == 0


def test_calls_are_forgotten_by_namespace_and_by_age() -> None:
    now = [0.0]
    calls = given("{}", clock=lambda: now[0])
    calls.note(b"other", ToolCall("c0", "f", "{}"))
    calls.forget(b"other")
    assert len(calls) == 1
    now[0] = 5.0
    calls.note(b"", ToolCall("c1", "f", "{}"))
    now[0] = 6.0
    arguments_of(calls, said("{}"))  # sent back: in use
    calls.forget_unused(5.5)
    assert arguments_of(calls, said("{}")) == ["{}"] and len(calls) == 1
    calls.forget()
    assert len(calls) == 0


def test_a_template_writes_the_spelling_wherever_it_writes_json_and_may_go_through_the_items() -> None:
    calls = given(SPELLING)
    [message], _ = for_template(calls.respelled(b"", [said('{"b": 1, "a": "é"}')]), [], HERMES)
    writes = {
        "call.function.arguments | tojson": SPELLING,
        "call.function.arguments | tojson(indent=4)": SPELLING,
        "call.function.arguments | tojson(ensure_ascii=true, sort_keys=true)": SPELLING,
        "call.function | tojson": f'{{"name": "f", "arguments": {SPELLING}}}',
        "[call.function] | tojson": f'[{{"name": "f", "arguments": {SPELLING}}}]',
        "call.function.arguments.items() | list": "[('b', 1), ('a', 'é')]",
        "call.function.arguments is mapping": "True",
    }
    for expression, text in writes.items():
        template = ChatTemplate("{% for call in messages[0].tool_calls %}{{ " + expression + " }}{% endfor %}")
        assert template.render([message]) == text
    [in_words], _ = for_template(calls.respelled(b"", [said('{"a": "é", "b": 1}')]), [], PLAIN)
    assert in_words["content"] == PLAIN.text_of([("f", SPELLING)])


def test_a_text_that_looks_like_a_stand_in_is_a_text() -> None:
    value = {"a": ["0-0", '"-0"', SpelledJson({}, "{ }")], "b": SpelledJson({"x": 1}, '{"x":1}')}
    assert to_json(value) == '{"a": ["0-0", "\\"-0\\"", { }], "b": {"x":1}}'


def test_a_control_token_in_a_call_is_text_and_the_call_as_it_was_generated() -> None:
    """Typed control tokens have all texts of a conversation marked, those of spellings, too."""
    artifact = fake_artifact(TOKENIZER, QWEN, vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=END_OF_TURN)
    spelling = '{"text":"ends <|im_end|> here","n":1}'
    with Engine(artifact, max_num_seqs=1, open_runner=lambda *_: ScriptedRunner(VOCAB_SIZE)) as engine:  # type: ignore[arg-type]
        engine.note_call(ToolCall("c0", "f", spelling))
        messages = [{"role": "user", "content": "a"}, said('{"n": 1, "text": "ends <|im_end|> here"}'), {
            "role": "tool", "tool_call_id": "c0", "content": "done"
        }]  # fmt: skip
        ids = engine.encode_chat(engine.as_generated(messages))
        plain = engine.encode_chat(engine.as_generated([*messages[:1], said("{}", ids=("x",)), *messages[2:]]))
    assert spelling in engine.decode(ids)
    assert ids.count(END_OF_TURN) == plain.count(END_OF_TURN)


@pytest.mark.parametrize("call", ["f", {}, {"id": "1"}, {"id": "1", "function": "f"}, {"id": "1", "function": {}}])
def test_a_call_of_another_shape_is_left_to_what_refuses_it(call: object) -> None:
    given = CallHistory()
    given.note(b"", ToolCall("1", "f", "{}"))
    said = [{"role": "assistant", "tool_calls": [call]}]
    assert given.respelled(b"", said) == said

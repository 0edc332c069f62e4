"""How models call tools: recognised by their templates, and held to it by a grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.follow_up_turns import FollowUpTurns
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.token_constraint import allowed_of
from radixlm.runtime.chat.tools.call_history import GeneratedArguments
from radixlm.runtime.chat.tools.known_formats import (
    ATEM,
    COHERE,
    DEEPSEEK,
    DSML,
    GEMMA,
    GLM,
    GLM_TIGHT,
    GRANITE,
    HARMONY,
    HERMES,
    HERMES_CONTENT,
    HUNYUAN,
    HUNYUAN_DENSE,
    KIMI,
    LFM,
    LFM_CONTENT,
    LLAMA3,
    MINIMAX,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_LIST,
    NEMOTRON,
    OLMO,
    PHI,
    PLAIN,
    QWEN_CODER,
    SEED,
    format_of,
)
from radixlm.runtime.chat.tools.tagged_arguments import TaggedArguments
from radixlm.runtime.chat.tools.tool_calls import ReadReply, ToolCallReader, read_reply, read_whole
from radixlm.runtime.chat.tools.tool_format import Tool, ToolChoice, ToolFormat, tools_of
from radixlm.runtime.chat.tools.tool_messages import for_template, short_id
from radixlm.runtime.errors import InvalidArgument, InvalidGrammar, InvalidRequest

from ...tool_templates import CALLS, LLAMA, MUSE, NO_TOOLS, QWEN, SMOLLM3, calling
from ...tool_templates import GRANITE as TOLD_GRANITE
from ...tool_templates import LFM as TOLD_LFM
from ..test_grammars import Bench

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "maxLength": 8}},
    },
    description="The weather of the next days.",
    is_strict=True,
)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
SCHEMAS = {tool.name: tool.parameters for tool in (WEATHER, NOW)}
FORMATS = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "plain": PLAIN,
    "qwen-coder": QWEN_CODER,
    "seed": SEED,
    "glm": GLM,
    "glm-tight": GLM_TIGHT,
    "minimax": MINIMAX,
    "dsml": DSML,
    "mistral-list": MISTRAL_LIST,
    "mistral": MISTRAL,
    "mistral-ids": MISTRAL_IDS,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "nemotron": NEMOTRON,
    "lfm": LFM,
    "gemma": GEMMA,
    "cohere": COHERE,
    "phi": PHI,
    "granite": GRANITE,
    "olmo": OLMO,
    "hunyuan": HUNYUAN,
    "hunyuan-dense": HUNYUAN_DENSE,
    "atem": ATEM,
}


@pytest.fixture(scope="module", params=["smollm2", pytest.param("qwen2", marks=pytest.mark.long)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.grammars.close()


def wanted(format: ToolFormat, *args: object, **options: object) -> Grammar:
    grammar = format.grammar(*args, **options)  # type: ignore[arg-type]
    assert grammar is not None
    return grammar


def as_templates_write(format: ToolFormat, reply: ReadReply, text: str) -> bool:
    """Whether the calls of a reply are written as templates write them later.

    What the model thinks of may differ, white space around tags and calls, and what ends the reply.
    """
    written = format.text_of([(call.name, call.arguments) for call in reply.calls])
    if format in (LFM, OLMO) or isinstance(
        format.arguments, TaggedArguments
    ):  # a string has several ways to be written
        again = read_whole(written, ToolCallReader(format, list(SCHEMAS)))
        return [(c.name, c.arguments) for c in again.calls] == [(c.name, c.arguments) for c in reply.calls]
    written = written.removesuffix(format.close)
    return squeezed(without_ids(text)).startswith(squeezed(without_ids(written)))


def squeezed(text: str) -> str:
    """A text without white space, and with one name for arguments."""
    return "".join(text.split()).replace('"parameters":', '"arguments":')


def without_ids(text: str) -> str:
    return re.sub(r'(?<="id": ")\w{9}|(?<=\[CALL_ID\])\w{9}|(?<=:)\d+(?=<)|(?<="tool_call_id": ")\d+', "", text)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        *((QWEN, HERMES), (LLAMA, LLAMA3), (NO_TOOLS, PLAIN), ("{{ 1 / 0 }}", PLAIN)),
        *((TOLD_GRANITE, GRANITE), (TOLD_LFM, LFM_CONTENT), (SMOLLM3, HERMES_CONTENT), (MUSE, ATEM)),
        (TOLD_LFM.replace("<|tool_list_start|>", "["), LFM_CONTENT),  # as LFM 2.5's
        *((calling(CALLS[name]), FORMATS[name]) for name in CALLS),
    ],
)
def test_a_format_is_recognised_by_how_the_template_writes_a_call(template: str, format: ToolFormat) -> None:
    assert format_of(ChatTemplate(template)) is format


@pytest.mark.parametrize("format", [QWEN_CODER, SEED, GLM, DSML], ids=["qwen-coder", "seed", "glm", "dsml"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"], "maxLength": 5},
        {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        {"enum": ["ab", None]},
        {"anyOf": [{"type": "string", "enum": ["ab"]}, {"type": "null"}]},
    ],
    ids=["types", "ways", "enum", "enum in ways"],
)
def test_a_string_or_null_between_tags_is_held_to_its_schema(
    bench: Bench, format: ToolFormat, schema: dict[str, object]
) -> None:
    """As soon as null was allowed, any string was, for `strict` as well."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    grammar = wanted(format, [Tool("now", parameters, is_strict=True)], "required")
    for value, fits in (('"ab"', True), ("null", True), ('"toolong"', False)):
        assert bench.follows(grammar, format.text_of([("now", f'{{"a": {value}}}')])) is fits, value


def test_a_template_that_writes_no_calls_has_them_in_the_content() -> None:
    """It dropped them: the model saw results of calls that nothing asked for."""
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": "Hm. ", "tool_calls": [call]}
    messages, _ = for_template([asked], [NOW.for_template()], format_of(ChatTemplate(TOLD_GRANITE)))
    rendered = ChatTemplate(TOLD_GRANITE).render(messages, tools=[NOW.for_template()])
    assert 'Hm. <|tool_call|>[{"name": "now", "arguments": {"a": 1}}]' in rendered
    messages, _ = for_template([asked], [NOW.for_template()], format_of(ChatTemplate(TOLD_LFM)))
    assert "Hm. <|tool_call_start|>[now(a=1)]<|tool_call_end|>" in str(messages)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_is_required_is_called_with_valid_arguments(bench: Bench, format: ToolFormat) -> None:
    grammar = wanted(format, [WEATHER, NOW], "required")
    for seed in range(5):
        text = bench.said(grammar, seed)
        assert text is not None
        reply = read_whole(text, ToolCallReader(format, list(SCHEMAS)))
        assert reply.calls and reply.content == ""
        assert format.separator is not None or len(reply.calls) == 1
        for call in reply.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert as_templates_write(format, reply, text)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_call_is_written_as_templates_write_it_later(bench: Bench, format: ToolFormat) -> None:
    """So that the reply's KV is found again when it comes back as history."""
    for seed in range(3):
        text = bench.said(wanted(format, [WEATHER], "required", is_parallel=False), seed)
        assert text is not None
        [call] = read_whole(text, ToolCallReader(format, ["get_weather"])).calls
        again = json.dumps(json.loads(call.arguments), ensure_ascii=False)
        is_escaped = "\\" in call.arguments  # the only other way to write the same string
        assert again == call.arguments or is_escaped


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_auto_allows_words_or_calls_and_no_broken_call(bench: Bench, format: ToolFormat) -> None:
    grammar = wanted(format, [WEATHER, NOW], "auto")
    call = format.text_of([("get_weather", '{"city": "Oslo", "days": 3}')])
    assert bench.follows(grammar, "It rains in Oslo, <b>as</b> always. {no call}")
    assert bench.follows(grammar, "")
    assert bench.follows(grammar, call)
    assert bench.follows(grammar, f"Let me see.\n{call}")  # where no trigger is, it is words
    assert not bench.follows(grammar, call.replace("days", "weeks"))
    assert not bench.follows(grammar, call[: call.index("Oslo")])
    two = format.text_of([("now", "{}"), ("now", "{}")])
    assert bench.follows(grammar, two) == (format.separator is not None)
    assert not bench.follows(wanted(format, [WEATHER, NOW], "auto", is_parallel=False), two)
    if format.is_tagged:
        assert not bench.follows(grammar, f"Let me see.\n{call.replace('days', 'weeks')}")


NO_CALLS = (
    *('{"names": ["a"]}', '{"person": {"name": "x"}}', '{ "name": "Alice", "age": 3}', '{"name": "now", "at": 3}'),
    '{"name": "nothing", "arguments": {}}',
    'As in {"name": "now", "arguments": {}}.',
    '```json\n{"name": "now", "arguments": {}}\n```\nThis is how a call looks.',
)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_auto_leaves_text_alone_that_is_no_call_yet(bench: Bench, format: ToolFormat) -> None:
    """What began as a call had to become one, of whichever tool there was."""
    grammar = wanted(format, [WEATHER, NOW], "auto")
    call = format.text_of([("get_weather", '{"city": "Oslo", "days": 3}')])
    for name in ("get_money", "nowhere", "get_weather_of", "w"):
        assert bench.follows(grammar, call.replace("get_weather", name)), name
    for opening in format.openings:
        text = f"The text {opening} begins a call." if format.is_tagged else opening
        assert bench.follows(grammar, text)
        assert read_whole(text, ToolCallReader(format, list(SCHEMAS))).content == text
    if format.is_tagged:
        assert bench.follows(grammar, f"As in {format.openings[0]}: {call}")
        assert not bench.follows(grammar, f"As in {format.openings[0]}: {call.replace('days', 'weeks')}")
    for text in (
        '{"names": ["a"]}',
        '{"person": {"name": "x"}}',
        '{ "name": "Alice", "age": 3}',
        '{"name": "now", "at": 3}',
    ):
        assert bench.follows(grammar, text)
        assert read_whole(text, ToolCallReader(format, list(SCHEMAS))).content == text


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_behind_a_call_a_reply_may_end_and_is_made_to_call_by_nothing(
    bench: Bench, format: ToolFormat, choice: ToolChoice
) -> None:
    """A line feed behind a call left nothing but another call."""
    grammar = wanted(format, [WEATHER, NOW], choice)
    call = format.text_of([("get_weather", '{"city": "Oslo", "days": 3}')])
    for white in ("", "\n", "\n\n", " ", "\t\n "):
        assert bench.follows(grammar, call + white)
    for more in ("Done.", "\n\nIt is", "\n<b", "\n```", '\n{"city": 3}', "\n" * 40):
        constraint = bench.grammars.compile(grammar).start()
        for token_id in bench.tokenizer.encode_inside(call):
            constraint.accept(token_id)
        for number, token_id in enumerate(bench.tokenizer.encode_inside(more)):
            allowed = allowed_of(constraint.mask(), bench.tokenizer.vocab_size)
            assert allowed[token_id] and (number == 0 or allowed[bench.eos[0]])
            constraint.accept(token_id)
            if constraint.is_finished:
                break
        assert constraint.is_finished or more == "Done."  # of which a format takes `Done` for a name that begins
        [found] = read_whole(call + more, ToolCallReader(format, list(SCHEMAS))).calls
        assert found.name == "get_weather"


def test_none_forbids_what_would_be_read_as_a_call(bench: Bench) -> None:
    grammar = wanted(HERMES, [WEATHER], "none")
    assert bench.follows(grammar, "It rains. <tool> <tool_cal>")
    assert bench.follows(grammar, "")
    assert not bench.follows(grammar, "Well. <tool_call>")
    assert PLAIN.grammar([WEATHER], "none") is None


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_schema_for_replies_is_for_those_that_are_no_call(bench: Bench, format: ToolFormat) -> None:
    content = Grammar.json_schema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    grammar = wanted(format, [NOW], "auto", content=content)
    assert bench.follows(grammar, '{"a": 1}')
    assert bench.follows(grammar, format.text_of([("now", "{}")]))
    assert not bench.follows(grammar, "words")
    assert format.grammar([NOW], "none", content=content) == content


MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "in": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["mood", "in"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_reply_to_tools_and_a_schema_is_one_or_the_other(bench: Bench, format: ToolFormat) -> None:
    """White space that the schema allows behind `{` was allowed in a call, which then was no call."""
    grammar = wanted(format, [WEATHER, NOW], "auto", content=Grammar.json_schema(MOOD))
    kinds = set()
    for seed in range(16):
        text = bench.said(grammar, seed)
        if text is None:
            continue
        reply = read_whole(text, ToolCallReader(format, list(SCHEMAS)))
        kinds.add(bool(reply.calls))
        if reply.calls:
            assert as_templates_write(format, reply, text)
        else:
            jsonschema.validate(json.loads(reply.content), MOOD)
        for call in reply.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert kinds == {True, False}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_schema_that_begins_as_a_call_does_can_be_answered(bench: Bench, format: ToolFormat) -> None:
    """What began with `{"name": ` had to go on as a call."""
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    content = Grammar.json_schema({"type": "object", "properties": properties, "required": ["name", "age"]})
    grammar = wanted(format, [WEATHER, NOW], "auto", content=content)
    for name in ("Bob", "now", "get_weather"):
        text = json.dumps({"name": name, "age": 3})
        assert bench.follows(grammar, text)
        assert read_whole(text, ToolCallReader(format, list(SCHEMAS))).content == text
    assert bench.follows(grammar, format.text_of([("now", "{}")]))


@pytest.mark.parametrize("rest", [{}, {"anyOf": [{"minLength": 1}, {"minLength": 2}]}], ids=["plain", "choice"])
def test_a_strict_pattern_is_enforced_where_strings_have_quotes(bench: Bench, rest: dict[str, object]) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^a+$"} | rest},
        "required": ["a"],
        "additionalProperties": False,
    }
    strict, loose = (wanted(LFM, [Tool("f", parameters, is_strict=each)], "required") for each in (True, False))
    texts = ["<|tool_call_start|>[f(a=" + json.dumps(value) + ")]<|tool_call_end|>" for value in ("aa", "b")]
    assert [bench.follows(strict, text) for text in texts] == [True, False]
    assert bench.follows(loose, texts[1])
    calls = read_whole(texts[0], ToolCallReader(LFM, ["f"])).calls
    assert [json.loads(call.arguments) for call in calls] == [{"a": "aa"}]


@pytest.mark.parametrize("format", [LFM, GEMMA], ids=["lfm", "gemma"])
@pytest.mark.parametrize("other", [{"type": "null"}, {"const": "z"}], ids=["null", "const"])
def test_values_of_a_choice_are_all_that_a_string_may_be(bench: Bench, format: ToolFormat, other: object) -> None:
    kind = {"anyOf": [{"$ref": "#/$defs/kind"}, other]}
    parameters = {
        "type": "object",
        "properties": {"a": kind},
        "required": ["a"],
        "$defs": {"kind": {"type": "string", "enum": ["x", "y"]}},
    }
    grammar = wanted(format, [Tool("f", parameters, is_strict=True)], "required")
    texts = [format.text_of([("f", json.dumps({"a": value}))]) for value in ("x", "y", "w")]
    if format is LFM and other == {"type": "null"}:
        texts = [text.replace("'", '"') for text in texts]  # as JSON, where it may be no string
    assert [bench.follows(grammar, text) for text in texts] == [True, True, False]


def test_a_strict_tool_with_a_schema_that_cannot_be_enforced_is_refused(bench: Bench) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(InvalidGrammar, match="uniqueItems"):
        bench.grammars.compile(wanted(HERMES, [Tool("f", parameters, is_strict=True)], "auto"))
    bench.grammars.compile(wanted(HERMES, [Tool("f", parameters)], "auto"))


# Conversations.

TALK: list[dict[str, object]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Ö", "days":2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]


@pytest.mark.parametrize(
    ("template", "format"),
    [
        *((QWEN, HERMES), (LLAMA, LLAMA3), (NO_TOOLS, PLAIN)),
        *((calling(CALLS[name]), FORMATS[name]) for name in CALLS),
    ],
)
def test_a_call_stands_in_later_prompts_as_it_was_said(template: str, format: ToolFormat) -> None:
    compiled = ChatTemplate(template)
    tools = [WEATHER.for_template(), NOW.for_template()]
    told, known = for_template(TALK, tools, format)
    rendered = compiled.render(told, tools=known)
    before, known = for_template(TALK[:1], tools, format)
    said = format.text_of([("get_weather", '{"city": "Ö", "days": 2}')], [short_id("1")])
    assert rendered.startswith(compiled.render(before, tools=known) + said + "<|im_end|>")
    assert "rain" in rendered and "The weather of the next days." in rendered


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    told, known = for_template(TALK, [NOW.for_template()], PLAIN)
    assert known == ()
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert '{"name": "NAME", "arguments": ARGUMENTS}' in str(told[0]["content"])
    assert told[2]["content"] == '{"name": "get_weather", "arguments": {"city": "Ö", "days": 2}}'
    assert told[3] == {"role": "user", "content": "Result of get_weather: rain"}
    system = {"role": "system", "content": "Be brief."}
    told, _ = for_template([system, *TALK], [NOW.for_template()], PLAIN)
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert str(told[0]["content"]).startswith("Be brief.\n\nYou may call")


def test_results_and_what_the_user_says_next_are_one_turn() -> None:
    more = [*TALK, {"role": "tool", "tool_call_id": "7", "content": "?"}, {"role": "user", "content": "And?"}]
    told, _ = for_template(more, (), PLAIN)
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert told[2]["content"] == "Result of get_weather: rain\nResult of the function: ?\nAnd?"


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("arguments", ["[1]", GeneratedArguments("{"), "nonsense", "[" * 100_000])
def test_a_call_whose_arguments_are_no_object_is_refused(format: ToolFormat, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        for_template([{"role": "assistant", "content": "", "tool_calls": [call]}], (), format)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_call_that_was_cut_is_told_with_what_can_be_read_of_it(format: ToolFormat) -> None:
    def told(arguments: str) -> object:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return for_template([{"role": "assistant", "content": "", "tool_calls": [call]}], (), format)

    assert told('{"city": "Os') == told('{"city": "Os"}')
    assert told('{"city": "Oslo", "days": 1') == told('{"city": "Oslo"}')
    assert told(" {") == told("{}")


# Replies.


def pieces(text: str, chance: random.Random) -> Iterator[str]:
    at = 0
    while at < len(text):
        length = chance.randrange(1, 9)
        yield text[at : at + length]
        at += length


REPLIES = [
    "Only words, with <tool and {braces}.",
    "",
    " \n ",
    *[format.text_of([("now", "{}")]) for format in FORMATS.values()],
    *[
        format.text_of([("get_weather", '{"city": "a}]\\"{", "x": [{"y": "\\\\"}]}'), ("now", "{}")])
        for format in FORMATS.values()
        if format.separator is not None
    ],
    "Words first.\n\n" + HERMES.text_of([("now", "{}")]),
    '{"name": "unknown", "arguments": {}}',
    '{"mood": "good"}',
    '<tool_call>\n{"name": "unknown"}',
    *[
        format.text_of([("get_weather", '{"city": "Oslo"}')])[:-cut]
        for format in FORMATS.values()
        for cut in (1, 4, 30)
    ],
]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_however_a_reply_is_cut_in_pieces_it_says_the_same(format: ToolFormat) -> None:
    wrong = []
    for text in REPLIES:
        whole = read_whole(text, ToolCallReader(format, list(SCHEMAS)))
        for seed in range(8):
            reply, num_calls = read_in_pieces(format, pieces(text, random.Random(seed)))
            if (said(reply), num_calls) != (said(whole), len(whole.calls)):
                wrong.append(f"{text!r} in pieces of seed {seed}: {said(reply)}, {num_calls} calls; {said(whole)}")
        ids = [call.call_id for call in whole.calls]
        if len(set(ids)) != len(ids) or not all(call_id.startswith("call_") for call_id in ids):
            wrong.append(f"{text!r} has calls with the ids {ids}")
    assert wrong == []


def read_in_pieces(format: ToolFormat, texts: Iterable[str]) -> tuple[ReadReply, int]:
    """What a reply says that comes piece by piece, and how many calls its reader counted."""
    reader = ToolCallReader(format, list(SCHEMAS))
    reply = read_whole("", ToolCallReader(format, []))
    for piece in texts:
        for part in reader.push(piece):
            reply.add(part)
    for part in reader.finish():
        reply.add(part)
    return reply, reader.num_calls


def said(reply: ReadReply) -> tuple[str, list[tuple[str, str]]]:
    return reply.content, [(call.name, call.arguments) for call in reply.calls]


def test_words_before_a_call_are_content_without_the_line_break_between() -> None:
    reply = read_whole("Let me see.\n\n" + HERMES.text_of([("now", "{}")]), ToolCallReader(HERMES, ["now"]))
    assert reply.content == "Let me see."
    assert [(call.name, call.arguments) for call in reply.calls] == [("now", "{}")]


def test_a_call_that_is_cut_off_has_the_arguments_so_far() -> None:
    text = HERMES.text_of([("get_weather", '{"city": "Oslo"}')])
    reply = read_whole(text[: text.index("slo")], ToolCallReader(HERMES, ["get_weather"]))
    assert (reply.calls[0].arguments, reply.content) == ('{"city": "O', "")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_call_that_is_cut_off_within_its_head_is_content(format: ToolFormat) -> None:
    """It was dropped, and clients saw a reply of nothing."""
    head = format.head("now")
    for lead in ("", "Let me see.\n\n") if format.is_tagged else ("",):
        for end in range(len(format.trigger), len(head)):
            reader = ToolCallReader(format, ["now"])
            reply = read_whole(lead + head[:end], reader)
            assert (reply.content, reply.calls, reader.has_whole_calls) == (lead + head[:end], [], False)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_calls_are_whole_when_the_last_ones_arguments_are(format: ToolFormat) -> None:
    arguments = '{"a": {"b": "}"}, "c": "x"}'
    text = format.text_of([("now", arguments)])
    whole_at = [end for end in range(len(text) + 1) if read(format, text[:end]).has_whole_calls]
    assert whole_at == list(range(whole_at[0], len(text) + 1))
    written = format.arguments.written(arguments)
    num_more = whole_at[0] - text.index(written) - len(written)
    # With tags, what ends the call says that the last value is over.
    assert num_more == (len(format.end_tags[0]) if isinstance(format.arguments, TaggedArguments) else 0)


def read(format: ToolFormat, text: str) -> ToolCallReader:
    reader = ToolCallReader(format, ["now"])
    read_whole(text, reader)
    return reader


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (PLAIN, '{"name": "now", "arguments": [1]}'),
        (LLAMA3, '{"name": "now", "parameters": 7}'),
        (HERMES, '{"tag": "white space  <tool_call>"}'),
    ],
)
def test_json_that_only_looks_like_a_call_is_content_as_it_is(format: ToolFormat, text: str) -> None:
    reply = read_whole(text, ToolCallReader(format, ["now"]))
    assert (reply.content, reply.calls) == (text, [])


def test_where_nothing_may_be_called_all_is_content() -> None:
    text = PLAIN.text_of([("now", "{}")])
    prompts: Any = SimpleNamespace(chat_template=None, tool_format=PLAIN)
    assert FollowUpTurns(prompts)._parse_reply(text, ()) == ReadReply(text)


OPENAI: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("format", [HERMES, HARMONY])
@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_tools_in_openais_format_make_the_same_grammar_and_calls(format: ToolFormat, choice: Any) -> None:
    tool = Tool("now", {"type": "object", "properties": {}})
    assert format.grammar([OPENAI], choice) == format.grammar([tool], choice)
    text = format.text_of([("now", "{}")])
    assert [(call.name, call.arguments) for call in read_reply(text, format, [OPENAI]).calls] == [("now", "{}")]


@pytest.mark.parametrize("tools", ["now", [{"name": "now"}]])
def test_what_is_no_tool_is_refused(tools: Any) -> None:
    with pytest.raises(InvalidArgument, match="tools"):
        tools_of(tools)

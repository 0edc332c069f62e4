"""Conversations as agents send them, with templates that want roles to take turns and with those that do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat import conversations
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.conversations import Conversations
from radixlm.runtime.chat.reasoning_format import Message, reasoning_format_of, without_reasoning
from radixlm.runtime.chat.tools.known_formats import PLAIN, format_of
from radixlm.runtime.chat.tools.tool_messages import for_template
from radixlm.runtime.chat.turns import (
    SystemMessages,
    Turns,
    _append_questions_to_results,
    _join_questions,
    _join_replies,
)

from ..thought_templates import HYBRID
from ..tool_templates import HARMONY, LLAMA, NO_TOOLS, QWEN

TURNS = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
"""
"""As Gemma 2's: no system, and roles take turns."""

SYSTEM_FIRST = """\
{%- for message in messages %}
    {%- if loop.index0 and message.role == loop.previtem.role %}{{ raise_exception('turns') }}{% endif %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
"""
"""As Mistral's: a system, and roles take turns."""


def said(*roles_and_words: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), each.split(": ", 1), strict=True)) for each in roles_and_words]


AGENT = said("system: a", "user: b", "user: c", "assistant: d", "user: e", "user: f", "user: g")


@pytest.mark.parametrize("source", [QWEN, LLAMA, "{{ 1 / 0 }}"])
def test_messages_stay_as_they_are_where_the_template_takes_them_or_none(source: str) -> None:
    assert Turns(ChatTemplate(source)).for_template(AGENT) is AGENT
    assert Turns(None).for_template(AGENT) is AGENT


def test_messages_in_a_row_are_one_where_roles_take_turns() -> None:
    template = ChatTemplate(SYSTEM_FIRST)
    told = Turns(template).for_template(AGENT)
    assert told == said("system: a", "user: b\n\nc", "assistant: d", "user: e\n\nf\n\ng")
    assert template.render(told).endswith("<|user|>e\n\nf\n\ng")


def test_words_of_a_system_that_is_unknown_begin_those_of_the_user() -> None:
    template = ChatTemplate(TURNS)
    assert Turns(template).for_template(AGENT) == said("user: a\n\nb\n\nc", "assistant: d", "user: e\n\nf\n\ng")
    assert Turns(template).for_template(said("system: a", "user: b")) == said("user: a\n\nb")
    plain = said("user: b", "assistant: d", "user: e")
    assert Turns(template).for_template(plain) is plain


def test_what_a_message_has_beside_its_words_stays() -> None:
    asked = [*said("user: a"), {"role": "user", "content": "b", "name": "c"}]
    assert Turns(ChatTemplate(TURNS)).for_template(asked) == [{"role": "user", "content": "a\n\nb", "name": "c"}]


RESULTS = """\
{%- set turns = namespace(number=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (turns.number % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
        {%- set turns.number = turns.number + 1 %}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
"""
"""As Mistral's: roles take turns, calls and results do not count."""


def test_words_behind_a_result_end_it_where_the_template_refuses_them() -> None:
    """A reminder that an agent sends beside a result, and what its user says instead of waiting."""
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    history = [*said("user: a"), called, *said("tool: b", "user: c", "user: d", "assistant: e", "user: f")]
    template = ChatTemplate(RESULTS)
    told = Turns(template).for_template(history)
    assert told == [*said("user: a"), called, *said("tool: b\n\nc\n\nd", "assistant: e", "user: f")]
    template.render(told)
    assert Turns(ChatTemplate(QWEN)).for_template(history) is history


# Replies and results out of turn.

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
UNANSWERED = {**RESULT, "content": "[no result: the call was interrupted]", "name": "f"}

WITH_WORDS = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and not message.content and not message.tool_calls %}
        {{- raise_exception('a reply must have words or calls') }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
"""
"""As Ministral 3's."""

BEHIND_CALLS = """\
{%- set calls = namespace(number=0) %}
{%- for message in messages %}
    {%- if message.tool_calls %}{%- set calls.number = calls.number + 1 %}{% endif %}
    {%- if message.role == 'tool' and not calls.number %}{{ raise_exception('no call before') }}{% endif %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
"""
"""As gpt-oss's and MiniMax M2's."""

LEFT_OUT = """\
{%- for message in messages %}
    {%- if message.role != 'tool' or (loop.index0 and loop.previtem.tool_calls) %}[{{ message.content }}]{% endif %}
{%- endfor %}
"""
"""As Gemma 4's: a result without its call is not there."""

SYSTEM_LAST = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|' + message.role + '|>' + (system if loop.last and message.role == 'user' else '') + message.content }}
{%- endfor %}
"""
"""As Mistral Nemo's: the system's words stand before the last question, and nowhere behind a call."""


def told(source: str, *messages: dict[str, Any]) -> Any:
    template = ChatTemplate(source)
    found = Turns(template).for_template(messages)
    template.render(found)
    return list(found)


@pytest.mark.parametrize("source", [TURNS, SYSTEM_FIRST, RESULTS])
def test_replies_in_a_row_are_one_where_roles_take_turns(source: str) -> None:
    """A reply that was broken off, and the next."""
    a, b, c, d = said("user: a", "assistant: b", "assistant: c", "user: d")
    thinking = {**b, "reasoning_content": "h"}
    assert told(source, a, b, c, d) == said("user: a", "assistant: b\n\nc", "user: d")
    assert told(source, a, thinking, c, d)[1] == {**thinking, "content": "b\n\nc"}
    assert told(QWEN, a, b, c, d) == [a, b, c, d]


def test_words_and_the_call_behind_them_are_one_reply_where_replies_take_turns() -> None:
    a, b, d, e = said("user: a", "assistant: b", "assistant: d", "user: e")
    assert told(RESULTS, a, b, CALLED, RESULT, d, e) == [a, {**CALLED, "content": "b"}, RESULT, d, e]
    assert told(QWEN, a, b, CALLED, RESULT, d, e) == [a, b, CALLED, RESULT, d, e]


def test_a_call_that_the_user_interrupts_gets_a_result_where_roles_take_turns() -> None:
    """An agent was stopped while a tool ran; all that it was asked from then on was refused."""
    a, b, c, d = said("user: a", "user: b", "assistant: c", "user: d")
    interrupted = {**UNANSWERED, "content": f"{UNANSWERED['content']}\n\nb"}
    assert told(RESULTS, a, CALLED, b, c, d) == [a, CALLED, interrupted, c, d]
    two = {**CALLED, "tool_calls": [CALL, {**CALL, "id": "d"}]}
    last = {**interrupted, "tool_call_id": "d"}
    assert told(RESULTS, a, two, b, c, d) == [a, two, UNANSWERED, last, c, d]
    assert told(RESULTS, a, CALLED, RESULT, c, d) == [a, CALLED, RESULT, c, d]
    assert told(QWEN, a, CALLED, b) == [a, CALLED, b] == told(WITH_WORDS, a, CALLED, b)


def test_a_reply_without_a_word_is_left_out_where_it_is_refused() -> None:
    a, b, c = said("user: a", "assistant: b", "user: c")
    empty = {**b, "content": ""}
    assert told(WITH_WORDS, a, empty, c) == [a, c]
    assert told(WITH_WORDS, a, CALLED, RESULT, empty, c, b) == [a, CALLED, RESULT, c, b]
    assert told(QWEN, a, empty, c) == [a, empty, c]


@pytest.mark.parametrize("source", [BEHIND_CALLS, LEFT_OUT])
def test_a_result_without_its_call_is_told_where_it_is_refused_or_left_out(source: str) -> None:
    """The client has cut the beginning of its history."""
    a, b = said("user: a", "assistant: b")
    lone = said("user: Result of the function: r")
    assert told(source, a, RESULT, b) == [a, *lone, b]
    assert told(source, a, {**RESULT, "name": "f"})[1]["content"] == "Result of f: r"
    assert told(source, a, CALLED, RESULT, b) == [a, CALLED, RESULT, b]
    assert told(QWEN, a, RESULT, b) == [a, RESULT, b]


@pytest.mark.parametrize("source", [TURNS, RESULTS])
def test_a_conversation_that_a_reply_begins_has_a_question_before_it_where_one_must_be(source: str) -> None:
    system, b, c = said("system: s", "assistant: b", "user: c")
    assert told(source, b, c) == [{"role": "user", "content": ""}, b, c]
    first = [{"role": "user", "content": "s"}] if source == TURNS else [system, {"role": "user", "content": ""}]
    assert told(source, system, b, c) == [*first, b, c]
    assert told(QWEN, b, c) == [b, c]


def test_the_systems_words_are_not_forgotten_behind_a_call() -> None:
    """Each prompt of a loop is the beginning of the next, too."""
    system, a, b, c = said("system: s", "user: a", "assistant: b", "user: c")
    talk = [system, a, CALLED, RESULT, b, c, CALLED, RESULT]
    template = ChatTemplate(SYSTEM_LAST)
    prompts = [template.render(Turns(template).for_template(talk[:length])) for length in range(2, len(talk) + 1)]
    assert all(prompt.startswith("<|user|>s\n\na") for prompt in prompts)
    assert all(later.startswith(prompt) for prompt, later in pairwise(prompts))


class InTheMiddleOnly(SystemMessages):
    """For a template that reads no words of the system behind the first message."""

    _knows_the_middle = False  # type: ignore[assignment]


JOINING = {
    "questions": _join_questions,
    "replies": _join_replies,
    "results": _append_questions_to_results,
    "the system's words": lambda messages: InTheMiddleOnly(None).for_template(messages),
    "results in words": lambda messages: for_template(messages, (), PLAIN)[0],
}
MESSAGES = st.lists(
    st.builds(
        lambda role, words, thought: {
            "role": role,
            "content": words,
            **({"reasoning_content": thought} if thought else {}),
        },
        st.sampled_from(["user", "assistant", "tool", "system"]),
        st.sampled_from(["a", "b", ""]),
        st.sampled_from(["", "", "hm"]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", JOINING)
@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES)
def test_messages_are_joined_one_after_the_other(name: str, messages: list[dict[str, Any]]) -> None:
    """The next message goes to what those before it are: so a conversation that goes on begins as it did."""
    whole, before = list(JOINING[name](messages)), list(JOINING[name](messages[:-1]))
    assert whole[: len(before) - 1] == before[:-1]
    if len(whole) == len(before):
        assert str(whole[-1]["content"]).startswith(str(before[-1]["content"]))
    words = [each["content"] for each in messages]
    assert sum(str(each["content"]).count("a") for each in whole) >= "".join(words).count("a")


@pytest.mark.parametrize("name", JOINING)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_thousands_of_long_messages_are_joined_at_once(name: str, role: str) -> None:
    """One after the other they took ten seconds. It is the processor's time, which a busy machine does not change."""
    first = {"role": "tool", "tool_call_id": "a", "content": "x"}
    messages = [first, *({"role": role, "content": "x" * 4000} for _ in range(4000))]
    begun = time.thread_time()
    joined = JOINING[name](messages)
    assert time.thread_time() - begun < 1
    assert sum(len(each["content"]) for each in joined) > 4000 * 4000


class Reasoning:
    """The part of `Reasoning` that needs no tokenizer."""

    def __init__(self, template: ChatTemplate) -> None:
        self.format = reasoning_format_of(template)

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        return without_reasoning(messages) if self.format is None else self.format.for_template(messages)


def prepared_by(source: str) -> Conversations:
    template = ChatTemplate(source)
    format = format_of(template)
    reasoning: Any = Reasoning(template)
    return Conversations("a", template, None, reasoning, tool_format=lambda: format, template_kwargs={})


SAYING = "{% for m in messages %}{{ raise_exception('empty') if not m.content }}{{ m.content }}{% endfor %}"
SOURCES = (TURNS, SYSTEM_FIRST, RESULTS, SAYING, LLAMA, QWEN, HARMONY, NO_TOOLS, HYBRID)
PREPARED = {source: prepared_by(source) for source in SOURCES}
NEARLY_PLAIN = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"] * 4 + ["system"]), "content": st.sampled_from(["a", "", " "])},
        optional={"reasoning_content": st.just("b"), "tool_calls": st.sampled_from([[], None])},
    )
    | st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user"]), st.just([])),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(messages=NEARLY_PLAIN, source=st.sampled_from(sorted(PREPARED)))
@example(messages=said("user: a", "assistant: b", "user: c"), source=TURNS)
@example(messages=said("user: a", "assistant: ", "user: c"), source=SAYING)
@example(messages=said("assistant: "), source=SAYING)  # nothing is left
@example(messages=said("system: a", "user: b"), source=TURNS)
@example(messages=said("assistant: a", "user: b"), source=TURNS)
def test_conversations_that_no_template_is_in_the_way_of_are_as_if_they_were_looked_at(
    messages: list[dict[str, Any]], source: str
) -> None:
    found = PREPARED[source].values(messages, [], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "_is_plain", lambda messages: False)
        looked_at = PREPARED[source].values(messages, [], None)
    assert [list(each) for each in found] == [list(each) for each in looked_at]

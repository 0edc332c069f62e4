"""Messages of the user in a row, as agents send them, with templates that want turns and with those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.user_turns import UserTurns

from ..tool_templates import LLAMA, QWEN

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
    return [dict(zip(("role", "content"), each.split(": "), strict=True)) for each in roles_and_words]


AGENT = said("system: a", "user: b", "user: c", "assistant: d", "user: e", "user: f", "user: g")


@pytest.mark.parametrize("source", [QWEN, LLAMA, "{{ 1 / 0 }}"])
def test_messages_stay_as_they_are_where_the_template_takes_them_or_none(source: str) -> None:
    assert UserTurns(ChatTemplate(source)).for_template(AGENT) is AGENT
    assert UserTurns(None).for_template(AGENT) is AGENT


def test_messages_in_a_row_are_one_where_roles_take_turns() -> None:
    template = ChatTemplate(SYSTEM_FIRST)
    told = UserTurns(template).for_template(AGENT)
    assert told == said("system: a", "user: b\n\nc", "assistant: d", "user: e\n\nf\n\ng")
    assert template.render(told).endswith("<|user|>e\n\nf\n\ng")


def test_words_of_a_system_that_is_unknown_begin_those_of_the_user() -> None:
    template = ChatTemplate(TURNS)
    assert UserTurns(template).for_template(AGENT) == said("user: a\n\nb\n\nc", "assistant: d", "user: e\n\nf\n\ng")
    assert UserTurns(template).for_template(said("system: a", "user: b")) == said("user: a\n\nb")
    plain = said("user: b", "assistant: d", "user: e")
    assert UserTurns(template).for_template(plain) is plain


def test_what_a_message_has_beside_its_words_stays() -> None:
    asked = [*said("user: a"), {"role": "user", "content": "b", "name": "c"}]
    assert UserTurns(ChatTemplate(TURNS)).for_template(asked) == [{"role": "user", "content": "a\n\nb", "name": "c"}]


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
    told = UserTurns(template).for_template(history)
    assert told == [*said("user: a"), called, *said("tool: b\n\nc\n\nd", "assistant: e", "user: f")]
    template.render(told)
    assert UserTurns(ChatTemplate(QWEN)).for_template(history) is history

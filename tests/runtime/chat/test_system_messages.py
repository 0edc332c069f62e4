"""Words of the system in the middle, with templates that read them there and with those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.turns import SystemMessages

from ..tool_templates import LLAMA, NO_TOOLS, QWEN

FIRST_ONLY = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('the first only') }}{% endif %}
    {%- if message.role == 'user' and loop.index0 and loop.previtem.role == 'user' %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""As Mistral's and Qwen3.5's."""

HOISTING = """\
{%- for message in messages if message.role == 'system' %}{{ '<|system|>' + message.content + '</s>' }}{% endfor %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|' + message.role + '|>' + message.content + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""All at the front: what is computed of the rest is lost with each of them."""

DROPPING = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|' + message.role + '|>' + message.content + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
COUNTING = """\
{%- set turns = namespace(number=0) %}
{%- for message in messages %}
    {%- if message.role != 'tool' and not message.tool_calls and not (loop.first and message.role == 'system') %}
        {%- if (message.role == 'user') != (turns.number % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
        {%- set turns.number = turns.number + 1 %}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""As Mistral Small 3.2's: it writes the system's words anywhere, and takes them for a turn."""

COUNTING_IN_LOOPS = COUNTING.replace(
    "message.role != 'tool'",
    "not (message.role == 'system' and loop.index0 and loop.previtem.role == 'user') and message.role != 'tool'",
)
"""Behind the user's words it takes them for none."""

UNKNOWING = {"first only": FIRST_ONLY, "hoisting": HOISTING, "dropping": DROPPING}
HISTORY = [
    {"role": "system", "content": "one"},
    {"role": "system", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "system", "content": "four"},
    {"role": "assistant", "content": "five"},
    {"role": "tool", "content": "six"},
    {"role": "system", "content": "seven"},
    {"role": "system", "content": "eight"},
    {"role": "assistant", "content": "nine"},
    {"role": "system", "content": "ten"},
    {"role": "user", "content": "eleven"},
    {"role": "assistant", "content": "twelve"},
    {"role": "user", "content": "thirteen"},
]


def rendered(source: str, messages: list[Any]) -> str:
    template = ChatTemplate(source)
    return template.render(SystemMessages(template).for_template(messages), add_generation_prompt=False)


@pytest.mark.parametrize("source", [NO_TOOLS, QWEN, LLAMA])
def test_a_template_that_reads_them_in_their_place_gets_them_as_they_are(source: str) -> None:
    assert SystemMessages(ChatTemplate(source)).for_template(HISTORY) is HISTORY


@pytest.mark.parametrize("source", UNKNOWING.values(), ids=UNKNOWING)
def test_all_words_stand_in_their_order_whatever_the_template_knows(source: str) -> None:
    text = rendered(source, HISTORY)
    places = [text.find(str(message["content"])) for message in HISTORY]
    assert -1 not in places and places == sorted(places)
    assert text.count("<system-reminder>") == 4  # but for the two at the beginning


@pytest.mark.parametrize("source", UNKNOWING.values(), ids=UNKNOWING)
@pytest.mark.parametrize("length", [4, 8, 11])
def test_what_was_said_before_begins_the_next_prompt(source: str, length: int) -> None:
    """Each of them in front of all others cost an agent's whole prefix, turn by turn."""
    before = rendered(source, HISTORY[:length])
    assert rendered(source, HISTORY).startswith(before)


@pytest.mark.parametrize("source", [COUNTING, COUNTING_IN_LOOPS], ids=["counting", "counting in loops"])
def test_a_template_that_takes_them_for_a_turn_is_told_of_them_in_others(source: str) -> None:
    """The turn behind them was refused, and every later one."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}
    result = {"role": "tool", "content": "four"}
    reminder = {"role": "system", "content": "five"}
    loop = [HISTORY[2], call, result, reminder, call, {**result, "content": "six"}, {**reminder, "content": "seven"}]
    talk = [HISTORY[2], HISTORY[4], {"role": "user", "content": "six"}, {**reminder, "content": "seven"}]
    for history, words in ((loop, ("five", "seven")), (talk, ("seven",))):
        for more in ([], [{"role": "assistant", "content": "eight"}, {"role": "user", "content": "nine"}]):
            text = rendered(source, [*history, *more])
            assert all(f"<system-reminder>\n{each}\n</system-reminder>" in text for each in words)


def test_a_conversation_without_them_stays_as_it_is() -> None:
    plain = [HISTORY[0], *HISTORY[2:3]]
    assert SystemMessages(ChatTemplate(FIRST_ONLY)).for_template(plain) is plain
    assert SystemMessages(None).for_template(HISTORY) is HISTORY

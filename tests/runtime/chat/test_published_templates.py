"""Chat templates as they were published, not imitations: what is found in each, and that it takes what agents send."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.conversations import Conversations
from radixlm.runtime.chat.reasoning_format import Message, reasoning_format_of, without_reasoning
from radixlm.runtime.chat.tools.known_formats import format_of
from radixlm.runtime.chat.tools.tool_format import Tool
from radixlm.runtime.chat.turns import SystemMessages

from .published_templates import TABLE, Found, published_templates

pytestmark = pytest.mark.long
WEATHER = Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}, description="Of a city.")
SYSTEM = {"role": "system", "content": "SYSTEM"}
ASKED = {"role": "user", "content": "ASKED"}
MORE = {"role": "user", "content": "MORE"}
TAKEN = {name: found for name, found in TABLE.items() if found is not None}


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    return published_templates()


@cache
def model_of(source: str) -> Model:
    return Model(source)


class Model:
    """A template, and what is found in it."""

    def __init__(self, source: str) -> None:
        self.template = ChatTemplate(source)
        self.tools, self.thought = format_of(self.template), reasoning_format_of(self.template)
        self.conversations = Conversations(
            "a",
            self.template,
            None,
            self,
            tool_format=lambda: self.tools,
            template_kwargs={},  # type: ignore[arg-type]
        )

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """As `Reasoning`, which needs a tokenizer for more than this."""
        return without_reasoning(messages) if self.thought is None else self.thought.for_template(messages)

    def prompt(self, messages: Sequence[Message]) -> str:
        return self.conversations.rendered(*self.conversations.values(messages, [WEATHER], None))


def called(*cities: str, words: str = "", **fields: str) -> list[Message]:
    """A reply that calls for cities, and what it brought; the ids are the server's own."""
    ids = [f"call_{city.lower():a>24}" for city in cities]
    calls = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
        for id, city in zip(ids, cities, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": id, "content": f"RAIN IN {city}"} for id, city in zip(ids, cities, strict=True)
    ]
    return [{"role": "assistant", "content": words, "tool_calls": calls, **fields}, *results]


def loop(num_calls: int, *, reminds: bool) -> list[Message]:
    """An agent's conversation after so many calls, each with a reminder of the system's behind it or without."""
    messages: list[Message] = [SYSTEM, ASKED]
    for number in range(num_calls):
        messages += called(f"CITY{number}")
        if reminds:
            messages.append({"role": "system", "content": f"REMINDER{number}"})
    return messages


SENT: dict[str, list[Message]] = {
    "a question": [SYSTEM, ASKED],
    "a call": [SYSTEM, ASKED, *called("OSLO")],
    "two calls": [SYSTEM, ASKED, *called("OSLO", "ROME"), {"role": "assistant", "content": "DONE"}, MORE],
    "a thought": [SYSTEM, ASKED, *called("OSLO", reasoning_content="HM")],
    "a reminder": [SYSTEM, ASKED, *called("OSLO"), {"role": "system", "content": "REMINDER"}, *called("ROME")],
    "a reminder behind a question": [
        *(SYSTEM, ASKED, {"role": "assistant", "content": "DONE"}, MORE, {"role": "system", "content": "REMINDER"}),
        *called("ROME"),
    ],
    "words instead of a result": [SYSTEM, ASKED, called("OSLO")[0], MORE],
    "words behind a result": [SYSTEM, ASKED, *called("OSLO"), MORE],
    "a result without its call": [SYSTEM, ASKED, called("OSLO")[1]],
    "two questions": [SYSTEM, ASKED, MORE],
    "two replies": [SYSTEM, ASKED, *({"role": "assistant", "content": word} for word in ("ONE", "TWO")), MORE],
    "words, and then a call": [SYSTEM, ASKED, {"role": "assistant", "content": "DONE"}, *called("OSLO"), MORE],
    "an empty reply": [SYSTEM, ASKED, {"role": "assistant", "content": ""}, MORE],
    "a reply first": [SYSTEM, {"role": "assistant", "content": "DONE"}, MORE],
    "no system": [ASKED, *called("OSLO")],
}


def words_of(messages: Sequence[Any]) -> list[str]:
    """All that must be in a prompt."""
    words = [str(message["content"]) for message in messages if message["content"]]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return words + [str(call["function"]["arguments"]).split('"')[-2] for call in calls]


def test_the_table_has_every_template(templates: dict[str, str]) -> None:
    assert set(templates) == set(TABLE)


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_found_is_what_was_judged(templates: dict[str, str], name: str) -> None:
    model, found = model_of(templates[name]), TAKEN[name]
    thought = None if model.thought is None else (model.thought.begin, model.thought.end, model.thought.field)
    reads_the_middle = SystemMessages(model.template)._knows_the_middle
    assert Found(model.tools, thought, reads_the_middle, found.lost, found.drops) == found


@pytest.mark.parametrize("reminds", [False, True], ids=["calls", "calls and reminders"])
@pytest.mark.parametrize("name", TAKEN)
def test_each_prompt_of_a_loop_begins_the_next(templates: dict[str, str], name: str, reminds: bool) -> None:
    model = model_of(templates[name])
    prompts = [model.prompt(loop(number, reminds=reminds)) for number in range(5)]
    for before, behind in pairwise(prompts):
        num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, behind, strict=False)))
        assert before[num_kept:] in ("", TAKEN[name].lost), behind[num_kept:][:60]


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("name", TAKEN)
def test_what_agents_send_is_taken(templates: dict[str, str], name: str, sent: str) -> None:
    text = model_of(templates[name]).prompt(SENT[sent])
    dropped = ("DONE",) if TAKEN[name].drops and sent == "words, and then a call" else ()  # where they are one message
    assert all(word in text for word in words_of(SENT[sent]) if word not in dropped), text[-600:]
    assert "get_weather" in text


@pytest.mark.parametrize("name", TAKEN)
def test_words_before_a_call_stand_there_where_the_template_does_not_drop_them(
    templates: dict[str, str], name: str
) -> None:
    text = model_of(templates[name]).prompt([SYSTEM, ASKED, *called("OSLO", words="I LOOK")])
    assert ("I LOOK" in text) is not TAKEN[name].drops

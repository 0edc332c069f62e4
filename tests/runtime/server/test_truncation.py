"""Histories that outgrow the context: an error, or without whole turns of their middle, and said so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.tools.tool_format import Tool
from radixlm.runtime.errors import ContextLengthExceeded
from radixlm.runtime.server.truncation import TruncatedHistory, cut_middle, drop_middle

from .real_server import RealServer, real_server


def message(role: str, num_tokens: int) -> dict[str, Any]:
    return {"role": role, "num_tokens": num_tokens}


def count(messages: Sequence[Any], tools: Sequence[Tool] = ()) -> int:
    return 1000 * len(tools) + sum(each.get("num_tokens", 1) for each in messages)


def history(num_turns: int, system: int = 10, user: int = 10, assistant: int = 20) -> list[dict[str, Any]]:
    turns = [message(role, n) for _ in range(num_turns - 1) for role, n in (("user", user), ("assistant", assistant))]
    return [message("system", system), *turns, message("user", user)]


def fitted(messages: Sequence[Any], context_length: int = 400, max_tokens: int | None = None) -> TruncatedHistory:
    return drop_middle(messages, count=count, context_length=context_length, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [None, 1, 100, 350, 10_000])
def test_a_history_that_is_served_without_truncation_stays_whole(max_tokens: int | None) -> None:
    """With a large max_tokens, 20 of 22 messages of 430 tokens were dropped, in a context of 8,192."""
    for num_turns in range(1, 41):
        messages = history(num_turns)
        left = fitted(messages, max_tokens=max_tokens)
        assert (left == TruncatedHistory(messages)) == (count(messages) < 400)


def test_the_system_prompt_and_the_newest_turns_stay() -> None:
    messages = history(14)
    left = fitted(messages)
    assert list(left.dropped) == list(range(1, 15)) and left.num_dropped_tokens == 210
    assert list(left.messages) == [messages[0], *messages[15:]]


def test_the_same_is_dropped_for_many_turns_so_that_the_cache_has_the_prefix() -> None:
    num_dropped = [len(fitted(history(num_turns)).dropped) for num_turns in range(1, 41)]
    assert num_dropped == sorted(num_dropped)
    assert len(set(num_dropped)) <= 1 + 40 * 30 // 100 and all(n % 2 == 0 for n in num_dropped)
    for num_turns in range(1, 41):
        left = fitted(history(num_turns))
        assert count(left.messages) + left.num_dropped_tokens == count(history(num_turns))
        assert count(left.messages) <= 300 or not left.dropped


def test_a_turn_with_its_tool_calls_goes_as_a_whole() -> None:
    turn = [message(role, 10) for role in ("user", "assistant", "tool", "tool", "assistant")]
    left = fitted([*turn * 9, message("user", 10)])
    assert len(left.dropped) % 5 == 0 and left.messages[0]["role"] == "user"


def test_room_is_left_for_the_reply_that_is_asked_for() -> None:
    assert count(fitted(history(14), max_tokens=150).messages) <= 250
    assert count(fitted(history(14), max_tokens=1).messages) > 280


def test_a_reply_of_any_length_leaves_the_history_half_of_the_context() -> None:
    for max_tokens in (200, 250, 10_000):
        assert 100 < count(fitted(history(14), max_tokens=max_tokens).messages) <= 200


def test_a_newest_turn_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ContextLengthExceeded, match="have 400 tokens, the context holds 400"):
        fitted([*history(5)[:-1], message("user", 390)])
    with pytest.raises(ContextLengthExceeded):
        fitted([message("system", 500)])
    assert count(fitted([*history(5)[:-1], message("user", 389)]).messages) == 399


def test_a_long_history_is_not_counted_thirteen_times() -> None:
    """Small turns and, at the end, long ones: all of it was counted again for each step of a bisection."""
    num_counted = 0

    def counted(messages: Sequence[Any], tools: Sequence[Tool]) -> int:
        nonlocal num_counted
        num_counted += count(messages)
        return count(messages)

    messages = [*history(2000, user=1, assistant=1), *history(3, user=4000, assistant=4000)[1:]]
    left = drop_middle(messages, count=counted, context_length=5000, max_tokens=None)
    assert list(left.messages) == [messages[0], messages[-1]]
    assert num_counted < 3 * count(messages)


def test_turns_that_are_shorter_in_a_history_than_alone_are_dropped_until_the_rest_fits() -> None:
    """As with templates that leave out what was thought in old turns; with tokens that every conversation has."""

    def counted(messages: Sequence[Any], tools: Sequence[Tool] = ()) -> int:
        shortened = [each["num_tokens"] // 5 if each["role"] == "assistant" else 10 for each in messages[:-2]]
        return 25 + sum(shortened) + count(messages[-2:])

    messages = history(60, assistant=100)
    left = drop_middle(messages, count=counted, context_length=400, max_tokens=None)
    assert 150 < counted(left.messages) <= 300 and left.messages[0] == messages[0]
    assert counted(left.messages) + left.num_dropped_tokens == counted(messages)


def test_a_history_of_megabytes_is_refused_before_it_is_counted() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"history.* has \d+ bytes, more than the 4194304"):
        message = {"role": "user", "content": "a" * (4 << 20)}
        drop_middle([message], count=lambda messages, tools: pytest.fail(), context_length=9, max_tokens=1)


def offered(num_tools: int, description: str = "") -> list[Tool]:
    return [Tool(f"f{number}", {}, description) for number in range(num_tools)]


def test_tools_are_not_counted_again_with_each_turn() -> None:
    """4096 turns and 100 kB of tools took minutes: each count of a turn wrote the tools again."""
    num_tools: list[int] = []

    def counted(messages: Sequence[Any], tools: Sequence[Tool]) -> int:
        num_tools.append(len(tools))
        return count(messages, tools)

    messages = history(2000)
    left = drop_middle(messages, offered(64), count=counted, context_length=100_000, max_tokens=None)
    assert 64_000 < counted(left.messages, offered(64)) <= 75_000
    assert sum(map(bool, num_tools)) <= 4 and len(num_tools) > 1000


def test_no_turn_is_counted_where_dropping_all_of_them_does_not_help() -> None:
    lengths: list[int] = []

    def counted(messages: Sequence[Any], tools: Sequence[Tool]) -> int:
        lengths.append(len(messages))
        return count(messages, tools)

    with pytest.raises(ContextLengthExceeded, match="have 64020 tokens, the context holds 2048"):
        drop_middle(history(500), offered(64), count=counted, context_length=2048, max_tokens=None)
    assert lengths == [1000, 2]


def test_megabytes_of_tools_are_refused_before_they_are_counted() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"tools included, has \d+ bytes, more than the 4194304"):
        tools = offered(64, description="a" * (1 << 16))
        drop_middle(history(1), tools, count=lambda messages, tools: pytest.fail(), context_length=9, max_tokens=1)


MESSAGE = "{{ m.role }} {{ m.content }}\n"
WITHOUT_OLD_THOUGHTS = (
    "{% set place = namespace(last=-1) %}"
    "{% for m in messages if m.role == 'user' %}{% set place.last = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}{% if loop.index0 < place.last %}{{ m.role }} {{ m.content.split('</think>')[-1] }}\n"
    "{% else %}" + MESSAGE + "{% endif %}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('begin with a system message') }}{% endif %}"
    "{% for m in messages %}" + MESSAGE + "{% endfor %}"
)
CALLS_WANT_TOOLS = (
    "{% for m in messages %}{% if not tools and 'call' in m.content %}{{ raise_exception('no tools') }}{% endif %}"
    + MESSAGE
    + "{% endfor %}"
)


@dataclass
class Words:
    """Counts words of what a template writes, and notes the last message of each conversation it was asked for."""

    template: ChatTemplate
    lasts: list[object] = field(default_factory=list)

    def __call__(self, messages: Sequence[Any], tools: Sequence[Tool] = ()) -> int:
        self.lasts.append(messages[-1]["content"])
        described = [tool.for_template() for tool in tools]
        return len(self.template.render(messages, tools=described).split())


def thoughtful(num_turns: int, said: Random) -> list[dict[str, Any]]:
    """Turns with numbers for questions, so that no two are the same, and many more words thought than said."""
    messages = [{"role": "system", "content": "be kind"}]
    for number in range(num_turns):
        answer = "t " * said.randint(50, 400) + "</think> " + "call " * said.randint(10, 60)
        messages.append({"role": "user", "content": f"{number} " + "u " * said.randint(5, 30)})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": "last one"}]


def test_thoughts_that_the_template_leaves_out_do_not_drop_all_but_the_newest_turn() -> None:
    """A turn by itself was counted with its thoughts: 64 of 100 histories lost all that could be dropped."""
    said, template, num_long = Random(7), ChatTemplate(WITHOUT_OLD_THOUGHTS), 0
    for _ in range(40):
        messages, counted = thoughtful(said.randint(5, 60), said), Words(template)
        left = drop_middle(messages, count=counted, context_length=1024, max_tokens=None)
        num_long += bool(left.dropped)
        assert counted.lasts.count("last one") <= 3  # as long as what single turns have is right
        assert not left.dropped or 768 - 256 - 100 < counted(left.messages) <= 768
    assert num_long > 20


def test_thoughts_that_the_template_leaves_out_do_not_change_what_is_dropped_with_each_turn() -> None:
    messages, counted = thoughtful(120, Random(7)), Words(ChatTemplate(WITHOUT_OLD_THOUGHTS))
    places = [place for place, each in enumerate(messages) if each["role"] == "user"]
    num_dropped = [
        len(drop_middle(messages[: place + 1], count=counted, context_length=1024, max_tokens=None).dropped)
        for place in places
    ]
    assert num_dropped == sorted(num_dropped)
    assert len(set(num_dropped)) <= 1 + counted(messages) // 256


@pytest.mark.parametrize("template", [SYSTEM_FIRST, CALLS_WANT_TOOLS])
def test_a_template_that_takes_no_turn_by_itself_can_be_truncated(template: str) -> None:
    """One that wants a system message first was a 400 that named a message which the client did send."""
    messages, tools, counted = thoughtful(20, Random(7)), offered(1), Words(ChatTemplate(template))
    left = drop_middle(messages, tools, count=counted, context_length=2048, max_tokens=None)
    assert left.messages[0] == messages[0] and left.dropped
    assert 1536 - 512 - 500 < counted(left.messages, tools) <= 1536
    if template is SYSTEM_FIRST:
        assert counted.lasts.count("last one") <= 4


def test_turns_that_are_longer_alone_are_bisected_and_the_same_stays_while_the_conversation_grows() -> None:
    num_whole = 0

    def counted(messages: Sequence[Any], tools: Sequence[Tool]) -> int:
        nonlocal num_whole
        num_whole += messages[-1].get("num_tokens") == 10
        return count(messages) * (1 if messages[-1].get("num_tokens") == 10 else 5)

    num_dropped = []
    for num_turns in range(1, 200):
        num_whole = 0
        left = drop_middle(history(num_turns), count=counted, context_length=400, max_tokens=None)
        num_dropped.append(len(left.dropped))
        assert not left.dropped or 170 <= count(left.messages) <= 300
        assert num_whole <= 3 + 8
    assert num_dropped == sorted(num_dropped) and len(set(num_dropped)) <= 1 + 200 * 30 // 100 * 2


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(context_length=1024, num_pages=300) as server:
        yield server


def talk(num_turns: int) -> list[dict[str, str]]:
    turns = [{"role": role, "content": f"the {role} once"} for _ in range(num_turns) for role in ("user", "assistant")]
    return [{"role": "system", "content": "you are old"}, *turns, {"role": "user", "content": "and then"}]


def test_without_it_a_history_that_does_not_fit_is_400(server: RealServer) -> None:
    for fields in ({}, {"truncation": "none"}):
        refused = server.chat(messages=talk(40), max_tokens=5, **fields)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert server.chat(messages=talk(1), truncation="left").status_code == 400


def test_with_it_the_reply_says_what_was_dropped(server: RealServer) -> None:
    reply = server.chat(messages=talk(40), max_tokens=5, truncation="middle").json()
    dropped = reply["truncation"]["dropped_messages"]
    assert reply["truncation"]["strategy"] == "middle" and reply["truncation"]["num_dropped_tokens"] > 0
    assert dropped == list(range(1, 1 + len(dropped))) and len(dropped) % 2 == 0
    kept = [each for place, each in enumerate(talk(40)) if place not in dropped]
    whole = server.chat(messages=kept, max_tokens=5).json()
    assert whole["usage"]["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert whole["choices"] == reply["choices"] and "truncation" not in whole
    nothing = server.chat(messages=talk(1), max_tokens=5, truncation="middle").json()
    assert nothing["truncation"]["dropped_messages"] == []


def test_a_stream_says_it_first(server: RealServer) -> None:
    text = server.chat(messages=talk(40), max_tokens=5, truncation="middle", stream=True, n=2).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert chunks[0]["truncation"]["dropped_messages"]
    assert not any("truncation" in chunk for chunk in chunks[1:])


def test_the_next_turns_find_the_truncated_prefix_cached(server: RealServer) -> None:
    replies = [server.chat(messages=talk(turns), max_tokens=5, truncation="middle").json() for turns in range(60, 66)]
    num_same = 0
    for reply, following in pairwise(replies):
        if following["truncation"]["dropped_messages"] == reply["truncation"]["dropped_messages"]:
            num_same += 1
            cached = following["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > reply["usage"]["prompt_tokens"] - 32  # all but the question, which is another now
    assert num_same >= 3


def test_what_a_server_sets_is_what_a_request_does_not_say() -> None:
    with real_server(context_length=1024, num_pages=300, app={"truncation": "middle"}) as server:
        reply = server.chat(messages=talk(40), max_tokens=5)
        assert reply.status_code == 200 and reply.json()["truncation"]["dropped_messages"]
        assert server.chat(messages=talk(40), max_tokens=5, truncation="none").status_code == 400
        asked: dict[str, Any] = {"input": talk(40), "max_output_tokens": 20}
        response = server.client.post(f"{server.url}/v1/responses", json=asked).json()
        assert response["truncation"] == "auto" and response["truncated"]["dropped_messages"]
        refused = server.client.post(f"{server.url}/v1/responses", json=asked | {"truncation": "disabled"})
        assert refused.status_code == 400
        body = {"prompt": "once there was " * 500, "max_tokens": 5}
        reply = server.client.post(f"{server.url}/v1/completions", json=body)
        assert reply.status_code == 200 and reply.json()["choices"][0]["truncation"]["num_dropped_tokens"] > 0
        refused = server.client.post(f"{server.url}/v1/completions", json=body | {"truncation": "none"})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def complete(server: RealServer, **fields: Any) -> Any:
    body = {"max_tokens": 5, "seed": 1, "ignore_eos": True, "return_token_ids": True, **fields}
    return server.client.post(f"{server.url}/v1/completions", json=body)


WORDS = ("once", "there", "was", "an", "old", "man", "and", "he", "said", "to", "the", "other", "that", "it", "not")


def story(num_words: int) -> str:
    return " ".join(WORDS[number * number % len(WORDS)] for number in range(num_words))


def test_a_prompt_that_does_not_fit_loses_its_middle_and_the_choice_says_where(server: RealServer) -> None:
    text = story(3000)
    refused = complete(server, prompt=text)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    whole = server.client.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    for prompt in (text, whole):
        [choice] = complete(server, prompt=prompt, truncation="middle").json()["choices"]
        start, num_dropped = choice["truncation"]["start"], choice["truncation"]["num_dropped_tokens"]
        assert choice["truncation"]["strategy"] == "middle" and 124 < start <= 128
        assert choice["prompt_token_ids"] == whole[:start] + whole[start + num_dropped :]
        assert 1019 - 256 - 8 < len(choice["prompt_token_ids"]) <= 1019
        again = complete(server, prompt=choice["prompt_token_ids"]).json()["choices"][0]
        assert again["token_ids"] == choice["token_ids"] and "truncation" not in again


@pytest.mark.parametrize("max_tokens", [1, 5000])
def test_a_prompt_that_fits_is_fed_as_it_is(server: RealServer, max_tokens: int) -> None:
    text = story(100)
    plain, kept = (
        complete(server, prompt=text, max_tokens=max_tokens, **fields).json()["choices"][0]
        for fields in ({}, {"truncation": "middle"})
    )
    assert kept.pop("truncation") == {"strategy": "middle", "start": 0, "num_dropped_tokens": 0}
    assert kept == plain


def test_each_of_several_prompts_loses_its_own_middle_and_a_stream_says_so_first(server: RealServer) -> None:
    prompts = [story(3000), "once there was", story(4000)]
    whole = complete(server, prompt=prompts, truncation="middle", n=2).json()["choices"]
    numbers = [choice["truncation"]["num_dropped_tokens"] for choice in whole]
    assert numbers[0] == numbers[1] > 0 == numbers[2] == numbers[3] < numbers[4] == numbers[5]
    text = complete(server, prompt=prompts, truncation="middle", stream=True).text
    chunks = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    for index in range(3):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["truncation"] == whole[2 * index]["truncation"]
        assert not any("truncation" in chunk for chunk in own[1:])


def test_the_next_prompts_of_a_growing_text_find_the_truncated_prefix_cached(server: RealServer) -> None:
    texts = [story(num_words) for num_words in range(2500, 2620, 20)]
    replies = [complete(server, prompt=text, truncation="middle", cache_salt="growing").json() for text in texts]
    num_same = 0
    for reply, following in pairwise(replies):
        if reply["choices"][0]["truncation"] == following["choices"][0]["truncation"]:
            num_same += 1
            cached = following["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > reply["usage"]["prompt_tokens"] - 32
    assert num_same >= 3


def test_a_text_of_megabytes_is_refused_before_it_is_encoded(server: RealServer) -> None:
    refused = complete(server, prompt="a" * (5 << 20), truncation="middle")
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "more than the 4194304" in refused.json()["error"]["message"]


def begins_character(byte: int) -> bool:
    """Of tokens of one byte each."""
    return byte & 0xC0 != 0x80


def test_no_character_is_cut_where_the_middle_goes() -> None:
    for text in ("é" * 300, "a" + "é" * 300, "世" * 200, "ab" + "🎉" * 150, "a" * 600):
        ids = list(text.encode())
        left = cut_middle(ids, begins_character=begins_character, context_length=400, max_tokens=None)
        assert 200 - 6 < len(left.ids) <= 300
        assert left.ids == ids[: left.start] + ids[left.start + left.num_dropped_tokens :]
        assert "\N{REPLACEMENT CHARACTER}" not in bytes(left.ids).decode(errors="replace")


@pytest.mark.parametrize("context_length", range(2, 40))
def test_a_context_of_few_tokens_is_cut_though_no_token_begins_a_character(context_length: int) -> None:
    for num_tokens in range(context_length, 3 * context_length):
        ids = [0x80 + number for number in range(num_tokens)]
        left = cut_middle(ids, begins_character=begins_character, context_length=context_length, max_tokens=None)
        assert left.ids == ids[: left.start] + ids[left.start + left.num_dropped_tokens :]
        assert len(left.ids) < context_length


def test_token_ids_that_fit_stay_as_they_are_and_others_keep_beginning_and_end() -> None:
    for num_tokens in range(390, 3000, 7):
        tokens = [97] * num_tokens
        for max_tokens in (None, 1, 150, 5000):
            left = cut_middle(tokens, begins_character=begins_character, context_length=400, max_tokens=max_tokens)
            assert (left.num_dropped_tokens == 0) == (num_tokens < 400)
            assert len(left.ids) < 400 and len(left.ids) + left.num_dropped_tokens == num_tokens
            if left.num_dropped_tokens:
                assert left.start == 50 and len(left.ids) > 100

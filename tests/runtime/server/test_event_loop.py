"""No client holds the event loop: whatever it sends, no callback of the server's loop takes 30 ms of a processor.

`time.thread_time` is the loop's own processor time. Another process changes it only through the caches they share: by
a few milliseconds, so a request that misses the limit by little is sent again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from .real_server import RealServer, real_server

MOST_S = 0.03  # of CPU time, beside other tests; what grows with a body takes many times that
NEVER_S = 0.1  # a second attempt is for callbacks below this
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Hi"}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 1},
    TEXT: {"prompt": "Hi", "max_tokens": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
}


def classes(count: int) -> list[str]:
    """Regular expressions of 1,000 letters that Python compiles for seconds."""
    return [
        "(?i)[" + "".join(f"{chr(0x300 + number * 331 + place)}-\uffff" for place in range(330)) + "]"
        for number in range(count)
    ]


def letters(seed: int, of: str = "abcdefghijklmnopqrstuvwxyz", length: int = 14) -> str:
    return "".join(random.Random(seed).choices(of, k=length))


UNKNOWN = {letters(number): 1 for number in range(64)}
NEARLY = {letters(number, "temperature_penalty", 11 + number % 4): 1 for number in range(64)}
MANY = {f"field_{number}": None for number in range(60_000)}
TALK = [{"role": ("user", "assistant")[place % 2], "content": f"word {place}"} for place in range(4_000)]
MANY_CALLS = [
    message
    for place in range(600)
    for message in (
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": f"c{place}", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": f"c{place}", "content": "done"},
    )
]
SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(200)}}
LARGE_SCHEMA = {"anyOf": [SCHEMA] * 99}
TOOLS = [{"type": "function", "function": {"name": f"f{n}", "parameters": SCHEMA}} for n in range(100)]

UNFOLLOWED = {"type": "object", "properties": {"a": {"pattern": "(?!b)"}}}
NAMES = [f"f{number}" for number in range(512)]
LOOSE: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {"name": name, "parameters": UNFOLLOWED}} for name in NAMES],
    RESPONSES: [{"type": "function", "name": name, "parameters": UNFOLLOWED} for name in NAMES],
    MESSAGES: [{"name": name, "input_schema": UNFOLLOWED} for name in NAMES],
}

COSTLY: dict[str, tuple[str, Any]] = {
    **{f"classes of letters, {path}": (path, ASKED[path] | {"stop_regex": classes(6)}) for path in ASKED},
    **{f"16 classes of letters, {path}": (path, ASKED[path] | {"stop_regex": classes(16)}) for path in (CHAT, TEXT)},
    "an expression with many ways": (TEXT, ASKED[TEXT] | {"stop_regex": "(?:a?){255}b"}),
    **{f"unknown fields, {path}": (path, ASKED[path] | UNKNOWN) for path in ASKED},
    **{f"mistyped fields, {path}": (path, ASKED[path] | NEARLY) for path in (CHAT, TEXT)},
    "fields of a long name": (CHAT, ASKED[CHAT] | {"x" * 3_000_000 + str(number): 1 for number in range(3)}),
    "thousands of fields": (CHAT, ASKED[CHAT] | MANY),
    "thousands of fields in a message": (CHAT, {"messages": [USER | MANY], "max_tokens": 1}),
    "fields in thousands of messages": (CHAT, {"messages": [{**each, letters(1): 1} for each in TALK]}),
    "many replies": (CHAT, ASKED[CHAT] | {"n": 128}),
    "many replies with seeds and biases": (
        TEXT,
        ASKED[TEXT] | {"n": 128, "seed": 1, "logit_bias": {str(number): 1 for number in range(400)}},
    ),
    "many prompts": (TEXT, {"prompt": ["Hi"] * 128, "max_tokens": 1, "echo": True}),
    "many replies with logprobs": (
        CHAT,
        ASKED[CHAT] | {"n": 64, "max_tokens": 50, "logprobs": True, "top_logprobs": 20, "ignore_eos": True},
    ),
    "a text with logprobs": (TEXT, {"prompt": "Hi", "n": 64, "max_tokens": 50, "logprobs": 20, "ignore_eos": True}),
    "a history that does not fit": (CHAT, {"messages": TALK, "truncation": "middle", "max_tokens": 1}),
    "an input that does not fit": (RESPONSES, {"input": TALK, "truncation": "auto", "max_output_tokens": 1}),
    "messages that do not fit": (MESSAGES, {"messages": TALK, "truncation": "middle", "max_tokens": 1}),
    "a history of calls": (CHAT, {"messages": MANY_CALLS, "max_tokens": 1}),
    "a history to count": ("/v1/messages/count_tokens", {"messages": TALK}),
    "large tools": (CHAT, ASKED[CHAT] | {"tools": TOOLS, "max_tokens": 1}),
    **{
        f"many tools that are not followed whole, {path}": (path, ASKED[path] | {"tools": LOOSE[path]})
        for path in LOOSE
    },
    "many calls in a message": (
        MESSAGES,
        {
            "max_tokens": 1,
            "messages": [
                {"role": kind, "content": blocks}
                for kind, blocks in (
                    (
                        "assistant",
                        [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": None} for n in range(9000)],
                    ),
                    ("user", [{"type": "tool_result", "tool_use_id": f"c{n}"} for n in range(9000)]),
                )
            ],
        },
    ),
    "a large schema": (
        CHAT,
        ASKED[CHAT]
        | {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": [SCHEMA] * 99}}}
        },
    ),
    "metadata that is sent back": (
        RESPONSES,
        {"input": "word " * 40, "max_output_tokens": 1, "stream": True, "return_progress": True}
        | {"metadata": {"a": "x" * 10_000_000}},
    ),
    "instructions that are sent back": (
        RESPONSES,
        {"input": "Hi", "instructions": "word " * 30, "max_output_tokens": 1, "stream": True, "return_progress": True}
        | {"tools": [{"type": "web_search", "filters": {"a": "x" * 400_000}}]},
    ),
    "a text to tokenize": ("/tokenize", {"prompt": "a b " * 100_000, "return_token_strs": True}),
    "ids to spell": ("/detokenize", {"tokens": [7] * 200_000}),
    "a prompt of ids": (TEXT, {"prompt": [7] * 200_000, "max_tokens": 1, "echo": True}),
    "a text of quotes": (CHAT, {"messages": [{"role": "user", "content": '"' * 1_000_000}]}),
    "a text of brackets": (CHAT, {"messages": [{"role": "user", "content": "<[>]" * 300_000}]}),
    "a text of half a megabyte": (
        MESSAGES,
        {"messages": [{"role": "user", "content": "word " * 100_000}], "max_tokens": 1},
    ),
}


class Watch:
    """The callbacks of one thread's event loop that took longer than `MOST_S`."""

    def __init__(self) -> None:
        self.slow: list[tuple[float, str]] = []
        self.num_seen = 0


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[RealServer, Watch]]:
    watch, run = Watch(), asyncio.Handle._run  # type: ignore[attr-defined]
    tests = threading.get_ident()

    def timed(handle: Any) -> None:
        begun = time.thread_time()
        run(handle)
        took_s = time.thread_time() - begun
        if threading.get_ident() != tests:
            watch.num_seen += 1
            if took_s > MOST_S:
                watch.slow.append((took_s, repr(handle)))

    with pytest.MonkeyPatch.context() as patch, real_server(num_pages=400, max_num_batched_tokens=64) as server:
        server.engine.grammars.answer_limit_s = 60.0  # however busy the machine is
        for path, body in ASKED.items():  # what is made ready once, by whoever comes first, is not counted
            server.client.post(server.url + path, json=body)
        gc.collect()
        gc.freeze()  # what other tests left is not looked through on this loop
        patch.setattr(asyncio.Handle, "_run", timed)
        yield server, watch
        gc.unfreeze()


@pytest.mark.parametrize(("path", "body"), COSTLY.values(), ids=COSTLY)
def test_no_request_holds_the_event_loop(watched: tuple[RealServer, Watch], path: str, body: Any) -> None:
    server, watch = watched
    content = json.dumps(body, ensure_ascii=False).encode()
    for _ in range(3):
        watch.slow.clear()
        before = watch.num_seen
        answer = server.client.post(server.url + path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 413), answer.text[:200]
        assert len(answer.content) < 30 << 20
        assert watch.num_seen > before and all(took_s < NEVER_S for took_s, _ in watch.slow), watch.slow
        if not watch.slow:
            break
    assert not watch.slow

"""Structured replies of a real model: valid, sensible, and the same alone, in company, and from a warm cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.tools.known_formats import PLAIN
from radixlm.runtime.chat.tools.tool_calls import ToolCallReader, read_whole
from radixlm.runtime.chat.tools.tool_format import Tool
from radixlm.runtime.engine.engine import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
ASK = [{"role": "user", "content": "Write JSON with name, city and year: Alan Turing, London, 1912."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["name", "city", "year"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "get_weather",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    "The weather in a city.",
)


@pytest.fixture(scope="module")
def engine(smollm2_artifact: Path) -> Iterator[Engine]:
    with Engine(smollm2_artifact, kv_cache_bytes=64 << 20, max_num_seqs=8) as engine:
        yield engine


def test_a_schema_is_filled_with_what_the_prompt_says(engine: Engine) -> None:
    reply = engine.chat(ASK, GREEDY, constraint=Grammar.json_schema(SCHEMA))
    value = json.loads(reply.text)
    jsonschema.validate(value, SCHEMA)
    assert value == {"name": "Alan Turing", "city": "London", "year": 1912}
    assert reply.finish_reason == "stop"


def test_structured_replies_are_the_same_alone_in_company_and_warm(engine: Engine) -> None:
    grammars = [
        Grammar.json_schema(SCHEMA),
        Grammar("regex", r"In \d{4}, [A-Z][a-z]+ [a-z ]{5,40}\."),
        Grammar.choice(["London", "Paris", "Rome"]),
        None,
    ]
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=24)
    wishes = [(grammar, params) for grammar in grammars for params in (GREEDY, drawn)]
    alone = [engine.chat(ASK, params, constraint=grammar, namespace=b"alone") for grammar, params in wishes]
    streams = [engine.stream_chat(ASK, params, constraint=grammar, namespace=b"all") for grammar, params in wishes]
    together = [stream.result() for stream in streams]
    warm = [engine.chat(ASK, params, constraint=grammar, namespace=b"all") for grammar, params in wishes]
    for one, other, third in zip(alone, together, warm, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert third.usage.cached_tokens >= third.usage.prompt_tokens - 1


def test_a_required_tool_is_called_though_the_template_knows_none(engine: Engine) -> None:
    assert engine.tool_format is PLAIN
    grammar = PLAIN.grammar([WEATHER], "required")
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    reply = engine.chat(ask, GREEDY, tools=[WEATHER], constraint=grammar)
    [call, *_] = read_whole(reply.text, ToolCallReader(PLAIN, ["get_weather"])).calls
    assert json.loads(call.arguments) == {"city": "Paris"}

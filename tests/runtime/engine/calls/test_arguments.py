"""What callers write as arguments is understood in each way to write it, and refused by name where it is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.tools.tool_format import AnyTool, Tool
from radixlm.runtime.engine.calls.arguments import RequestKeywords, SamplingKeywords, grammar_of, parse_arguments
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.request_options import OptionKeywords, RequestOptions
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidArgument, InvalidGrammar, InvalidParameter, RadixLMError

DEFAULTS = SamplingParams(temperature=0.2, top_k=40)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Person(BaseModel):
    """A model of pydantic."""

    name: str


class Described:
    """Describes itself as pydantic's models do."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize(
    ("keywords", "options"), [(SamplingKeywords, SamplingParams), (OptionKeywords, RequestOptions)]
)
def test_keywords_are_the_fields(keywords: type, options: type) -> None:
    wanted, found = get_type_hints(options), get_type_hints(keywords)
    more = {"tools": Sequence[AnyTool]} if "tools" in wanted else {}  # dicts, too; they become `Tool`s
    assert found == {field.name: wanted[field.name] for field in fields(options)} | more
    assert {*found} <= {*RequestKeywords.__annotations__}


WISHES: Any = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "max_tokens": st.none() | st.integers(0, 9),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
        "seed": st.integers(0, 9),
    },
)
OPTIONS: Any = st.fixed_dictionaries(
    {}, optional={"cache_match": st.sampled_from(["off", "exact"]), "namespace": st.binary(max_size=3)}
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # other work on the machine slows the drawing
@given(given_params=st.none() | WISHES, is_object=st.booleans(), wishes=WISHES, given_options=OPTIONS, changes=OPTIONS)
def test_keywords_change_what_whole_values_say(
    given_params: Any, is_object: bool, wishes: Any, given_options: Any, changes: Any
) -> None:
    params = SamplingParams(**given_params) if is_object and given_params is not None else given_params
    keywords = {**wishes, **changes, "options": RequestOptions(**given_options)}
    found, options = parse_arguments(params, keywords, DEFAULTS)
    base = params if isinstance(params, SamplingParams) else replace(DEFAULTS, **(params or {}))
    assert (DEFAULTS if found is None else found) == replace(base, **wishes)
    assert options == RequestOptions(**{**given_options, **changes})


def test_what_is_given_whole_is_handed_on_as_it_is() -> None:
    params, options = SamplingParams(seed=1), RequestOptions(namespace=b"a")
    found = parse_arguments(params, {"options": options}, DEFAULTS)
    assert found[0] is params and found[1] is options
    assert parse_arguments(None, {}, DEFAULTS)[0] is None  # the engine's own


@pytest.mark.parametrize(
    ("params", "keywords", "says"),
    [
        (5, {}, "params is 5; it must be SamplingParams, or a mapping of its fields"),
        (None, {"json_schema": {}}, "the call has the unknown argument 'json_schema'; did you mean response_format?"),
        (None, {"max_new_tokens": 5}, "the call has the unknown argument 'max_new_tokens'; did you mean max_tokens?"),
        (None, {"temprature": 5}, "the call has the unknown argument 'temprature'; did you mean temperature?"),
        ({"max_token": 5}, {}, "params has the unknown argument 'max_token'; did you mean max_tokens?"),
        (None, {"xyzzy": 1}, "the call has the unknown argument 'xyzzy'; see help"),
        (
            None,
            {"constraint": {"type": "object"}},
            "constraint is {'type': 'object'}; it must be a Grammar; a JSON",
        ),
        (None, {"options": {"cache_match": "off"}}, "options is {'cache_match': 'off'}; it must be RequestOptions"),
        (
            None,
            {"response_format": "json"},
            "response_format is 'json'; it must be a JSON schema, a pydantic model",
        ),
        (None, {"response_format": {"type": "json_schema"}}, "response_format is {'type': 'json_schema'}; it must be"),
        (None, {"tools": "weather"}, "tools is 'weather'; it must be a list of Tool"),
        (None, {"tools": ["weather"]}, "tools has 'weather'; it must be Tool, or"),
        (None, {"response_format": SCHEMA, "constraint": Grammar.json_object()}, "response_format and constraint are"),
    ],
)
def test_a_wrong_argument_is_named(params: Any, keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError) as raised:
        parse_arguments(params, keywords, DEFAULTS)
    assert isinstance(raised.value, InvalidArgument) and isinstance(raised.value, RadixLMError)
    assert str(raised.value).startswith(says)


def test_a_value_outside_its_range_is_no_type_error() -> None:
    with pytest.raises(InvalidParameter, match=r"temperature is -1"):
        parse_arguments(None, {"temperature": -1}, DEFAULTS)


@pytest.mark.parametrize(
    ("format", "grammar"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar.json_object()),
        (SCHEMA, Grammar.json_schema(SCHEMA)),
        (Described, Grammar.json_schema(SCHEMA)),
        (int, Grammar.json_schema({"type": "integer"})),
        (list[int], Grammar.json_schema({"items": {"type": "integer"}, "type": "array"})),
        (Literal["a", "b"], Grammar.json_schema({"enum": ["a", "b"], "type": "string"})),
        (int | None, Grammar.json_schema({"anyOf": [{"type": "integer"}, {"type": "null"}]})),
        (Person, Grammar.json_schema(Person.model_json_schema())),
        (list[Person], Grammar.json_schema(TypeAdapter(list[Person]).json_schema())),
        (TypeAdapter(list[Person]), Grammar.json_schema(TypeAdapter(list[Person]).json_schema())),
        (Grammar.choice(["a", "b"]), Grammar.choice(["a", "b"])),
        (
            {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
            Grammar.json_schema(SCHEMA, is_strict=False),
        ),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}, Grammar.json_schema(SCHEMA)),
    ],
)
def test_each_way_to_write_a_format_is_its_grammar(format: Any, grammar: Grammar | None) -> None:
    assert grammar_of(format) == grammar
    assert parse_arguments(None, {"response_format": format}, DEFAULTS)[1].constraint == grammar


@pytest.mark.parametrize("format", [object(), 3, int | Engine, Engine])
def test_a_type_without_a_schema_is_refused(format: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"response_format is .*; it must be a "):
        grammar_of(format)


def test_types_need_pydantic_and_all_else_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(InvalidArgument, match="types need pydantic, so install it"):
        grammar_of(list[int])
    assert grammar_of(Described) == grammar_of(SCHEMA)


def test_tools_may_be_written_as_clients_of_openai_do() -> None:
    function = {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}
    tool = Tool("weather", SCHEMA, "Tell it.")
    _, options = parse_arguments(None, {"tools": [{"type": "function", "function": function}, tool]}, DEFAULTS)
    assert options.tools == (tool, tool)


@pytest.mark.parametrize("name", ["stop", "stop_regex", "banned_strings", "dry_sequence_breakers"])
def test_one_text_is_a_list_of_it(name: str) -> None:
    one: dict[str, Any] = {name: "6"}
    params, _ = parse_arguments(None, one, DEFAULTS)
    assert params == replace(DEFAULTS, **{name: ["6"]})
    assert SamplingParams(**one) == SamplingParams(**{name: ("6",)})


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ({"stop": 6}, "stop is 6; it must be a text or a list of texts"),
        ({"stop_token_ids": 6}, "stop_token_ids is 6; it must be a list of token ids"),
        ({"stop_token_ids": "6"}, "stop_token_ids is '6'; it must be a list of token ids"),
        ({"logit_bias": 6}, "logit_bias is 6; it must be an object of token ids and numbers"),
    ],
)
def test_what_is_no_list_is_refused_in_words_of_its_own(field: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(**field)
    assert str(error.value) == wanted


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("n_ctx", "; did you mean context_length?"),
        ("max_model_len", "; did you mean context_length?"),
        ("n_threads", "; did you mean num_threads?"),
        ("threads", "; did you mean num_threads?"),
        ("kv_cache_gb", "; did you mean kv_cache_bytes?"),
        ("num_thread", "; did you mean num_threads?"),
        ("zzz", "; see help(EngineOptions)"),
    ],
)
def test_an_unknown_option_of_an_engine_names_the_nearest_before_anything_is_opened(name: str, near: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        Engine("nowhere", **{name: 1})  # type: ignore[arg-type]
    assert str(error.value) == f"Engine has the unknown argument {name!r}{near}"


def test_grammars_have_constructors_and_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    assert Grammar.regex("[0-9]+") == Grammar("regex", "[0-9]+")
    assert Grammar.gbnf('root ::= "a"') == Grammar("grammar", 'root ::= "a"')
    with pytest.raises(InvalidGrammar, match="kind is 'gbnf'; use one of json_schema, regex, choice, or grammar"):
        Grammar("gbnf", 'root ::= "a"')  # type: ignore[arg-type]

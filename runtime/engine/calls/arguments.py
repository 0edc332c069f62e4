"""Turn the arguments of a call into sampling parameters, request options and a reply format.

An error names the argument that is wrong. Knows values, not engines.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any, Protocol, TypedDict, TypeGuard, get_origin

from ...chat.grammar import Grammar
from ...errors import InvalidArgument
from ...fields import fields_of
from ..request_options import NO_OPTIONS, Message, OptionKeywords, Prompt, RequestOptions
from ..sampling_params import SamplingParams

_ELSEWHERE = {
    **dict.fromkeys(("json_schema", "schema", "guided_json", "structured_outputs"), "response_format"),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "n_predict"), "max_tokens"),
    "grammar": "constraint",
}
"""Names of arguments in other libraries, and our names for them."""


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams`, for callers that write them as keywords."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: Sequence[str]
    stop_regex: Sequence[str]
    banned_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    logprobs: int | None
    ignore_eos: bool
    min_tokens: int
    prompt_logprobs: int | None
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    top_n_sigma: float


class SchemaModel(Protocol):
    """A class that describes itself as a JSON schema; pydantic's models do."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        ...


class SchemaAdapter(Protocol):
    """An object that describes a type as a JSON schema; pydantic's `TypeAdapter` does."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        ...


ResponseFormat = Mapping[str, Any] | SchemaModel | SchemaAdapter | type | UnionType | Grammar
"""The format of a reply: a JSON schema, OpenAI's `response_format`, a type that pydantic knows, or a grammar."""
Params = SamplingParams | SamplingKeywords
"""Sampling parameters, or a mapping of the fields that differ from the engine's `default_params`."""


class RequestKeywords(OptionKeywords, SamplingKeywords, total=False):
    """The keywords of a call: the fields of `SamplingParams` and `RequestOptions`, and whole options."""

    options: RequestOptions | None
    response_format: ResponseFormat | None


def parse_arguments(
    params: Params | None, keywords: Mapping[str, Any], defaults: SamplingParams
) -> tuple[SamplingParams | None, RequestOptions]:
    """Return the sampling parameters and the request options that a call's arguments specify.

    Keywords override `params` and `options`. Without parameters the first value is None: the engine's defaults.

    Raises:
        InvalidArgument: an argument is unknown, or of the wrong kind.
        InvalidParameter, InvalidGrammar: a value is outside its range.
    """
    sampling, known = fields_of(SamplingParams), fields_of(RequestOptions)
    wishes = {name: value for name, value in keywords.items() if name in sampling}
    changes = {name: value for name, value in keywords.items() if name in known}
    require_known(keywords, {*sampling, *known, "options", "response_format"}, "the call")
    if isinstance(params, Mapping):
        require_known(params, sampling, "params")
        wishes, params = {**params, **wishes}, None
    if params is not None and not isinstance(params, SamplingParams):
        raise _wrong("params", params, "SamplingParams, or a mapping of its fields")
    if wishes:
        params = replace(defaults if params is None else params, **wishes)
    options = keywords.get("options")
    if options is not None and not isinstance(options, RequestOptions):
        raise _wrong("options", options, "RequestOptions")
    options = options or NO_OPTIONS
    if (grammar := grammar_of(keywords.get("response_format"))) is not None:
        if changes.get("constraint", options.constraint) is not None:
            raise InvalidArgument("response_format and constraint are both given; leave one out", param="constraint")
        changes["constraint"] = grammar
    return params, options.changed(**changes) if changes else options


def grammar_of(response_format: ResponseFormat | None) -> Grammar | None:
    """Return the grammar that a reply must follow; None if any text is allowed.

    Raises:
        InvalidArgument: it is no format.
        InvalidGrammar: it is too long.

    >>> grammar_of({"type": "object", "required": ["name"]}).text
    '{"type":"object","required":["name"]}'
    >>> grammar_of({"type": "text"}) is None
    True
    """
    if response_format is None or isinstance(response_format, Grammar):
        return response_format
    if not isinstance(response_format, Mapping):
        return Grammar.json_schema(_schema_of(response_format))
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.json_object()
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema, **more}}:
            return Grammar.json_schema(schema, is_strict=bool(more.get("strict")))
        case {"type": "json_schema"}:
            raise _wrong("response_format", response_format, '{"type": "json_schema", "json_schema": {"schema": ...}}')
    return Grammar.json_schema(response_format)


def _schema_of(described: Any) -> Mapping[str, Any]:
    """Return the JSON schema of a pydantic model, a `TypeAdapter`, or a type such as `list[int]`.

    Raises:
        InvalidArgument: it is none of these, or pydantic is not installed or has no schema for the type.
    """
    for method in ("model_json_schema", "json_schema"):
        if (describe := getattr(described, method, None)) is not None:
            schema: Mapping[str, Any] = describe()
            return schema
    known = "a JSON schema, a pydantic model, a type or a Grammar"
    if not isinstance(described, type) and get_origin(described) is None:
        raise _wrong("response_format", described, known)
    try:
        from pydantic import PydanticUserError, TypeAdapter
        from pydantic.errors import PydanticInvalidForJsonSchema
    except ImportError:
        raise _wrong("response_format", described, f"{known}; types need pydantic, so install it") from None
    try:
        return TypeAdapter(described).json_schema()
    except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
        reason = str(error).partition(". ")[0]
        raise _wrong("response_format", described, f"a type that pydantic has a JSON schema for ({reason})") from error


def are_prompts(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[Sequence[Prompt]]:
    """Return whether the argument is a list of prompts: a text is one prompt, and so is a list of token ids.

    Raises:
        InvalidArgument: it is neither.
    """
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise _wrong("prompt", prompt, "text, a list of token ids, or a list of such prompts")
    if prompt and isinstance(prompt[0], Mapping):
        raise _wrong("prompt", prompt, "text or token ids; chat() takes messages")
    return len(prompt) > 0 and isinstance(prompt[0], Sequence)


def are_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> TypeGuard[Sequence[Sequence[Message]]]:
    """Return whether the argument is a list of conversations.

    Raises:
        InvalidArgument: it is no list.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong("messages", messages, 'a list of {"role": ..., "content": ...}; generate() takes text')
    return len(messages) > 0 and isinstance(messages[0], Sequence) and not isinstance(messages[0], str)


def is_conversation(prompt: Prompt | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    """Return whether the prompt is a list of messages rather than text or token ids."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def require_known(
    names: Iterable[str],
    known: Collection[str],
    where: str,
    elsewhere: Mapping[str, str] = _ELSEWHERE,
    *,
    help: str = "help(SamplingParams) and help(RequestOptions)",
) -> None:
    """Raise InvalidArgument for the first unknown name; the message suggests a similar one.

    Args:
        elsewhere: names in other libraries, and ours for them.
        help: where the known names are described.
    """
    for name in names:
        if name not in known:
            near = [elsewhere[name]] if name in elsewhere else difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; see {help}"
            raise InvalidArgument(f"{where} has the unknown argument {name!r}{hint}", param=str(name))


def _wrong(name: str, value: object, wanted: str, verb: str = "is") -> InvalidArgument:
    """Return the error for an argument of the wrong kind."""
    return InvalidArgument(f"{name} {verb} {value!r:.60}; it must be {wanted}", param=name)

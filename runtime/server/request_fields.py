"""Request fields that all APIs share: limits on the number of entries, and the sampling parameters.

A request above a limit is refused before any work is done. Ranges of sampling parameters are only described here:
`SamplingParams` declares and checks them, with better error messages. The length of a body is an option of the server.
Knows fields and types, not what an endpoint does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sized
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from ..engine.sampling_params import MAX_LOGPROBS, SamplingParams
from ..errors import InvalidParameter
from ..fields import BIAS, Field, fields_of

MAX_CHOICES = 128  # of one request: prompts times n
MAX_MESSAGES = 4096  # of one conversation
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # entries and characters, if it is returned
MAX_VALUES = 1 << 18  # in a body, token ids included; decoding them takes some hundredths of a second
MAX_TOKEN_ID = 2**31 - 1  # of any vocabulary; the engine checks the model's own bound


def require_at_most(name: str, values: Sized | None, most: int) -> None:
    """Raise InvalidParameter if there are more than `most` of `values`."""
    if values is not None and len(values) > most:
        raise InvalidParameter(f"{name} has {len(values)} entries; at most {most} are allowed", param=name)


def require_small(name: str, metadata: Mapping[str, str] | None) -> None:
    """Raise InvalidParameter if metadata exceeds OpenAI's limits."""
    require_at_most(name, metadata, MAX_METADATA)
    for key, value in (metadata or {}).items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidParameter(
                f"{name} has an entry of {len(key)} and {len(value)} characters; keys may have {MAX_METADATA_KEY}, "
                f"values {MAX_METADATA_VALUE}",
                param=name,
            )


def schema_keywords(**schema: int | float) -> msgspec.Meta:
    """Return keywords of JSON Schema for the API's description; the decoder does not check them."""
    return msgspec.Meta(extra_json_schema=schema)


MaxTokens = Annotated[int, schema_keywords(minimum=-1)]  # 0: the prompt is prefilled and cached; -1: no limit
KVShare = Annotated[float, schema_keywords(exclusiveMinimum=0, maximum=1)]
NumLogprobs = Annotated[int, schema_keywords(minimum=0, maximum=MAX_LOGPROBS)]
NumChoices = Annotated[int, schema_keywords(minimum=1, maximum=MAX_CHOICES)]

API = Literal["openai", "responses", "messages", "ollama"]
Request = TypeVar("Request", bound=msgspec.Struct)


def with_sampling_of(api: API) -> Callable[[type[Request]], type[Request]]:
    """Return a decorator that adds an API's sampling parameters to a request type; None is the model's default.

    Fields that the type declares itself are unchanged.
    """

    def added(request: type[Request]) -> type[Request]:
        fields = [
            (name, wire_type(field) | None, None)
            for name, field in _fields(api).items()
            if name not in request.__struct_fields__
        ]
        made = msgspec.defstruct(
            request.__name__,
            fields,
            bases=(request,),
            module=request.__module__,
            namespace={"__doc__": request.__doc__},
            kw_only=True,
            forbid_unknown_fields=True,
        )
        return cast("type[Request]", made)

    return added


def sampling_params(
    api: API,
    request: msgspec.Struct,
    defaults: SamplingParams,
    own: Mapping[str, object],
    own_names: Mapping[str, str],
) -> SamplingParams:
    """Return `defaults` with the parameters that a request sets. Errors name the request's field.

    Args:
        own: parameters that the endpoint reads from other fields; None if the request does not set them.
        own_names: their names in the request, if different.

    Raises:
        InvalidParameter: a value is outside its range, or a list has too many values.
    """
    names = {field.name: name for name, field in _fields(api).items()}
    wishes = {name: getattr(request, wire_name) for name, wire_name in names.items()}
    wishes |= {name: value for name, value in own.items() if value is not None}
    fields = fields_of(SamplingParams)
    wishes = {name: _as_field(fields[name], value) for name, value in wishes.items() if value is not None}
    try:
        return dataclasses.replace(defaults, **wishes)
    except InvalidParameter as error:
        name = (names | dict(own_names)).get(error.param or "", error.param)
        if name == error.param:
            raise
        raise InvalidParameter(str(error).replace(str(error.param), str(name), 1), param=name) from error


def wire_type(field: Field) -> Any:
    """Return the type of a parameter in a request, with its documentation and range for `/openapi.json`."""
    return Annotated[_json_type(field), msgspec.Meta(description=field.about.doc)]


def _json_type(field: Field) -> Any:
    """Return the type that a sampling parameter has in request bodies, for decoding and for /openapi.json.

    Ranges are only described: `SamplingParams` checks them. A list of texts can also be a single text.
    """
    about = field.about
    if field.kind == BIAS:
        return Annotated[dict[int, Annotated[float, _bounds(field)]], schema_keywords(maxProperties=about.most or 0)]
    if field.kind == tuple[int, ...]:
        return Annotated[list[int], schema_keywords(maxItems=about.most or 0)]
    if field.kind == tuple[str, ...]:
        text = Annotated[str, msgspec.Meta(min_length=1, extra_json_schema={"maxLength": about.longest})]
        return text | Annotated[list[text], schema_keywords(maxItems=about.most or 0)]
    return bool if field.kind is bool else Annotated[field.kind, _bounds(field)]


def _bounds(field: Field) -> msgspec.Meta:
    """Return the description of a number's smallest and largest value, including the value that turns it off."""
    low, high, off = field.about.low, field.about.high, field.about.off
    least = low if low is None or off is None else min(low, off)
    return schema_keywords(
        **{name: bound for name, bound in (("minimum", least), ("maximum", high)) if bound is not None}
    )


def _as_field(field: Field, value: Any) -> Any:
    """Convert a request's value to the parameter's type: one text to a list, and a number for "off" to the default."""
    if field.about.off is not None and value == field.about.off:
        return field.default
    return (value,) if field.kind == tuple[str, ...] and isinstance(value, str) else value


@cache
def _fields(api: API) -> Mapping[str, Field]:
    """Return the sampling parameters of an API's requests, by their names in that API."""
    fields = [each for each in fields_of(SamplingParams).values() if each.about.apis is None or api in each.about.apis]
    return {field.about.names.get(api, field.name): field for field in fields}

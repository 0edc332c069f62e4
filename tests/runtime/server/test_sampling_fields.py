"""Every API has every sampling parameter, under the name that its clients use, and the documentation lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.fields import Field, fields_of
from radixlm.runtime.server.anthropic.requests import MessagesRequest
from radixlm.runtime.server.openai.chat_request import ChatRequest
from radixlm.runtime.server.openai.requests import CompletionRequest
from radixlm.runtime.server.openai.response_requests import ResponseRequest

FIELDS = fields_of(SamplingParams)
MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: Mapping[str, tuple[Any, str, dict[str, Any]]] = {
    "chat": (ChatRequest, "openai", {"messages": MESSAGES}),
    "completions": (CompletionRequest, "openai", {"prompt": "Hi"}),
    "responses": (ResponseRequest, "responses", {"input": "Hi"}),
    "messages": (MessagesRequest, "messages", {"messages": MESSAGES, "max_tokens": 5}),
}
VALUES: Mapping[str, tuple[Any, Any]] = {
    "max_tokens": (7, 7),
    "temperature": (0.5, 0.5),
    "top_k": (3, 3),
    "top_p": (0.25, 0.25),
    "min_p": (0.125, 0.125),
    "repetition_penalty": (1.5, 1.5),
    "presence_penalty": (-1, -1),
    "frequency_penalty": (2, 2),
    "seed": (11, 11),
    "stop": ("a", ("a",)),
    "stop_regex": (["a+", "b"], ("a+", "b")),
    "banned_strings": (["c"], ("c",)),
    "stop_token_ids": ([4, 5], (4, 5)),
    "logit_bias": ({"3": 1.5}, {3: 1.5}),
    "ignore_eos": (True, True),
    "min_tokens": (2, 2),
    "xtc_probability": (0.5, 0.5),
    "xtc_threshold": (0.25, 0.25),
    "dry_multiplier": (0.8, 0.8),
    "dry_base": (1.5, 1.5),
    "dry_allowed_length": (3, 3),
    "dry_penalty_last_n": (64, 64),
    "dry_sequence_breakers": (["\n"], ("\n",)),
    "top_n_sigma": (1.5, 1.5),
}
"""Of each parameter that all APIs have: what a client sends, and what the sampler gets."""


def read(path: str, name: str, value: object) -> SamplingParams:
    """The sampling parameters of a request that sets one of them."""
    request, api, body = REQUESTS[path]
    wire_name = FIELDS[name].about.names.get(api, name)
    params: SamplingParams = msgspec.convert(body | {wire_name: value}, request, strict=False).sampling_params(
        SamplingParams(top_k=9, seed=1, max_tokens=100)
    )
    return params


def test_the_table_of_this_test_has_every_parameter_that_all_apis_have() -> None:
    assert {name for name, field in FIELDS.items() if field.about.apis is None} == {*VALUES}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("name", VALUES)
def test_every_api_sets_every_parameter(path: str, name: str) -> None:
    sent, got = VALUES[name]
    assert getattr(read(path, name, sent), name) == got


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.about.off is not None])
def test_the_number_for_none_is_the_default_of_the_field_and_not_of_the_model(path: str, name: str) -> None:
    assert getattr(read(path, name, FIELDS[name].about.off), name) == FIELDS[name].default


@pytest.mark.parametrize("path", REQUESTS)
@given(
    name=st.sampled_from([name for name, field in FIELDS.items() if name in VALUES and field.kind in (int, float)]),
    value=st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_an_error_names_the_field_as_the_client_does(path: str, name: str, value: float) -> None:
    field = FIELDS[name]
    value = int(value) if field.kind is int else value
    _, api, _ = REQUESTS[path]
    try:
        got = getattr(read(path, name, value), name)
    except msgspec.ValidationError:
        assert abs(value) >= 2**63  # msgspec has no larger ones
    except InvalidParameter as error:
        assert error.param == field.about.names.get(api, name) and str(error).startswith(error.param)
        assert not field.about.holds(value) or (name == "min_tokens" and value > 5)  # of max_tokens
    else:
        assert got == (field.default if value == field.about.off else field.kind(value))


def table() -> str:
    """The table of docs/serving.md: `python -m tests.runtime.server.test_sampling_fields` prints it."""
    rows = [_row(field) for field in FIELDS.values() if field.about.apis is None]
    return "\n".join(["| field | values | default | meaning |", "|---|---|---|---|", *rows])


def _row(field: Field) -> str:
    about = field.about
    names = "".join(f", in {api} `{name}`" for api, name in about.names.items())
    kinds = {int: "integer", float: "number", bool: "true, false", tuple[int, ...]: "token ids"}
    kind = kinds.get(field.kind, "text or list of texts" if field.kind == tuple[str, ...] else "object of numbers")
    values = f"{kind} {about.range}".strip()
    if about.off is not None:
        values += f"; {about.off} is as {'null' if field.default is None else field.default}"
    values += "" if about.most is None else f"; {about.most} at most"
    default = about.unset or ("none" if field.default in ((), {}) else f"`{json.dumps(field.default)}`")
    return f"| `{field.name}`{names} | {values} | {default} | {about.doc} |"


def test_the_documentation_lists_them() -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert table() in text


if __name__ == "__main__":
    print(table())

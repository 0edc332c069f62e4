"""Every value outside its range is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidParameter, InvalidRequest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("top_n_sigma", -0.1),
        ("top_n_sigma", math.inf),
        ("top_n_sigma", None),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-310),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", ("x" * 2000,)),
        ("stop", tuple(map(str, range(20)))),
        ("stop", None),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 5),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("ignore_eos", 1),
    ],
)
def test_value_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=name) as refused:
        SamplingParams(**{name: value})
    assert isinstance(refused.value, InvalidRequest) and "\n" not in str(refused.value)


def test_edges_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=1, seed=2**64 - 1, logprobs=20)
    SamplingParams(top_n_sigma=0)
    SamplingParams(logit_bias={0: -100}, presence_penalty=-2, frequency_penalty=2, stop=("x",) * 16)


def test_params_by_position_mean_what_they_always_did() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names[:4] == ["max_tokens", "temperature", "top_k", "top_p"]
    assert names[16:19] == ["min_tokens", "prompt_logprobs", "xtc_probability"]  # new ones come last
    assert SamplingParams(16, 1) == SamplingParams(max_tokens=16, temperature=1)


def test_changing_the_callers_dictionary_changes_nothing() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 500.0
    assert params.logit_bias == {1: 1.0}


FULL = SamplingParams(
    max_tokens=7, seed=3, stop=("\n", "end"), stop_token_ids=(5,), logit_bias={3: -1.5, 8: 100}, logprobs=2
)


@pytest.mark.parametrize("params", [SamplingParams(), FULL])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_params_can_be_pickled_and_copied(copied: Any, params: SamplingParams) -> None:
    assert copied(params) == params


@pytest.mark.parametrize("params", [SamplingParams(), FULL])
def test_params_as_a_dictionary_make_the_same_params_again(params: SamplingParams) -> None:
    fields = dataclasses.asdict(params)
    assert SamplingParams(**fields) == params
    fields["logit_bias"][1] = 500.0
    assert params.logit_bias.get(1) is None

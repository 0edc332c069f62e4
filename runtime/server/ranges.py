"""Parameters with their ranges, for the API's description.

They are only said here: `SamplingParams` holds requests to them, and has better words for what is wrong.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..engine.sampling_params import MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from .limits import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS


def said(**schema: int | float) -> msgspec.Meta:
    """Keywords of JSON Schema that the description has, and the decoder does not check."""
    return msgspec.Meta(extra_json_schema=schema)


MaxTokens = Annotated[int, said(minimum=1)]
MinTokens = Annotated[int, said(minimum=0)]
Temperature = Annotated[float, said(minimum=0, maximum=100)]
TopP = Annotated[float, said(minimum=0, maximum=1)]
TopK = Annotated[int, said(minimum=-1)]  # vLLM's -1 is 0: all
MinP = Annotated[float, said(minimum=0, maximum=1)]
KVShare = Annotated[float, said(exclusiveMinimum=0, maximum=1)]
RepetitionPenalty = Annotated[float, said(minimum=0.01, maximum=100)]
Penalty = Annotated[float, said(minimum=-2, maximum=2)]
Seed = Annotated[int, said(minimum=-(2**63), maximum=2**64 - 1)]
NumLogprobs = Annotated[int, said(minimum=0, maximum=MAX_LOGPROBS)]
NumChoices = Annotated[int, said(minimum=1, maximum=MAX_CHOICES)]
StopString = Annotated[str, said(minLength=1, maxLength=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], said(maxItems=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[int], said(maxItems=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[int, Annotated[float, said(minimum=-100, maximum=100)]], said(maxProperties=MAX_LOGIT_BIAS)]

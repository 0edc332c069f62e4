"""How a reply's tokens are chosen and when the reply ends: the client's wishes, validated.

Knows ranges, not logits; `sampler.py` does what is wished here. What depends on the model (is this token id in the vocabulary) is
checked by `EngineCore.validate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .errors import InvalidParameter

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Field names and meanings are those of OpenAI's and vLLM's APIs.

    The order is: repetition, presence and frequency penalty, logit bias, temperature, then top-k, top-p and min-p, each
    on what the one before it left. `temperature=0` takes the most likely token, the lowest id on ties.

    >>> SamplingParams(temperature=0.7, top_p=0.9, stop=("\\n\\n",), seed=7).greedy
    False
    >>> SamplingParams(top_p=0.0)
    Traceback (most recent call last):
    radixlm.runtime.errors.InvalidParameter: top_p is 0.0; it must be above 0 and at most 1

    Raises:
        InvalidParameter: a value is outside its range; the message has the name, the value and the range.
    """

    max_tokens: int | None = None  # None: up to the context length
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and reply; 1.0: none
    presence_penalty: float = 0.0  # over the reply
    frequency_penalty: float = 0.0  # over the reply
    seed: int | None = None  # None: a fresh one from the operating system
    stop: tuple[str, ...] = ()  # the reply ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence tokens
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    logprobs: int | None = None  # None: none; k: the generated token's and the k most likely ones'
    ignore_eos: bool = False  # go on past the model's own end-of-sequence tokens

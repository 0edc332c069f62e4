"""The most that one request may ask for, whatever the model; and its parameters' ranges, for the API's description.

What exceeds a count here is refused before any of it is worked on. The ranges are only described here: `SamplingParams`
holds requests to them, and has better words for what is wrong. The length of a body is an argument of `create_app`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Annotated

import msgspec

from ..engine.sampling_params import MAX_LOGPROBS
from ..errors import InvalidParameter

MAX_CHOICES = 128  # of one request: prompts times n
MAX_MESSAGES = 4096  # of one conversation
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # entries and characters, where they are sent back
MAX_VALUES = 1 << 18  # of a body, token ids among them; as many take some hundredths of a second to decode
MAX_TOKEN_ID = 2**31 - 1  # of any vocabulary; the model's own bound is the engine's to check


def require_at_most(name: str, values: Sized | None, most: int) -> None:
    """Raise InvalidParameter if there are more than `most` of `values`."""
    if values is not None and len(values) > most:
        raise InvalidParameter(f"{name} has {len(values)} entries; at most {most} are allowed", param=name)


def require_small(name: str, metadata: Mapping[str, str] | None) -> None:
    """Raise InvalidParameter unless metadata has OpenAI's size."""
    require_at_most(name, metadata, MAX_METADATA)
    for key, value in (metadata or {}).items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidParameter(
                f"{name} has an entry of {len(key)} and {len(value)} characters; keys may have {MAX_METADATA_KEY}, "
                f"values {MAX_METADATA_VALUE}",
                param=name,
            )


def said(**schema: int | float) -> msgspec.Meta:
    """Keywords of JSON Schema that stand in the API's description; the decoder does not check them."""
    return msgspec.Meta(extra_json_schema=schema)


MaxTokens = Annotated[int, said(minimum=-1)]  # 0: the prompt is computed, and kept; -1: no limit
KVShare = Annotated[float, said(exclusiveMinimum=0, maximum=1)]
NumLogprobs = Annotated[int, said(minimum=0, maximum=MAX_LOGPROBS)]
NumChoices = Annotated[int, said(minimum=1, maximum=MAX_CHOICES)]

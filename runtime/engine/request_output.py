"""What the engine hands out for a request, step by step."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import RadixLMError
from .completion import Completion, Delta


class RequestOutput(NamedTuple):
    """What a step brought for one request. The last one has a `completion` or an `error`."""

    request_id: str
    delta: Delta | None = None
    completion: Completion | None = None
    error: RadixLMError | None = None

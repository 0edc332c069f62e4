"""The most that one request may ask for, whatever the model: what is refused before any of it is worked on.

Ranges of single sampling parameters are `sampling_params.py`'s, the length of a body is `create_app`'s.
"""

from __future__ import annotations

from collections.abc import Sized

from ..errors import InvalidParameter

MAX_CHOICES = 128  # of one request: prompts times n
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKEN_IDS = 1024
MAX_MESSAGES = 4096  # of one conversation
MAX_VALUES = 1 << 18  # of a body, token ids among them; as many take some hundredths of a second to decode
MAX_TOKEN_ID = 2**31 - 1  # of any vocabulary; the model's own bound is the engine's to check


def require_at_most(name: str, values: Sized | None, most: int) -> None:
    """Raise InvalidParameter if there are more than `most` of `values`."""
    if values is not None and len(values) > most:
        raise InvalidParameter(f"{name} has {len(values)} entries; at most {most} are allowed", param=name)

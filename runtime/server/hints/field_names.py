"""Names of one field in different APIs, so that a field of one can be answered with the name that an endpoint uses.

Knows names, not values.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

_GROUPS: Final = (
    ("input", "prompt", "messages", "inputs", "content", "contents", "text"),
    ("system", "instructions", "instruction"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    (
        *("max_completion_tokens", "max_output_tokens", "max_tokens", "max_tokens_to_sample", "max_new_tokens"),
        *("num_predict", "n_predict", "max_length"),
    ),
    ("stop", "stop_sequences", "stops"),
    ("response_format", "output_config", "text", "output_format", "format", "guided_json", "json_schema"),
    ("reasoning_effort", "reasoning"),
)
"""Each group has the names of one field, those to suggest first."""

DISTINCT: Final = frozenset({"top_k", "top_p", "top_n", "min_tokens", "state", "texts", "content", "contents"})
"""Fields of some API whose names are near those of other fields, but not misspelt."""

_CHAT: Final = "/v1/chat/completions"


def synonym_advice(name: str, known: Container[str]) -> str | None:
    """Return which field an endpoint with the `known` fields has in place of `name`, as advice; None if it has none.

    >>> synonym_advice("content", {"prompt", "messages"}), synonym_advice("messages", {"prompt"})
    ('send `prompt`', 'send `prompt`, or use /v1/chat/completions')
    """
    groups = (group for group in _GROUPS if name in group)
    found = next((each for group in groups for each in group if each in known and each != name), None)
    if found is None:
        return None
    return f"send `{found}`, or use {_CHAT}" if name == "messages" else f"send `{found}`"

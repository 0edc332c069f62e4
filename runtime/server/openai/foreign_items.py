"""Items of a Responses input that other servers made, or that clients keep for themselves: a model here has no use for
them.

They stand in histories that began elsewhere, and are sent again with every request. Knows kinds of items, not what they
hold.
"""

from __future__ import annotations

from typing import Any, Final

from ..errors import HTTPError
from ..field_policy import IgnoredFields
from .response_items import KINDS

FOREIGN: Final = frozenset((
    *("web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call"),
    *("image_generation_call", "tool_search_call", "tool_search_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_call"),
    *("mcp_approval_request", "mcp_approval_response", "compaction", "compaction_summary", "ghost_snapshot", "other"),
))  # fmt: skip
"""Kinds that OpenAI's servers have, and Codex: tools that those ran, summaries that only those can read, and notes."""

_NOTHING: Final = {"type": "reasoning"}  # in place of such an item, so that the others keep their numbers


def leave_out_foreign(body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None:
    """Take such items out of a body, whatever else is in it, and list them: `input.web_search_call`.

    Raises:
        HTTPError: 400, an item refers to one that is stored elsewhere, or `IgnoredFields.ignore` refuses its kind.
    """
    items = body.get("input") if isinstance(body, dict) else None
    if not isinstance(items, list):
        return
    for place, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "item_reference":
            param = f"input[{place}]"
            message = f"{param} is an item_reference, and nothing is stored here; send the item itself"
            raise HTTPError(400, message, param=param)
        if is_strict or not isinstance(kind, str) or kind in KINDS:
            continue  # what it is decoded as may refuse it
        if kind in FOREIGN:
            ignored.harmless.add(f"input.{kind}")
        else:
            ignored.ignore(f"input.{kind}", item, KINDS)
        items[place] = dict(_NOTHING)

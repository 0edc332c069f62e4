"""Convert malformed contents of messages that can only mean one thing. Knows JSON, not what is done with it.

Each function converts one field: it gets the field's value and the object around it, and returns the value to use,
which is the same object if nothing is wrong.
"""

from __future__ import annotations

import json
from typing import Any, Final

from ...chat.tools.arguments import read_cut
from .json_values import MISSING, Object, Read

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_RUN_TOOLS: Final = frozenset((
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "container_upload"),
))  # fmt: skip
"""Types of blocks for tools that Anthropic's servers run, and for their results."""
_PARTS: Final = {"input_text": "text", "output_text": "text"}


def null_content(value: Any, message: Object) -> Any:
    """Convert null or missing content to an empty text. A user's message must have content, but may have null."""
    if value is None:
        return "" if not _says_more(message) else value
    is_optional = message.get("role") in ("assistant", "tool", "function", "system")
    return "" if value is MISSING and is_optional and not _says_more(message) else value


def null_content_of_item(value: Any, item: Object) -> Any:
    """Convert null or missing content of an input item to an empty text."""
    if value is None:
        return "" if "role" in item else value
    return "" if value is MISSING and item.get("role") in ("assistant", "system", "developer") else value


def message_type(value: Any, item: Object) -> Any:
    """Convert the type null of an item with a role to "message"."""
    return "message" if value is None and "role" in item else value


def _says_more(message: Object) -> bool:
    """Return whether a message has more than its content, such as tool calls or reasoning."""
    return any(message.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "refusal", "audio"))


def _is_parts(value: Any) -> bool:
    """Return whether a value is a list of content parts with types."""
    return isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("type"), str) for each in value
    )


def result(value: Any, message: Object) -> Any:
    """Convert the content of a tool's result to text."""
    return _as_text(value, message) if message.get("role") in ("tool", "function") else value


def _as_text(value: Any, parent: Object) -> Any:
    """Convert the content of a tool's result: nothing to an empty text, and JSON to its text. Parts are kept."""
    if value is None or value is MISSING:
        return ""
    return value if isinstance(value, str) or _is_parts(value) else _json(value)


def result_output(value: Any, item: Object) -> Any:
    """Convert the output of a tool, in an input item, to text."""
    return _as_text(value, item) if str(item.get("type")).endswith("_output") else value


def result_block(value: Any, block: Object) -> Any:
    """Convert the content of a `tool_result` block to text."""
    is_result = block.get("type") == "tool_result" and value is not MISSING
    return _as_text(value, block) if is_result else value


def one_part(value: Any, message: Object) -> Any:
    """Convert a single content part to a list of it."""
    is_part = isinstance(value, dict) and isinstance(value.get("type"), str) and message.get("role") != "tool"
    return [value] if is_part else value


def strings(value: Any, message: Object) -> Any:
    """Convert strings in a list of content parts to text parts."""
    if not isinstance(value, list) or not value or message.get("role") in ("tool", "function"):
        return value
    if not any(isinstance(each, str) for each in value):
        return value
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in value]


def strings_of_item(value: Any, item: Object) -> Any:
    """Convert strings in a list of content parts to input or output text parts, depending on the role."""
    read = strings(value, item)
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return value if read is value else [{"type": kind, "text": old} if isinstance(old, str) else old for old in value]


def arguments(value: Any, parent: Object) -> Any:
    """Convert arguments of a tool call from an object to JSON text."""
    if value is None or value == []:
        return "{}"
    return _json(value) if isinstance(value, dict) else value


def arguments_of_item(value: Any, item: Object) -> Any:
    """Convert the arguments of a `function_call` item to JSON text."""
    if item.get("type") != "function_call":
        return value
    return "{}" if value is MISSING else arguments(value, item)


def input(value: Any, block: Object) -> Any:
    """Convert the input of a `tool_use` block from JSON text, complete or truncated, to an object."""
    if block.get("type") != "tool_use":
        return value
    if value is None or value is MISSING or value in ("", []):
        return {}
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = read_cut(value) if value.lstrip().startswith("{") else value
        return {} if read is None else read if isinstance(read, dict) else value
    return value


def null(meaning: str) -> Read:
    """Return a conversion of null to a text."""
    return lambda value, parent: meaning if value is None else value


def no_text(value: Any, part: Object) -> Any:
    """Convert null, or a missing text of a text part, to an empty text."""
    is_text = part.get("type") in ("text", "input_text", "output_text")
    return "" if value is None or (value is MISSING and is_text) else value


def no_reasoning(value: Any, block: Object) -> Any:
    """Convert null, or a missing text of a `thinking` block, to an empty text."""
    return "" if value is None or (value is MISSING and block.get("type") == "thinking") else value


def part_type(kind: str) -> Read:
    """Return a conversion that adds a missing type to a part with a text."""
    return lambda value, part: kind if (not value or value is MISSING) and isinstance(part.get("text"), str) else value


def other_type(value: Any, part: Object) -> Any:
    """Convert the part types of Responses to "text"."""
    return _PARTS.get(value, value) if isinstance(value, str) else value


def no_empty_texts(value: Any, body: Object) -> Any:
    """Remove empty texts from a text or a list of texts; `MISSING` if none is left."""
    if value == "":
        return MISSING
    if not isinstance(value, list) or not any(each in ("", None) for each in value):
        return value
    return [each for each in value if each not in ("", None)] or MISSING


def user(value: Any, body: Object) -> Any:
    """Convert a text in place of a list of messages to one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) and value else value


def role(value: Any, message: Object) -> Any:
    """Convert a role in capitals to lower case."""
    is_role = isinstance(value, str) and value not in _ROLES and value.lower() in _ROLES
    return value.lower() if is_role else value


def system_role(value: Any, message: Object) -> Any:
    """Convert the role "developer" to "system"."""
    return "system" if value == "developer" else value


def without_run_tools(value: Any, message: Object) -> Any:
    """Remove the blocks of tools that Anthropic's servers ran from an assistant's message."""
    if message.get("role") != "assistant" or not isinstance(value, list):
        return value
    kept = [each for each in value if not (isinstance(each, dict) and each.get("type") in _RUN_TOOLS)]
    return kept if len(kept) < len(value) else value


def system_blocks(value: Any, body: Object) -> Any:
    """Convert a single system block, or strings in a list, to text blocks."""
    return [value] if isinstance(value, dict) else strings(value, {})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

"""OpenAI's older form of tools: `functions`, `function_call` and the role `function`.

Knows both forms. Functions of a request become tools, and its reply is translated back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

from ...chat.tools.tool_use import ToolUse
from ..request_fields import require_at_most
from .replies import ChatDelta, ChatFinishReason, FunctionCallDelta, FunctionCallReply, ReplyMessage
from .tools import MAX_TOOLS, FunctionDefinition, NamedFunction

FunctionChoice = Literal["auto", "none"] | NamedFunction


def function_use(asked: Sequence[FunctionDefinition], choice: FunctionChoice | None) -> ToolUse:
    """Return the functions as tools for the model, of which it may call at most one.

    Raises:
        InvalidParameter: as `tool_use` does.
    """
    require_at_most("functions", asked, MAX_TOOLS)
    tools = [function.tool() for function in asked]
    of = partial(ToolUse.of, tools, is_parallel=False, parameters_field=functions_field)
    return of("required", choice.name) if isinstance(choice, NamedFunction) else of(choice or "auto")


def functions_field(index: int) -> str:
    """Return the request field with the schema of the n-th function."""
    return f"functions[{index}].parameters"


def legacy_message(message: ReplyMessage) -> ReplyMessage:
    """Convert the tool call of a message to a `function_call`."""
    if message.tool_calls is msgspec.UNSET:
        return message
    [call] = message.tool_calls
    made = FunctionCallReply(call.function.name, call.function.arguments)
    return msgspec.structs.replace(message, tool_calls=msgspec.UNSET, function_call=made)


def legacy_delta(delta: ChatDelta) -> ChatDelta:
    """Convert the tool call of a stream's delta to a `function_call`."""
    if delta.tool_calls is msgspec.UNSET:
        return delta
    [call] = delta.tool_calls
    made = FunctionCallDelta(call.function.arguments, call.function.name)
    return msgspec.structs.replace(delta, tool_calls=msgspec.UNSET, function_call=made)


def legacy_reason(reason: ChatFinishReason) -> ChatFinishReason:
    """Convert the finish reason "tool_calls" to "function_call"."""
    return "function_call" if reason == "tool_calls" else reason

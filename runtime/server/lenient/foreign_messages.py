"""Convert tool calls and results in the format of another API to that of the endpoint.

A client that changes APIs in the middle of a conversation, or combines several libraries, sends both formats. Foreign
messages are first converted to those of Chat Completions, then to the endpoint's. Knows JSON, not what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..request_fields import MAX_MESSAGES

Message = dict[str, Any]

_BLOCKS: Final = frozenset(("tool_use", "tool_result", "thinking", "redacted_thinking"))


def for_chat(messages: Any) -> Any:
    """Convert Anthropic's blocks and the items of Responses among the messages of a chat.

    >>> for_chat([{"type": "function_call", "call_id": "x", "name": "now", "arguments": "{}"}])[0]["tool_calls"]
    [{'id': 'x', 'type': 'function', 'function': {'name': 'now', 'arguments': '{}'}}]
    """
    return _convert_entries(
        messages, lambda message: _item_to_messages(message) or _blocks_to_messages(message), "tool_calls"
    )


def for_responses(items: Any) -> Any:
    """Convert messages of chats and Anthropic's blocks among the items of a Responses input."""
    return _convert_entries(
        items, lambda item: _convert_all(_blocks_to_messages(item) or _of_chat(item), _message_to_items)
    )


def for_messages(messages: Any) -> Any:
    """Convert messages of chats and items of Responses among Anthropic's messages."""
    return _convert_entries(
        messages,
        lambda message: _convert_all(_item_to_messages(message) or _of_chat(message), _message_to_blocks),
        "content",
    )


def _convert_entries(
    value: Any,
    read: Callable[[Message], list[Message] | None],
    joined: str = "",
) -> Any:
    """Replace the entries of a list that `read` converts. Returns the same list if there are none, or it is too long.

    Args:
        read: returns the messages that replace an entry, or None to keep it.
        joined: a list field of assistant messages; converted messages that follow another are merged into it.
    """
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        return value
    messages, is_changed, is_ours = list[Any](), False, False
    for entry in value:
        found = read(entry) if isinstance(entry, dict) else None
        is_changed |= found is not None
        for each in [entry] if found is None else found:
            last: Any = messages[-1] if messages else None
            if found is None or not joined or not _continues(last, each, joined):
                messages.append(each)
                is_ours = found is not None
                continue
            if not is_ours or not isinstance(last.get(joined), list):  # the client's own: must not be changed
                messages[-1], is_ours = _with_list(last, joined), True
            messages[-1][joined].extend(each[joined])
    return messages if is_changed else value


def _continues(last: Any, reply: Message, name: str) -> bool:
    """Return whether an assistant message can be merged into the one before it: calls after text, or more blocks."""
    if not isinstance(last, dict) or not last.get("role") == reply.get("role") == "assistant":
        return False
    has_more = name == "tool_calls" and bool(reply.get("content"))
    return bool(reply.get(name)) and not has_more and isinstance(last.get(name), list | str | None)


def _with_list(reply: Message, name: str) -> Message:
    """Return a copy of an assistant message whose field is a list of its own."""
    content = reply.get(name) or []
    return {**reply, name: [{"type": "text", "text": content}] if isinstance(content, str) else list(content)}


def _convert_all(messages: list[Message] | None, read: Callable[[Message], list[Message]]) -> list[Message] | None:
    """Return the conversions of all messages, joined; None for None."""
    return None if messages is None else [each for message in messages for each in read(message)]


# From other APIs to messages of a chat. Each returns None if the message is not foreign.


def _item_to_messages(item: Message) -> list[Message] | None:
    """Convert a tool call or a tool's result among the items of Responses; None for other entries."""
    match item.get("type"):
        case "function_call" if "role" not in item:
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id", item.get("id")), "type": "function", "function": function}
            return [{"role": "assistant", "content": "", "tool_calls": [call]}]
        case "function_call_output" if "role" not in item:
            return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}]
    return None


def _blocks_to_messages(message: Message) -> list[Message] | None:
    """Convert a message with Anthropic's blocks of tools or reasoning; None for other messages."""
    content = message.get("content")
    if message.get("role") not in ("user", "assistant") or not isinstance(content, list):
        return None
    if not any(isinstance(each, dict) and each.get("type") in _BLOCKS for each in content):
        return None
    return _assistant(message, content) if message["role"] == "assistant" else _results(message, content)


def _assistant(message: Message, blocks: list[Any]) -> list[Message]:
    """Convert Anthropic's blocks of an assistant message: reasoning, text and tool calls."""
    reasoning, texts, calls = list[str](), list[Any](), list[Any]()
    for block in blocks:
        match block.get("type") if isinstance(block, dict) else None:
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                reasoning.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case _:
                texts.append(block)
    reply = {**message, "content": texts or ""}
    if any(reasoning):
        reply["reasoning_content"] = "".join(reasoning)
    return [{**reply, "tool_calls": calls} if calls else reply]


def _results(message: Message, blocks: list[Any]) -> list[Message]:
    """Convert Anthropic's blocks of a user message: tool results and texts, in their order."""
    messages, texts = list[Message](), list[Any]()
    for block in [*blocks, None]:
        is_result = isinstance(block, dict) and block.get("type") == "tool_result"
        if texts and (is_result or block is None):
            messages.append({**message, "content": texts})
            texts = []
        if is_result:
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block)})
        elif block is not None:
            texts.append(block)
    return messages


def _result(block: Message) -> Any:
    """Return the content of a tool result. An error is marked in the text, for the model to read."""
    content = block.get("content")
    if not block.get("is_error"):
        return content
    if isinstance(content, list):
        return [{"type": "text", "text": "Error: "}, *content]
    return f"Error: {content or ''}" if content is None or isinstance(content, str) else content


def _of_chat(message: Message) -> list[Message] | None:
    """Return a chat message with tool calls or a result; converts the older `function_call`. None for others."""
    match message.get("role"):
        case "tool":
            return [message]
        case "function":
            return [{"role": "tool", "content": message.get("content")}]
        case "assistant" if message.get("tool_calls"):
            return [message]
        case "assistant" if isinstance(message.get("function_call"), dict):
            return [{**message, "tool_calls": [{"function": message["function_call"]}]}]
    return None


# From messages of a chat to other APIs.


def _message_to_items(message: Message) -> list[Message]:
    """Convert a message of a chat with tool calls, or a tool's result, to items of Responses."""
    if message.get("role") == "tool":
        return [
            {
                "type": "function_call_output",
                "call_id": message.get("tool_call_id"),
                "output": message.get("content"),
            }
        ]
    items = list[Message]()
    if message.get("reasoning_content"):
        reasoning = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "content": [reasoning]})
    if message.get("content"):
        items.append({"role": message.get("role"), "content": message["content"]})
    return [
        *items,
        *({"type": "function_call", **_call_fields(call, "call_id", "arguments")} for call in _calls_of(message)),
    ]


def _message_to_blocks(message: Message) -> list[Message]:
    """Convert a message of a chat with tool calls, or a tool's result, to Anthropic's blocks."""
    if message.get("role") == "tool":
        block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": message.get("content")}
        return [{"role": "user", "content": [block]}]
    blocks = list[Any]()
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"]})
    content = message.get("content")
    if isinstance(content, str) and content:
        blocks.append({"type": "text", "text": content})
    elif isinstance(content, list):
        blocks += content
    calls = [{"type": "tool_use", **_call_fields(call, "id", "input")} for call in _calls_of(message)]
    return [{"role": "assistant", "content": [*blocks, *calls]}]


def _calls_of(message: Message) -> list[Message]:
    """Return the tool calls of a message; [] if it has none."""
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    return [call for call in calls if isinstance(call, dict)]


def _call_fields(call: Message, id_name: str, arguments_name: str) -> Message:
    """Return the id, the name and the arguments of a tool call, with the field names of another API."""
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    arguments = function.get("arguments")
    named = {id_name: call.get("id"), "name": function.get("name")}
    return {**named, arguments_name: "{}" if arguments is None else arguments}

"""Calls of tools and their results in the shape of another API, as messages of the one that was asked.

A client that changes its API in the middle of a conversation, or joins several libraries, sends both shapes. What is
foreign is first made a message of Chat Completions, then what the endpoint takes. Knows JSON, not what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..request_fields import MAX_MESSAGES

Message = dict[str, Any]

_BLOCKS: Final = frozenset(("tool_use", "tool_result", "thinking", "redacted_thinking"))


def for_chat(messages: Any) -> Any:
    """The messages of a chat, with Anthropic's blocks and the items of Responses as calls and results.

    >>> for_chat([{"type": "function_call", "call_id": "x", "name": "now", "arguments": "{}"}])[0]["tool_calls"]
    [{'id': 'x', 'type': 'function', 'function': {'name': 'now', 'arguments': '{}'}}]
    """
    return _each(messages, lambda message: _of_item(message) or _of_blocks(message), "tool_calls")


def for_responses(items: Any) -> Any:
    """The items of a Responses input, with calls and results of chats and of Anthropic's blocks as items."""
    return _each(items, lambda item: _all(_of_blocks(item) or _of_chat(item), _as_items))


def for_messages(messages: Any) -> Any:
    """Anthropic's messages, with calls and results of chats and of Responses as blocks."""
    return _each(messages, lambda message: _all(_of_item(message) or _of_chat(message), _as_blocks), "content")


def _each(
    value: Any,
    read: Callable[[Message], list[Message] | None],
    joined: str = "",
) -> Any:
    """A list with what `read` makes of its entries; itself if that is nothing of any, or if it is too long.

    Args:
        joined: the field of a reply that goes on with that of a reply which was made of the entry behind it.
    """
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        return value
    told, is_changed, is_ours = list[Any](), False, False
    for entry in value:
        found = read(entry) if isinstance(entry, dict) else None
        is_changed |= found is not None
        for each in [entry] if found is None else found:
            last: Any = told[-1] if told else None
            if found is None or not joined or not _goes_on(last, each, joined):
                told.append(each)
                is_ours = found is not None
                continue
            if not is_ours or not isinstance(last.get(joined), list):  # it is the client's
                told[-1], is_ours = _opened(last, joined), True
            told[-1][joined].extend(each[joined])
    return told if is_changed else value


def _goes_on(last: Any, reply: Message, name: str) -> bool:
    """Whether a reply can be a part of what comes before it: calls behind words, or blocks behind others."""
    if not isinstance(last, dict) or not last.get("role") == reply.get("role") == "assistant":
        return False
    has_more = name == "tool_calls" and bool(reply.get("content"))
    return bool(reply.get(name)) and not has_more and isinstance(last.get(name), list | str | None)


def _opened(reply: Message, name: str) -> Message:
    """A reply with a list of its own."""
    said = reply.get(name) or []
    return {**reply, name: [{"type": "text", "text": said}] if isinstance(said, str) else list(said)}


def _all(messages: list[Message] | None, read: Callable[[Message], list[Message]]) -> list[Message] | None:
    return None if messages is None else [each for message in messages for each in read(message)]


# To messages of a chat; None: it is not foreign.


def _of_item(item: Message) -> list[Message] | None:
    match item.get("type"):
        case "function_call" if "role" not in item:
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id", item.get("id")), "type": "function", "function": function}
            return [{"role": "assistant", "content": "", "tool_calls": [call]}]
        case "function_call_output" if "role" not in item:
            return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}]
    return None


def _of_blocks(message: Message) -> list[Message] | None:
    content = message.get("content")
    if message.get("role") not in ("user", "assistant") or not isinstance(content, list):
        return None
    if not any(isinstance(each, dict) and each.get("type") in _BLOCKS for each in content):
        return None
    return _said(message, content) if message["role"] == "assistant" else _results(message, content)


def _said(message: Message, blocks: list[Any]) -> list[Message]:
    """What the assistant thought, said and called."""
    thoughts, words, calls = list[str](), list[Any](), list[Any]()
    for block in blocks:
        match block.get("type") if isinstance(block, dict) else None:
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case _:
                words.append(block)
    said = {**message, "content": words or ""}
    if any(thoughts):
        said["reasoning_content"] = "".join(thoughts)
    return [{**said, "tool_calls": calls} if calls else said]


def _results(message: Message, blocks: list[Any]) -> list[Message]:
    """Results of calls and the user's words, each where it stands."""
    told, words = list[Message](), list[Any]()
    for block in [*blocks, None]:
        is_result = isinstance(block, dict) and block.get("type") == "tool_result"
        if words and (is_result or block is None):
            told.append({**message, "content": words})
            words = []
        if is_result:
            told.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block)})
        elif block is not None:
            words.append(block)
    return told


def _result(block: Message) -> Any:
    """What a call brought; a model is told of an error in words."""
    content = block.get("content")
    if not block.get("is_error"):
        return content
    if isinstance(content, list):
        return [{"type": "text", "text": "Error: "}, *content]
    return f"Error: {content or ''}" if content is None or isinstance(content, str) else content


def _of_chat(message: Message) -> list[Message] | None:
    """One that has calls or a result, as before there were tools as well."""
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


# From messages of a chat.


def _as_items(message: Message) -> list[Message]:
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
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "content": [thought]})
    if message.get("content"):
        items.append({"role": message.get("role"), "content": message["content"]})
    return [*items, *({"type": "function_call", **_named(call, "call_id", "arguments")} for call in _calls(message))]


def _as_blocks(message: Message) -> list[Message]:
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
    calls = [{"type": "tool_use", **_named(call, "id", "input")} for call in _calls(message)]
    return [{"role": "assistant", "content": [*blocks, *calls]}]


def _calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    return [call for call in calls if isinstance(call, dict)]


def _named(call: Message, id_name: str, arguments_name: str) -> Message:
    """A call by the names that an API has; what it does not have is left out."""
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    arguments = function.get("arguments")
    named = {id_name: call.get("id"), "name": function.get("name")}
    return {**named, arguments_name: "{}" if arguments is None else arguments}

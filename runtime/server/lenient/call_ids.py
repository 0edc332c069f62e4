"""Add missing ids to tool calls and their results, which are paired by their order.

Knows JSON, not what is done with it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from .json_values import Object, each


@dataclass
class _Pairs:
    """Pairs of calls and results. A result without an id gets that of the first call without a result."""

    num_calls: int = 0
    waiting: deque[str] = field(default_factory=deque)  # ids of calls; those counted by `answered` are skipped
    unanswered: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget the calls so far."""
        for part in (self.waiting, self.unanswered, self.answered):
            part.clear()

    def call(self, call_id: Any) -> str:
        """Register a tool call, and return its id: its own, or a new one."""
        self.num_calls += 1
        known = call_id if isinstance(call_id, str) else f"call_{self.num_calls}"
        self.waiting.append(known)
        self.unanswered[known] += 1
        return known

    def result(self, call_id: Any) -> str:
        """Return the id of the call that a result belongs to; a new id if there is no call without a result."""
        if isinstance(call_id, str):
            if self.unanswered[call_id]:
                self.unanswered[call_id] -= 1
                self.answered[call_id] += 1
            return call_id
        while self.waiting:
            first = self.waiting.popleft()
            if not self.answered[first]:
                self.unanswered[first] -= 1
                return first
            self.answered[first] -= 1
        return f"call_{self.num_calls + 1}"


def chat_ids(value: Any, body: Object) -> Any:
    """Add missing ids in the messages of a chat."""
    pairs = _Pairs()

    def read(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") == "tool":
            return _with(message, "tool_call_id", pairs.result(message.get("tool_call_id")))
        if not isinstance(message.get("tool_calls"), list) or not message["tool_calls"]:
            return message
        pairs.clear()
        calls = each(
            message["tool_calls"],
            lambda call: _with(call, "id", pairs.call(call.get("id"))) if isinstance(call, dict) else call,
        )
        return _with(message, "tool_calls", calls)

    return each(value, read)


def response_ids(value: Any, body: Object) -> Any:
    """Add missing ids in the input items of a response."""
    pairs = _Pairs()

    def read(item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind in ("function_call", "custom_tool_call"):
            return _with(item, "call_id", pairs.call(item.get("call_id")))
        if kind in ("function_call_output", "custom_tool_call_output"):
            return _with(item, "call_id", pairs.result(item.get("call_id")))
        return item

    return each(value, read)


def message_ids(value: Any, body: Object) -> Any:
    """Add missing ids in the messages of Anthropic's API."""
    pairs = _Pairs()

    def read_block(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            return _with(block, "id", pairs.call(block.get("id")))
        return _with(block, "tool_use_id", pairs.result(block.get("tool_use_id"))) if kind == "tool_result" else block

    def read(message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        return _with(message, "content", each(content, read_block)) if isinstance(content, list) else message

    return each(value, read)


def _with(parent: Object, name: str, value: Any) -> Object:
    """Return the object with this value; the object itself if it has it already."""
    return parent if parent.get(name) is value else {**parent, name: value}

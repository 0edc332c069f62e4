"""Translate a conversation in Ollama's format into messages for a chat template.

Ollama's tool calls need no ids: results match calls by the name of the tool, or by their order. Most clients drop a
call's id or make one of their own, so a call is recognized by its content when it comes back. Knows which calls and
results belong together, not how a template writes them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec

from ...chat.reasoning_format import FIELD as REASONING_FIELD
from ...chat.tools.tool_calls import ToolCall
from ...errors import InvalidParameter
from ..request_fields import MAX_MESSAGES

_ANY = ("any", "")
_OWN_ID = re.compile("call_[0-9a-zA-Z]{24}")  # the form of this server's ids

Message = dict[str, object]


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] | str | None = None  # a text: the JSON of an object
    index: int | None = None  # ignored: its index in the reply


class CallOfHistory(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an earlier reply."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None  # `function`, from clients that also speak OpenAI's API
    index: int | None = None  # ignored: its index in the reply


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None  # of a reply
    images: list[Any] | None = None
    tool_calls: list[CallOfHistory] | None = None  # of a reply
    tool_name: str | None = None  # of a tool result
    tool_call_id: str | None = None  # of a tool result
    name: str | None = None

    def __post_init__(self) -> None:
        self.role = self.role.lower()
        if self.role not in _ROLES:
            raise ValueError(f"role is {self.role!r:.60}; use one of {', '.join(_ROLES)}")
        if self.images:
            raise ValueError("images is set; remove it: models read and write text only")
        for name in ("tool_calls", "thinking"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"{name} is set, and role is {self.role!r}; only assistant messages can have it")


_ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
OllamaMessages = Annotated[list[OllamaMessage], msgspec.Meta(max_length=MAX_MESSAGES)]


def for_template(messages: Sequence[OllamaMessage]) -> list[Message]:
    """Return the messages for a chat template. Each tool call has an id, and each result that of its call.

    Raises:
        InvalidParameter: the arguments of a call are not a JSON object.
    """
    calls, history = _Calls(), list[Message]()
    for place, message in enumerate(messages):
        entry: Message = {"role": _ROLES[message.role], "content": message.content or ""}
        if message.thinking:
            entry[REASONING_FIELD] = message.thinking
        if message.tool_calls:
            entry["tool_calls"] = calls.translate(message.tool_calls, f"messages[{place}].tool_calls")
        if message.role == "tool":
            entry["tool_call_id"] = calls.answer(message)
        name = message.tool_name or message.name
        history.append(entry if name is None else {**entry, "name": name})
    return history


def known_as(call: ToolCall) -> Iterable[ToolCall]:
    """Yield a tool call under each id that it may come back with: its own, and one derived from its content."""
    yield call
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return
    if isinstance(arguments, dict):
        yield ToolCall(_id_of(call.name, arguments), call.name, call.arguments)


@dataclass
class _Calls:
    """The tool calls of the last message that has any, without those that have a result."""

    num_results: int = 0
    _call_ids: dict[int, str] = field(default_factory=dict)  # by number
    _numbers: defaultdict[tuple[str, str], deque[int]] = field(default_factory=lambda: defaultdict(deque))

    def translate(self, calls: Iterable[CallOfHistory], field: str) -> list[Message]:
        """Return the tool calls of one message as chat templates expect them: with an id, and arguments as JSON text.

        Later results are matched with these calls only, by id or name.

        Args:
            field: the path of the calls in the request, for errors.

        Raises:
            InvalidParameter: arguments are no JSON object, or nested too deeply.
        """
        self._call_ids.clear()
        self._numbers.clear()
        translated = list[Message]()
        for number, call in enumerate(calls):
            name, param = call.function.name, f"{field}[{number}].function.arguments"
            arguments = _parse_arguments(call.function, param)
            try:
                is_own = call.id is not None and _OWN_ID.fullmatch(call.id) is not None
                call_id = call.id if call.id is not None and is_own else _id_of(name, arguments)
                function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
            except RecursionError as error:
                raise InvalidParameter(f"{param} is nested too deep; send it flatter", param=param) from error
            self._call_ids[number] = call_id
            for key in {("id", call.id or call_id), ("id", call_id), ("name", name), _ANY}:
                self._numbers[key].append(number)
            translated.append({"id": call_id, "type": "function", "function": function})
        return translated

    def answer(self, result: OllamaMessage) -> str:
        """Return the id of the call that a result names, or of the first call without a result."""
        self.num_results += 1
        wanted = [(kind, name) for kind, name in (("id", result.tool_call_id), ("name", result.tool_name)) if name]
        for key in wanted or [_ANY]:
            numbers = self._numbers[key]
            while numbers:
                call_id = self._call_ids.pop(numbers.popleft(), None)
                if call_id is not None:
                    return call_id
        return result.tool_call_id or f"result_{self.num_results}"


def _parse_arguments(function: CalledFunction, param: str) -> dict[str, Any]:
    """Return the arguments of a call as a dictionary: given as an object or as its JSON, none as an empty one.

    Raises:
        InvalidParameter: they are no JSON object; `param` names the field.
    """
    if isinstance(function.arguments, str):
        try:
            value = msgspec.json.decode(function.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            value = None
    else:
        value = function.arguments or {}
    if not isinstance(value, dict):
        raise InvalidParameter(f"{param} is {json.dumps(function.arguments):.60}; send an object", param=param)
    return value


def _id_of(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the id shared by all calls of a tool with equal arguments."""
    digest = sha256(json.dumps([name, arguments], sort_keys=True).encode()).hexdigest()
    return f"call_{digest[:24]}"

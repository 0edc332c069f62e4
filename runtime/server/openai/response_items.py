"""The items of a Responses input, and their translation into messages for a chat template.

A reply comes back as several items: reasoning, text and tool calls. They are joined to one message again, so that the
prompt matches the cached one. Knows formats, not which tools there are.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from ...chat.reasoning_format import FIELD as REASONING_FIELD
from ...errors import InvalidParameter
from ..errors import HTTPError
from ..field_policy import IgnoredFields
from ..unread_parts import ADVICE, note
from .response_tools import full_name

_SEAL = "radixlm:"  # prefix of `encrypted_content` made by this server


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item. Parts of earlier replies have the fields of a reply, too."""

    type: Literal[
        "input_text",
        "output_text",
        "summary_text",
        "reasoning_text",
        "text",
        "refusal",
        "input_image",
        "input_file",
    ]
    text: str | None = None  # None for an image, a file or a refusal
    refusal: str | None = None  # an earlier reply's refusal to answer
    annotations: list[Any] | None = None
    logprobs: list[msgspec.Raw] | None = None
    parsed: Any = None  # OpenAI's client adds it to what it streamed
    image_url: Any = None  # of an image or a file, as the next five; ignored
    detail: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None
    filename: Any = None

    def __post_init__(self) -> None:
        if self.is_unread:
            return
        if self.own_text is None:
            name = "refusal" if self.type == "refusal" else "text"
            raise ValueError(f"a part of the type {self.type!r} needs {name}; it is missing or null")
        for name in ("image_url", "detail", "file_id", "file_url", "file_data", "filename"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is set, and the part has the type {self.type!r}: leave it out")

    @property
    def is_unread(self) -> bool:
        """Return whether models cannot read the part."""
        return self.type in _UNREAD

    @property
    def own_text(self) -> str | None:
        """Its text, or None."""
        return self.refusal if self.type == "refusal" else self.text

    @property
    def template_text(self) -> str:
        """Its text, or the note that replaces it in a tool result."""
        return note(_UNREAD[self.type]) if self.is_unread else self.own_text or ""


_UNREAD = {"input_image": "image", "input_file": "document"}

Content = str | list[InputPart]


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message, reasoning, a tool call or its result. Items of a reply may be sent back unchanged."""

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None  # of a message
    content: Content | None = None  # of a message, or of reasoning
    summary: list[InputPart] | None = None  # of reasoning; ignored
    encrypted_content: str | None = None  # reasoning in the form that this server returned
    call_id: str | None = None  # of calls and results
    name: str | None = None  # of calls, as the next three
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | None = None  # of results
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] | None = None
    phase: str | None = None
    parsed_arguments: Any = None  # added by OpenAI's client; ignored
    success: bool | None = None  # added by Codex; ignored

    def __post_init__(self) -> None:
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of the type {self.type!r} needs {name}; it is missing or null")

    @property
    def reasoning_text(self) -> str | None:
        """The text of a reasoning item; None if it has none that this server can read."""
        return _text(self.content) or opened(self.encrypted_content)

    def call(self) -> dict[str, object]:
        """Return a tool call for chat templates, with its arguments as text."""
        arguments = self.arguments or "{}"
        if self.type == "custom_tool_call":
            arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        function = {"name": full_name(self.name or "", self.namespace), "arguments": arguments}
        return {"id": self.call_id, "type": "function", "function": function}


_NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
KINDS = frozenset(_NEEDED)

FOREIGN_KINDS: Final = frozenset((
    *("web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call"),
    *("image_generation_call", "tool_search_call", "tool_search_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_call"),
    *("mcp_approval_request", "mcp_approval_response", "compaction", "compaction_summary", "ghost_snapshot", "other"),
))  # fmt: skip
"""Item types of OpenAI's servers and of Codex: tools run by them, summaries that only they can read, and notes.

They occur in histories that began elsewhere, and are sent again with every request."""

_NOTHING: Final = {"type": "reasoning"}  # replaces such an item, so that the others keep their indices


@dataclass
class History:
    """Messages for a chat template, each with the indices (`places`) of its items in the input."""

    messages: list[dict[str, object]] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # names of images and files in tool results, replaced by a note
    _is_open: bool = False  # the last message is a reply that the next item may extend

    @classmethod
    def of(cls, items: Sequence[InputItem], *, first: int = 0) -> History:
        """Translate items into messages. The first item has the index `first`.

        Raises:
            InvalidParameter: a message has an image or a file.
        """
        history = cls()
        for place, item in enumerate(items, start=first):
            history._add(place, item)
        return history

    def _add(self, place: int, item: InputItem) -> None:
        """Translate an item of the input to a message, or add it to the open assistant message.

        Raises:
            InvalidParameter: a part is not supported; `place` is the item's index in the input.
        """
        for number, part in enumerate(item.content if isinstance(item.content, list) else ()):
            if part.is_unread:
                param = f"input[{place}].content[{number}]"
                raise InvalidParameter(f"{param}: a part of the type {part.type!r} {ADVICE}", param=param)
        match item.type:
            case "reasoning":
                if item.reasoning_text:
                    self._assistant(place, {"content", "tool_calls", REASONING_FIELD})[REASONING_FIELD] = (
                        item.reasoning_text
                    )
            case "function_call" | "custom_tool_call":
                calls = self._assistant(place, set()).setdefault("tool_calls", [])
                assert isinstance(calls, list)
                calls.append(item.call())
            case "function_call_output" | "custom_tool_call_output":
                result: dict[str, object] = {
                    "role": "tool",
                    "content": _text(item.output),
                    "tool_call_id": item.call_id,
                }
                self._begin(place, result, is_open=False)
                parts = item.output if isinstance(item.output, list) else ()
                self.unread |= {f"input.output.{part.type}" for part in parts if part.is_unread}
            case "message" if item.role == "assistant":
                self._assistant(place, {"content", "tool_calls"})["content"] = _text(item.content)
            case "message":
                role = "system" if item.role == "developer" else item.role
                self._begin(place, {"role": role, "content": _text(item.content)}, is_open=False)

    def _assistant(self, place: int, later_fields: set[str]) -> dict[str, object]:
        """Return the assistant message of an item: the last one, or a new one if that has any of `later_fields`."""
        if not self._is_open or any(self.messages[-1].get(key) for key in later_fields):
            self._begin(place, {"role": "assistant", "content": ""}, is_open=True)
        else:
            self.places[-1].append(place)
        return self.messages[-1]

    def _begin(self, place: int, message: dict[str, object], *, is_open: bool) -> None:
        """Append a message; an open one gets the following assistant items."""
        self.messages.append(message)
        self.places.append([place])
        self._is_open = is_open


def sealed(reasoning: str) -> str:
    """Return reasoning encoded for `encrypted_content`.

    Clients of a server that stores nothing send this field back, but drop readable reasoning.

    >>> opened(sealed("Hm."))
    'Hm.'
    """
    return _SEAL + base64.b64encode(reasoning.encode(errors="surrogatepass")).decode()


def opened(content: str | None) -> str | None:
    """Return the reasoning in `encrypted_content`; None if this server did not encode it."""
    if content is None or not content.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return None


def _text(content: Content | None) -> str:
    return content if isinstance(content, str) else "".join(part.template_text for part in content or ())


def leave_out_foreign(body: Any, ignored: IgnoredFields, *, is_strict: bool) -> None:
    """Remove items of other servers and clients' private items from a body, and list them: `input.web_search_call`.

    Raises:
        HTTPError: 400 if an item refers to a stored one, or if `IgnoredFields.ignore` refuses its type.
    """
    items = body.get("input") if isinstance(body, dict) else None
    if not isinstance(items, list):
        return
    for place, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "item_reference":
            param = f"input[{place}]"
            message = f"{param} is an item_reference, which is not supported; send the item itself"
            raise HTTPError(400, message, param=param)
        if is_strict or not isinstance(kind, str) or kind in KINDS:
            continue  # decoding may refuse it
        if kind in FOREIGN_KINDS:
            ignored.harmless.add(f"input.{kind}")
        else:
            ignored.ignore(f"input.{kind}", item, KINDS)
        items[place] = dict(_NOTHING)

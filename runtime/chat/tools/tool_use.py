"""The tools that a request offers, and those of them that the model can call.

Knows tools, not the fields of any API: the caller names its field for a tool's parameters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ...errors import InvalidParameter
from ..grammar import Grammar
from .tool_calls import ToolCall, ToolCallReader
from .tool_enforcement import ToolEnforcement
from .tool_format import Tool, ToolChoice, ToolFormat
from .tool_grammar import MAX_CALLS


@dataclass(frozen=True)
class ToolUse:
    """The tools that a request offers, and those of them that the model can call."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    choice: ToolChoice
    is_parallel: bool

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        choice: ToolChoice,
        chosen: str | None = None,
        *,
        is_parallel: bool,
        parameters_field: Callable[[int], str],
    ) -> Self:
        """Return the tools of a request, and those that can be called, after validation.

        Args:
            chosen: the name of the one tool that must be called; None: `choice` decides.
            parameters_field: returns the API field with the parameters of the tool at an index in `tools`.

        Raises:
            InvalidParameter: a tool is defined twice, or is strict and its parameters are no object; the chosen one is
                missing, or a call is required and there are no tools.
        """
        for index, tool in enumerate(tools):
            kind = tool.parameters.get("type", "object")
            if tool.is_strict and kind not in ("object", ["object"]):
                param, said = parameters_field(index), json.dumps(kind)
                message = f'{param} has the type {said:.80}; arguments are an object: send "object", or no type'
                raise InvalidParameter(message, param=param)
        names = [tool.name for tool in tools]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise InvalidParameter(f"tools has {twice!r} twice; give each function a name of its own")
        if not tools and (chosen is not None or choice not in ("auto", "none")):
            raise InvalidParameter("tool_choice is set, tools is not; send tools, or leave tool_choice out")
        if chosen is None:
            return cls(tuple(tools), tuple(tools) if choice != "none" else (), choice, is_parallel)
        called = tuple(tool for tool in tools if tool.name == chosen)
        if not called:
            raise InvalidParameter(f"tool_choice names {chosen!r:.80}; tools has {', '.join(names)}")
        return cls(tuple(tools), called, "required", is_parallel=False)

    def limited_to(self, names: Collection[str]) -> Self:
        """Return a copy in which only the tools of these names can be called.

        Raises:
            InvalidParameter: there is none of them.
        """
        called = tuple(tool for tool in self.callable if tool.name in names)
        if not called:
            known, allowed = ", ".join(tool.name for tool in self.tools), ", ".join(sorted(names))
            message = f"tool_choice is for {allowed!r:.80}, of which tools has none; it has {known:.800}"
            raise InvalidParameter(message, param="tool_choice")
        return replace(self, callable=called)

    def held(
        self, format: ToolFormat, content: Grammar | None, parameters_field: Callable[[int], str]
    ) -> ToolEnforcement:
        """Return a reply's `ToolEnforcement`: its grammar with calls of these tools, and ways to reduce that.

        Args:
            content: a JSON schema for replies without calls; None: any text.
            parameters_field: as in `of`.

        Raises:
            InvalidParameter: `content` is of another kind than a JSON schema, or strict schemas cannot be
                enforced.
            InvalidGrammar: `content` is not a JSON object.
        """
        if content is not None and content.kind != "json_schema":
            raise InvalidParameter(f"tools and a {content.noun} for the reply are both set; send one of them")
        return ToolEnforcement(
            format,
            self.callable,
            self.choice,
            is_parallel=self.is_parallel,
            content=content,
            field_of=lambda place: parameters_field(self.tools.index(self.callable[place])),
        )

    def reader(
        self, format: ToolFormat, note: Callable[[ToolCall], None] | None = None, *, has_schema: bool = False
    ) -> ToolCallReader | None:
        """Return a reader of the calls in a reply, which reports them to `note`; None if there can be none.

        Args:
            has_schema: whether a reply without calls follows a schema: then all JSON is such a reply.
        """
        if not self.callable:
            return None
        schemas = {tool.name: tool.parameters for tool in self.callable}
        most = MAX_CALLS if self.is_parallel and format.separator is not None else 1
        return ToolCallReader(
            format, list(schemas), schemas=schemas, max_bare_calls=0 if has_schema else most, note=note
        )

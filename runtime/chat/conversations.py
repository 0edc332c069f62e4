"""Render conversations for a model's template: tools, reasoning and turns, each in the form that it expects.

What a template supports is found by rendering short conversations. Knows messages and a template, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import cycle
from typing import Any, Final

from ..errors import EmptyPrompt, InvalidRequest
from .chat_template import ChatTemplate
from .reasoning import Reasoning
from .tools.tool_format import Tool, ToolFormat
from .tools.tool_messages import for_template
from .turns import SystemMessages, Turns

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WHOLE: Final = Tool("a", {"type": "object", "properties": {}}, description="b")
_ASKED: Final = ({"role": "user", "content": "c"},)


class Conversations:
    """Renders the conversations of one model.

    Args:
        name: name of the model, for errors.
        template: None if the model has none that can be used; `fault` says why.
        tool_format: returns the format in which the model writes tool calls.
        template_kwargs: default variables of the template; a conversation can override them.
    """

    def __init__(
        self,
        name: str,
        template: ChatTemplate | None,
        fault: str | None,
        reasoning: Reasoning,
        *,
        tool_format: Callable[[], ToolFormat],
        template_kwargs: Mapping[str, object],
    ) -> None:
        self._name, self._template, self._fault, self._reasoning = name, template, fault, reasoning
        self._tool_format, self._template_kwargs = tool_format, dict(template_kwargs)
        self._system_messages, self._turns = SystemMessages(template), Turns(template)
        self._tools = ToolDefinitions(template)

    def values(
        self, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, object] | None
    ) -> tuple[Sequence[Message], Sequence[Message], Mapping[str, object]]:
        """Return messages, tools and variables in the form that the template expects; arguments of calls are objects.

        Raises:
            EmptyPrompt: there are no messages.
            InvalidRequest: a message is invalid, its role is unknown, or the template has no place for it.
        """
        if not messages:
            raise EmptyPrompt("the conversation has no messages; send at least one")
        for message in messages:
            if not isinstance(message, Mapping):
                raise InvalidRequest(f"a message is {message!r:.60}; it must be a mapping with a role and a content")
            if message.get("role") not in ROLES:
                raise InvalidRequest(f"a message's role is {message.get('role')!r:.60}; use one of {', '.join(ROLES)}")
        kwargs = {**self._template_kwargs, **(template_kwargs or {})}
        if not tools and _is_plain(messages):
            return messages, (), kwargs
        told, known = for_template(messages, self._tools.for_template(tools), self._tool_format())
        turns = self._turns.for_template(self._system_messages.for_template(told))
        return self._reasoning.for_template(turns), known, kwargs

    def rendered(self, told: Sequence[Message], known: Sequence[Message], kwargs: Mapping[str, object]) -> str:
        """Return the text of a conversation as the template writes it, with the generation prompt.

        Args:
            told, known, kwargs: the messages, tools and variables that `values` returned.

        Raises:
            InvalidRequest: there is no usable template, or it refuses the messages.
        """
        if self._fault is not None:
            raise InvalidRequest(f"model {self._name} answers completions, and no conversations: {self._fault}")
        if self._template is None:
            raise InvalidRequest(
                f"model {self._name} has no chat template: it answers completions (/v1/completions, generate), and no "
                "conversations; ask for those, or serve a model that was tuned for chat"
            )
        return self._template.render(told, tools=known, kwargs=kwargs)


def _is_plain(messages: Sequence[Message]) -> bool:
    """Return whether user and assistant alternate, and messages have only texts: every template renders these.

    >>> _is_plain([{"role": "user", "content": "Hi"}]), _is_plain([{"role": "system", "content": "Be brief."}])
    (True, False)
    """
    return all(
        message.keys() == {"role", "content"}
        and message["role"] == role
        and isinstance(message["content"], str)
        and (message["content"] or role == "user")
        for message, role in zip(messages, cycle(("user", "assistant")), strict=False)
    )


class ToolDefinitions:
    """Prepares tool definitions for a chat template: with the fields that it reads, though a client may leave them out.

    A description and a schema's properties are optional, and some published templates fail without them:
    gpt-oss's, Hermes' and Muse Glimmer's without a description, Seed-OSS's without properties. These get empty ones.
    Null is left out, and so are properties that are a list, which languages write that do not distinguish empty lists
    and mappings. Other templates get the tools unchanged. For any thread; the template is tried when that is first
    needed.

    Args:
        template: None if the model has none.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    def for_template(self, tools: Sequence[Tool]) -> list[Mapping[str, object]]:
        """Return the tools, with the fields that the template requires.

        >>> template = ChatTemplate("{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}")
        >>> ToolDefinitions(template).for_template([Tool("now", {"type": "object"})])[0]["function"]
        {'name': 'now', 'description': '', 'parameters': {'type': 'object'}}
        """
        return [self._fill_in(tool).for_template() for tool in tools]

    def _fill_in(self, tool: Tool) -> Tool:
        """Return a tool with the optional fields that the template reads, empty if missing, and without null fields."""
        if tool.description is None and self._reads_descriptions:
            tool = replace(tool, description="")
        asked = {key: value for key, value in tool.parameters.items() if value is not None}
        if not isinstance(asked.get("properties", {}), Mapping):
            del asked["properties"]
        if len(asked) < len(tool.parameters):
            tool = replace(tool, parameters=asked)
        if "properties" not in tool.parameters and self._reads_properties:
            tool = replace(tool, parameters={**tool.parameters, "properties": {}})
        return tool

    @cached_property
    def _reads_descriptions(self) -> bool:
        return not self._renders_with(replace(_WHOLE, description=None)) and self._renders_with(
            replace(_WHOLE, description="")
        )

    @cached_property
    def _reads_properties(self) -> bool:
        return not self._renders_with(replace(_WHOLE, parameters={"type": "object"})) and self._renders_with(_WHOLE)

    def _renders_with(self, tool: Tool) -> bool:
        """Return whether the template renders a conversation with this tool; True if there is no template."""
        if self._template is None:
            return True
        try:
            self._template.render(_ASKED, tools=[tool.for_template()])
        except InvalidRequest:
            return False
        return True

"""Render conversations as a model's template wants them: tools, thoughts and turns each in their place.

Knows messages and a template, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import EmptyPrompt, InvalidRequest
from .chat_template import ChatTemplate
from .system_messages import SystemMessages
from .thoughts import Thoughts
from .tools.told_tools import ToldTools
from .tools.tool_format import Tool, ToolFormat
from .tools.tool_messages import for_template
from .turns import Turns

Message = Mapping[str, Any]


class Conversations:
    """The conversations of one model.

    Args:
        name: the model's, for errors.
        template: None if the model has none that can be used; `fault` says why.
        tool_format: how the model writes that it calls a tool.
        template_kwargs: variables of the template, where a conversation brings no others.
    """

    def __init__(
        self,
        name: str,
        template: ChatTemplate | None,
        fault: str | None,
        thoughts: Thoughts,
        *,
        tool_format: Callable[[], ToolFormat],
        template_kwargs: Mapping[str, object],
    ) -> None:
        self._name, self._template, self._fault, self._thoughts = name, template, fault, thoughts
        self._tool_format, self._template_kwargs = tool_format, dict(template_kwargs)
        self._system_messages, self._turns = SystemMessages(template), Turns(template)
        self._tools = ToldTools(template)

    def values(
        self, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, object] | None
    ) -> tuple[Sequence[Message], Sequence[Message], Mapping[str, object]]:
        """Messages, tools and further variables as the template wants them: the arguments of calls are no JSON any
        more.

        Raises:
            EmptyPrompt: there are no messages.
            InvalidRequest: a message is none, or the template has no place for it.
        """
        if not messages:
            raise EmptyPrompt("the conversation has no messages; send at least one")
        for message in messages:
            if not isinstance(message, Mapping):
                raise InvalidRequest(f"a message is {message!r:.60}; it must be a mapping with a role and a content")
        told, known = for_template(messages, self._tools.for_template(tools), self._tool_format())
        turns = self._turns.for_template(self._system_messages.for_template(told))
        return self._thoughts.for_template(turns), known, {**self._template_kwargs, **(template_kwargs or {})}

    def rendered(self, told: Sequence[Message], known: Sequence[Message], kwargs: Mapping[str, object]) -> str:
        """The text of `values`, and the generation prompt.

        Raises:
            InvalidRequest: there is no template that can be used, or it refuses the messages.
        """
        if self._fault is not None:
            raise InvalidRequest(f"model {self._name} answers completions, and no conversations: {self._fault}")
        if self._template is None:
            raise InvalidRequest(
                f"model {self._name} has no chat template: it answers completions (/v1/completions, generate), and no "
                "conversations; ask for those, or serve a model that was tuned for chat"
            )
        return self._template.render(told, tools=known, kwargs=kwargs)

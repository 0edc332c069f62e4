"""Tools as a chat template is told of them: with what it reads of each, though a client may leave it out.

A description and a schema's properties are optional, and some published templates fail where they are missing:
gpt-oss's, Hermes' and Muse Glimmer's without a description, Seed-OSS's without properties. These get empty ones. Null
is told as nothing, and so are properties that are a list, which languages write that have one word for both when empty.
Else templates get the tools as they came. Knows tools, not messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from ...errors import InvalidRequest
from ..chat_template import ChatTemplate
from .tool_format import Tool

_WHOLE: Final = Tool("a", {"type": "object", "properties": {}}, description="b")
_ASKED: Final = ({"role": "user", "content": "c"},)


class ToldTools:
    """The tools of conversations with one model; any thread may ask. The template is tried when that is first needed.

    Args:
        template: None if the model has none.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    def for_template(self, tools: Sequence[Tool]) -> list[Mapping[str, object]]:
        """The tools, with what the template cannot do without.

        >>> template = ChatTemplate("{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}")
        >>> ToldTools(template).for_template([Tool("now", {"type": "object"})])[0]["function"]
        {'name': 'now', 'description': '', 'parameters': {'type': 'object'}}
        """
        return [self._filled(tool).for_template() for tool in tools]

    def _filled(self, tool: Tool) -> Tool:
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
        return not self._takes(replace(_WHOLE, description=None)) and self._takes(replace(_WHOLE, description=""))

    @cached_property
    def _reads_properties(self) -> bool:
        return not self._takes(replace(_WHOLE, parameters={"type": "object"})) and self._takes(_WHOLE)

    def _takes(self, tool: Tool) -> bool:
        if self._template is None:
            return True
        try:
            self._template.render(_ASKED, tools=[tool.for_template()])
        except InvalidRequest:
            return False
        return True

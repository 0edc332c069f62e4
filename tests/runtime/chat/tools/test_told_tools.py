"""What a template reads of a tool is there, though the client left it out."""

from __future__ import annotations

import pytest
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.chat.conversations import ToolDefinitions
from radixlm.runtime.chat.tools.tool_format import Tool

BARE = Tool("now", {"type": "object"})
READS_DESCRIPTIONS = "{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}"
READS_PROPERTIES = "{% for tool in tools %}{{ tool.function.parameters.properties | items | list }}{% endfor %}"
READS_ALL = READS_DESCRIPTIONS + READS_PROPERTIES
READS_NOTHING = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize("source", [READS_DESCRIPTIONS, READS_PROPERTIES, READS_NOTHING, "no tools"])
def test_a_tool_without_a_description_or_properties_is_told_of(source: str) -> None:
    template = ChatTemplate(source)
    template.render([{"role": "user", "content": "a"}], tools=ToolDefinitions(template).for_template([BARE]))


@pytest.mark.parametrize("source", [READS_NOTHING, "no tools", "{{ 1 / 0 }}"])
def test_a_tool_is_told_of_as_it_came_where_that_is_enough_or_does_not_help(source: str) -> None:
    assert ToolDefinitions(ChatTemplate(source)).for_template([BARE]) == [BARE.for_template()]


@pytest.mark.parametrize("properties", [None, []])
def test_properties_that_are_none_are_told_as_such(properties: object) -> None:
    """The template failed on them, and the request with it."""
    odd = Tool("now", {"type": "object", "properties": properties, "required": None})
    for source in (READS_PROPERTIES, READS_NOTHING):
        template = ChatTemplate(source)
        told = ToolDefinitions(template).for_template([odd])
        assert template.render([{"role": "user", "content": "a"}], tools=told)
        assert told[0]["function"]["parameters"].get("properties", {}) == {}  # type: ignore[index]


def test_what_a_client_says_of_a_tool_is_kept() -> None:
    said = Tool("now", {"type": "object", "properties": {"a": {}}}, description="b")
    assert ToolDefinitions(ChatTemplate(READS_ALL)).for_template([said]) == [said.for_template()]

"""The grammar of a reply that may call tools: as much of their schemas as can be followed.

A tool that is strict is held to all of its schema, or the request is refused. Others let go of what cannot be followed,
or has no room. Knows tools and grammars; a caller says what its fields are called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ...errors import InvalidGrammar, InvalidParameter
from ..grammar import MAX_GRAMMAR_LENGTH, Grammar
from .schema_subset import Hold, Schema, followed, held, without_words
from .tool_format import Tool, ToolChoice, ToolFormat, tool_at

_NEXT: dict[Hold, Hold] = {"schema": "outline", "outline": "object"}
_MAX_TRIES = 6  # of grammars; the last asks for no more than objects, but of strict tools


def relaxed(content: Grammar) -> list[tuple[Grammar, bool]]:
    """What a reply may be held to in place of a grammar, most first, and whether that is all of it.

    Of a schema that is not strict it is what can be followed, and then any JSON. All others are themselves alone.

    Raises:
        InvalidGrammar: it is strict, and no value with an end fits it.
    """
    if content.kind != "json_schema":
        return [(content, True)]
    try:
        schema = content.schema()
    except InvalidGrammar:  # what compiles it says why
        return [(content, True)]
    if content.is_strict:
        return [(Grammar.json_schema(without_words(schema)), True)]
    found, is_whole = followed(schema)
    least = {"type": "object"} if found.get("type") == "object" else {}
    return [(Grammar.json_schema(found, is_strict=False), is_whole), (Grammar.json_schema(least), False)]


class ToolEnforcement:
    """The tools that one reply may call.

    Args:
        content: a JSON schema for replies that are no call; None: any text.
        field_of: the name of the field that has the parameters of the tool at a place in `tools`.

    Attributes:
        grammar: what the reply must keep to; None: nothing.

    Raises:
        InvalidParameter: strict tools cannot be held to their schemas, or there is no room for their names.
        InvalidGrammar: `content` is not a JSON object.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        is_parallel: bool,
        content: Grammar | None,
        field_of: Callable[[int], str],
    ) -> None:
        if content is not None:
            content.schema()  # first: what is wrong with it is no fault of the tools
        self._format, self._tools, self._field_of = format, tools, field_of
        self._grammar_of = partial(format.grammar, choice=choice, is_parallel=is_parallel, content=content)
        self._holds: list[Hold] = ["schema"] * len(tools)
        self._schemas: dict[tuple[int, Hold], tuple[Schema, bool]] = {}
        self._num_tries = 1
        self.grammar = self._fitting(MAX_GRAMMAR_LENGTH)

    @property
    def loose(self) -> list[int]:
        """The places of tools whose calls may be more than their schemas allow."""
        return [place for place, hold in enumerate(self._holds) if not self._asked(place, hold)[1]]

    def loosen(self, error: InvalidGrammar) -> None:
        """Make a grammar that asks for less, after the last one could not be used.

        Args:
            error: says why, and which line of the grammar is to blame, if one is.

        Raises:
            InvalidParameter: that is of a strict tool, or there is nothing to let go of.
            InvalidGrammar: `error` itself, if it is not about tools.
        """
        if self.grammar is None or self.grammar.kind != "lark":
            raise error
        place = None if error.line is None else tool_at(self.grammar, error.line)
        if place is None and error.line is not None:  # of what is no call
            raise error
        loosenable, most = self._loosenable(), MAX_GRAMMAR_LENGTH
        if not loosenable or (place is not None and place not in loosenable):
            raise self._refusal(error, place) from error
        self._num_tries += 1
        if self._num_tries == _MAX_TRIES or (place is None and self._num_tries > 2):
            self._holds = self._without(loosenable)
        elif place is None:  # it is too much work
            most = len(self.grammar.text) // 2
        else:
            self._holds[place] = _NEXT[self._holds[place]]
        self.grammar = self._fitting(most)

    def _loosenable(self) -> list[int]:
        """The places of tools that are held to something and need not be."""
        return [at for at, tool in enumerate(self._tools) if not tool.is_strict and self._holds[at] != "object"]

    def _without(self, places: Collection[int]) -> list[Hold]:
        """What is held to what, where these tools are held to no more than an object."""
        return ["object" if place in places else hold for place, hold in enumerate(self._holds)]

    def _fitting(self, most: int) -> Grammar | None:
        """The grammar; where it has more characters than that, without the longest schemas, as few of them as may be.

        Raises:
            InvalidParameter: the schemas of strict tools have no room, or cannot be followed.
        """
        with suppress(InvalidGrammar):
            found = self._made()
            if found is None or len(found.text) <= most:
                return found
        lengths = {place: self._length(place) for place in self._loosenable()}
        kept, self._holds = self._holds, self._without(lengths.keys())
        try:
            found = self._made()
        except InvalidGrammar as error:
            raise self._refusal(error, self._unfollowed()) from error
        room = most - (0 if found is None else len(found.text)) - 2 * len(self._tools)  # they have longer numbers
        for place in sorted(lengths, key=lengths.__getitem__):
            room -= lengths[place]
            if room >= 0:
                self._holds[place] = kept[place]
        return self._made()

    def _made(self) -> Grammar | None:
        asked = [self._asked(place, hold)[0] for place, hold in enumerate(self._holds)]
        tools = [replace(tool, parameters=each) for tool, each in zip(self._tools, asked, strict=True)]
        return self._grammar_of(tools)

    def _asked(self, place: int, hold: Hold) -> tuple[Schema, bool]:
        """What arguments are held to, and whether that is their schema."""
        if (place, hold) not in self._schemas:
            tool = self._tools[place]
            try:
                asked = (without_words(tool.parameters), True) if tool.is_strict else held(tool.parameters, hold)
            except InvalidGrammar as error:
                raise self._refusal(error, place) from error
            self._schemas[place, hold] = asked
        return self._schemas[place, hold]

    def _length(self, place: int) -> int:
        tool = replace(self._tools[place], parameters=self._asked(place, self._holds[place])[0])
        try:
            return self._format.length_of_arguments(tool)
        except InvalidGrammar:  # it alone has no room
            return MAX_GRAMMAR_LENGTH + 1

    def _unfollowed(self) -> int | None:
        """The strict tool that is refused by itself, or the longest of them; None if there is none."""
        strict = [place for place, tool in enumerate(self._tools) if tool.is_strict]
        for place in strict:
            try:
                self._grammar_of([self._tools[place]])
            except InvalidGrammar:
                return place
        return max(strict, key=self._length, default=None)

    def _refusal(self, error: InvalidGrammar, place: int | None) -> InvalidParameter:
        param = self._field_of(0).partition("[")[0] if place is None else self._field_of(place)
        return InvalidParameter(f"{param}: {error}", param=param)

"""Build the grammar of a reply that can call tools, with as much of their schemas as can be enforced.

A strict tool is held to its whole schema, or the request is refused. Other schemas are reduced if they cannot be
enforced, or have no room. Knows tools and grammars; the caller names its API fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ...errors import InvalidGrammar, InvalidParameter
from ..grammar import MAX_GRAMMAR_LENGTH, Grammar
from .arguments import Schema
from .schema_subset import Enforcement, enforceable, enforceable_json, without_descriptions
from .tool_format import Tool, ToolChoice, ToolFormat, tool_at

_NEXT: dict[Enforcement, Enforcement] = {"schema": "outline", "outline": "object"}
_MAX_TRIES = 6  # of grammars; in the last one, only strict tools have more than an object


def relaxed(content: Grammar) -> list[tuple[Grammar, bool]]:
    """Return grammars that can replace this one, strictest first, and whether each enforces all of it.

    A schema that is not strict is reduced to its enforceable part, then to any JSON. Others have no alternative.

    Raises:
        InvalidGrammar: it is strict, and only an endless value fits it.
    """
    if content.kind != "json_schema":
        return [(content, True)]
    try:
        schema = content.schema()
    except InvalidGrammar:  # compiling it reports the error
        return [(content, True)]
    if content.is_strict:
        return [(Grammar.json_schema(without_descriptions(schema)), True)]
    found, is_whole = enforceable_json(schema)
    least = {"type": "object"} if found.get("type") == "object" else {}
    return [(Grammar.json_schema(found, is_strict=False), is_whole), (Grammar.json_schema(least), False)]


class ToolEnforcement:
    """The grammar of a reply that can call tools, and its reduction if it cannot be used.

    Args:
        content: a JSON schema for replies without calls; None: any text.
        field_of: returns the API field with the parameters of the tool at an index in `tools`.

    Attributes:
        grammar: the grammar of the reply; None: no constraint.

    Raises:
        InvalidParameter: strict schemas cannot be enforced, or there is no room for the tools' names.
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
            content.schema()  # first: an error in it is not the tools' fault
        self._format, self._tools, self._field_of = format, tools, field_of
        self._grammar_of = partial(format.grammar, choice=choice, is_parallel=is_parallel, content=content)
        self._levels: list[Enforcement] = ["schema"] * len(tools)
        self._schemas: dict[tuple[int, Enforcement], tuple[Schema, bool]] = {}
        self._num_tries = 1
        self.grammar = self._make_fitting(MAX_GRAMMAR_LENGTH)

    @property
    def loose(self) -> list[int]:
        """Indices of tools whose calls can be more than their schemas allow."""
        return [place for place, level in enumerate(self._levels) if not self._enforced_schema(place, level)[1]]

    def loosen(self, error: InvalidGrammar) -> None:
        """Replace the grammar by one that enforces less, because it could not be used.

        Args:
            error: the reason, and the line of the grammar that caused it, if known.

        Raises:
            InvalidParameter: a strict tool caused it, or nothing is left to reduce.
            InvalidGrammar: `error` itself, if it is not about tools.
        """
        if self.grammar is None or self.grammar.kind != "lark":
            raise error
        place = None if error.line is None else tool_at(self.grammar, error.line)
        if place is None and error.line is not None:  # a line that describes no call
            raise error
        loosenable, most = self._loosenable(), MAX_GRAMMAR_LENGTH
        if not loosenable or (place is not None and place not in loosenable):
            raise self._refusal(error, place) from error
        self._num_tries += 1
        if self._num_tries == _MAX_TRIES or (place is None and self._num_tries > 2):
            self._levels = self._without(loosenable)
        elif place is None:  # the grammar is too much work
            most = len(self.grammar.text) // 2
        else:
            self._levels[place] = _NEXT[self._levels[place]]
        self.grammar = self._make_fitting(most)

    def _loosenable(self) -> list[int]:
        """Return the indices of tools that are not strict, and whose schemas can be reduced further."""
        return [at for at, tool in enumerate(self._tools) if not tool.is_strict and self._levels[at] != "object"]

    def _without(self, places: Collection[int]) -> list[Enforcement]:
        """Return each tool's level of enforcement, with no more than an object for those at the indices `places`."""
        return ["object" if place in places else level for place, level in enumerate(self._levels)]

    def _make_fitting(self, most: int) -> Grammar | None:
        """Return a grammar of at most `most` characters, if reducing the longest schemas to any object achieves that.

        None for any text. Strict schemas are not reduced.

        Raises:
            InvalidParameter: the schemas of strict tools have no room, or cannot be enforced.
        """
        with suppress(InvalidGrammar):
            found = self._make_grammar()
            if found is None or len(found.text) <= most:
                return found
        lengths = {place: self._arguments_length(place) for place in self._loosenable()}
        kept, self._levels = self._levels, self._without(lengths.keys())
        try:
            found = self._make_grammar()
        except InvalidGrammar as error:
            raise self._refusal(error, self._find_refused()) from error
        room = most - (0 if found is None else len(found.text)) - 4 * len(self._tools)  # they have longer numbers
        for place in sorted(lengths, key=lengths.__getitem__):
            room -= lengths[place]
            if room >= 0:
                self._levels[place] = kept[place]
        return self._make_grammar()

    def _make_grammar(self) -> Grammar | None:
        """Return the reply's grammar for the present levels of enforcement, one level per tool; None for any text."""
        asked = [self._enforced_schema(place, level)[0] for place, level in enumerate(self._levels)]
        tools = [replace(tool, parameters=each) for tool, each in zip(self._tools, asked, strict=True)]
        return self._grammar_of(tools)

    def _enforced_schema(self, place: int, level: Enforcement) -> tuple[Schema, bool]:
        """Return the schema that a tool's calls must follow at a level, and whether that is its whole schema.

        Args:
            place: the tool's index.
            level: ignored if the tool is strict.

        Raises:
            InvalidParameter: the tool is strict, and its schema cannot be enforced.
        """
        if (place, level) not in self._schemas:
            tool = self._tools[place]
            try:
                if tool.is_strict:
                    asked = without_descriptions(tool.parameters), True
                else:
                    reduced, is_whole = enforceable(tool.parameters, level)
                    asked = reduced, is_whole and self._format.arguments.enforces(reduced)
            except InvalidGrammar as error:
                raise self._refusal(error, place) from error
            self._schemas[place, level] = asked
        return self._schemas[place, level]

    def _arguments_length(self, place: int) -> int:
        """Return the length in characters of the rules for a tool's arguments, at its present level of enforcement.

        If they are too long even alone, one more than `MAX_GRAMMAR_LENGTH`.
        """
        tool = replace(self._tools[place], parameters=self._enforced_schema(place, self._levels[place])[0])
        try:
            return self._format.length_of_arguments(tool)
        except InvalidGrammar:  # it has no room even alone
            return MAX_GRAMMAR_LENGTH + 1

    def _find_refused(self) -> int | None:
        """Return the index of a strict tool that is refused by itself, else of the longest strict one.

        None if no tool is strict.
        """
        strict = [place for place, tool in enumerate(self._tools) if tool.is_strict]
        for place in strict:
            try:
                self._grammar_of([self._tools[place]])
            except InvalidGrammar:
                return place
        return max(strict, key=self._arguments_length, default=None)

    def _refusal(self, error: InvalidGrammar, place: int | None) -> InvalidParameter:
        param = self._field_of(0).partition("[")[0] if place is None else self._field_of(place)
        return InvalidParameter(f"{param}: {error}", param=param)

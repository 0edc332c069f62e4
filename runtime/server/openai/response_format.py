"""Structured output fields: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

Knows fields, not how a grammar is enforced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any

import msgspec

from ...chat.grammar import Grammar
from ...errors import InvalidGrammar, InvalidParameter

Schema = dict[str, Any]
# In Python, `$` also matches before a final line end. JSON Schema has no other anchor for the end.
SchemaName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text: the default."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema. `strict` refuses one that cannot be enforced completely; others are enforced as far as possible."""

    name: SchemaName
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that matches a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's `structured_outputs`; at most one field may be set."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GuidedRequest(msgspec.Struct, kw_only=True):
    """The structured output fields of a request, of which at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's, as the others below
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None  # llama.cpp's GBNF, or Lark

    def grammar(self) -> Grammar | None:
        """Return the grammar of the reply; None for any text.

        Raises:
            InvalidParameter: several fields are set.
            InvalidGrammar: the grammar is too long.
        """
        if self._first_asked() is None:
            return None
        outputs = self.structured_outputs or StructuredOutputs()
        wishes = {
            "response_format": self._format_grammar(),
            "structured_outputs.json": _schema(outputs.json),
            "structured_outputs.regex": _text("regex", outputs.regex),
            "structured_outputs.choice": _choice(outputs.choice),
            "structured_outputs.grammar": _text("grammar", outputs.grammar),
            "structured_outputs.json_object": Grammar.json_object() if outputs.json_object else None,
            "guided_json": _schema(self.guided_json),
            "guided_regex": _text("regex", self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
            "guided_grammar": _text("grammar", self.guided_grammar),
        }
        found = {name: grammar for name, grammar in wishes.items() if grammar is not None}
        if len(found) > 1:
            raise InvalidParameter(f"{' and '.join(found)} are all set; send one of them")
        return next(iter(found.values()), None)

    def naming(self) -> AbstractContextManager[None]:
        """Return a context that names the request's field in errors about its grammar; see `named_grammar`."""
        return named_grammar(self._first_asked())

    def _first_asked(self) -> str | None:
        """Return the first field that restricts the text, or None."""
        for name in _FIELDS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, TextFormat):
                return name
        return None

    def _format_grammar(self) -> Grammar | None:
        """Return the grammar of `response_format`; None for plain text."""
        match self.response_format:
            case JsonObjectFormat():
                return Grammar.json_object()
            case JsonSchemaFormat(json_schema=JsonSchema(schema=None)):
                return Grammar.json_object()
            case JsonSchemaFormat(json_schema=JsonSchema(schema=schema, strict=strict)) if schema is not None:
                return Grammar.json_schema(schema, is_strict=bool(strict))
        return None


_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


@contextmanager
def named_grammar(param: str | None) -> Iterator[None]:
    """Turn InvalidGrammar into InvalidParameter with the field's name."""
    try:
        yield
    except InvalidGrammar as error:
        raise InvalidParameter(str(error), param=param) from error


def _schema(schema: Schema | str | None) -> Grammar | None:
    """Return the grammar of a JSON schema, given as an object or as text; None without one."""
    if schema is None:
        return None
    return Grammar.json_schema(Grammar("json_schema", schema).schema() if isinstance(schema, str) else schema)


def _text(kind: str, text: str | None) -> Grammar | None:
    return None if text is None else Grammar("regex" if kind == "regex" else "grammar", text)


def _choice(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else Grammar.choice(choices)

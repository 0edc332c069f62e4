"""The arguments of a call: the interface of all formats, and JSON.

Knows arguments, not the texts around them. Clients get arguments as JSON, whatever the model writes; `read_cut` reads
those of an incomplete call.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from ..scan import Scan
from .format_texts import Specials, json_expression

T = TypeVar("T")
Schema = Mapping[str, Any]
MAX_EXTRAS: Final = 32  # arguments that a schema allows and does not name, in grammars of ours
_HALF: Final = re.compile("[\ud800-\udfff]")
_MAX_FLOAT: Final = sys.float_info.max


def without_halves(text: str) -> str:
    """Return the text with U+FFFD in place of lone surrogates, which UTF-8 cannot encode.

    >>> without_halves("a\\ud83d")
    'a\ufffd'
    """
    return _HALF.sub("\ufffd", text)


def value_without_halves(value: T) -> T:
    """Return a copy of a decoded JSON value with U+FFFD in place of lone surrogates in its texts and names.

    Pairs of surrogates become one character.
    """
    copied: T = json.loads(without_halves(json.dumps(value, ensure_ascii=False)))
    return copied


class ArgumentStyle(Protocol):
    """A way to write arguments."""

    @property
    def opener(self) -> str:
        """The text that all arguments begin with, or that ends the call if there are none."""
        ...

    @property
    def texts(self) -> str:
        """All texts that it writes besides names and values: special tokens in them are text of the reply."""
        ...

    def written(self, arguments: str) -> str:
        """Return arguments, given as a JSON object, as a model writes them."""
        ...

    def reader(self, schema: Schema, ends: Sequence[str] = ()) -> ArgumentsReader:
        """Return a new reader that converts the arguments of one call to JSON.

        Args:
            schema: JSON schema of the arguments; empty if unknown.
            ends: tags, one of which follows the arguments; empty if none does.
        """
        ...

    def enforces(self, schema: Schema) -> bool:
        """Return whether rules can enforce all that describes the arguments, not only their `properties`."""
        ...

    def rules(self, name: str, schema: Schema, *, is_strict: bool, specials: Specials) -> list[str]:
        """Return whole grammar rules: the rule `name` for all arguments of a call, then the rules that it uses.

        The names of the others begin with `name` and a `_`, in capitals if they are terminals.

        Args:
            schema: JSON schema of the arguments.
            is_strict: the whole schema must be enforced.

        Raises:
            InvalidGrammar: the schema is strict, and cannot be enforced in this style.
        """
        ...


class ArgumentsReader(Scan[str, str], Protocol):
    """Converts the arguments of one call to JSON.

    At the end of a reply it also converts held-back text, as far as that is certain. Strings and brackets of incomplete
    arguments stay open.
    """

    @property
    def is_whole(self) -> bool:
        """Return whether the arguments are complete."""
        ...

    @property
    def rest(self) -> str:
        """The text after the arguments, once they are complete."""
        ...


class StepReader:
    """An `ArgumentsReader` that reads one element at a time, each once it is complete."""

    def __init__(self) -> None:
        self.rest = ""  # before the end: the text that is held back
        self.is_whole = False

    def push(self, text: str) -> str:
        """Take the next piece of text, and return the JSON of its complete elements; the rest is held back."""
        self.rest += text
        written = ""
        while not self.is_whole:
            piece, length = self._next(self.rest)
            written += piece
            self.rest = self.rest[length:]
            if not length:
                break
        return written

    def _next(self, held: str) -> tuple[str, int]:
        """Return the JSON of the next element of `held`, and the number of characters read: 0 if it needs more text."""
        raise NotImplementedError


class _JsonArguments:
    """A JSON object.

    Args:
        is_loose: a grammar allows any white space that JSON allows, else only that of templates.
    """

    opener: Final = "{"
    texts: Final = ""

    def __init__(self, *, is_loose: bool = False) -> None:
        self._is_loose = is_loose

    def written(self, arguments: str) -> str:
        return arguments

    def reader(self, schema: Schema, ends: Sequence[str] = ()) -> ArgumentsReader:
        return _JsonReader()

    def enforces(self, schema: Schema) -> bool:
        return True

    def rules(self, name: str, schema: Schema, *, is_strict: bool, specials: Specials) -> list[str]:
        rule = json_expression({"type": "object", **schema}, is_strict=is_strict, is_loose=self._is_loose)
        return [f"{name}: {rule}"]


JSON: Final[ArgumentStyle] = _JsonArguments()
LOOSE_JSON: Final[ArgumentStyle] = _JsonArguments(is_loose=True)
"""For calls without tags, because models write these like any JSON."""


class _JsonReader:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.rest = ""
        self.is_whole = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> str:
        num_characters = 0 if self.is_whole else self._length_in_object(text)
        self.rest += text[num_characters:]
        return text[:num_characters]

    def finish(self) -> str:
        return ""

    def _length_in_object(self, text: str) -> int:
        """Return the number of first characters of `text` that belong to the object: up to its closing brace, or all.

        Sets `is_whole` at the closing brace.
        """
        for at, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_whole = True
                    return at + 1
        return len(text)


def read_cut(text: str) -> dict[str, Any]:
    """Return a decoded JSON object, or the readable part of an incomplete one; `{}` if nothing is readable.

    It can be encoded again: it has no lone surrogates, and the largest floats in place of numbers above them.

    >>> read_cut('{"path": "a.py", "lines": [1, 2], "text": "x = \\\\"1')
    {'path': 'a.py', 'lines': [1, 2], 'text': 'x = "1'}
    """
    closers: list[str] = []
    is_in_text = is_escaped = False
    num_whole, closing = 0, "{}"  # length up to the last complete value, and the brackets that close it
    for place, letter in enumerate(text):
        if is_in_text:
            if is_escaped:
                is_escaped = False
            elif letter == "\\":
                is_escaped = True
            elif letter == '"':
                is_in_text = False
        elif letter == '"':
            is_in_text = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
            num_whole, closing = place + 1, "".join(reversed(closers))
        elif letter in "}]" and closers:
            closers.pop()
            num_whole, closing = place + 1, "".join(reversed(closers))
        elif letter == ",":
            num_whole, closing = place, "".join(reversed(closers))
    end = "".join(reversed(closers))
    candidates = [text[:num_whole] + closing]
    if is_in_text:
        candidates.insert(0, f'{text[:-1] if is_escaped else text}"{end}')
    elif text.endswith('"'):  # else a number or a word, which may be incomplete
        candidates.insert(0, text + end)
    for candidate in candidates:
        try:
            read = value_without_halves(json.loads(candidate, parse_float=_finite))
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            return read
    return {}


def _finite(text: str) -> float:
    """Return a number, or the largest float of its sign: JSON cannot say infinity, and replies would have null."""
    return max(-_MAX_FLOAT, min(float(text), _MAX_FLOAT))

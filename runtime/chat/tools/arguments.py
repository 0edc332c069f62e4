"""How a format writes the arguments of a call: what every way can do, and JSON.

Knows arguments, not the texts around them. Clients get arguments as JSON, whatever the model writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from .lark import Specials, json_rule

Schema = Mapping[str, Any]
MAX_EXTRAS: Final = 32  # arguments that a schema allows and does not name, where a format of ours has them
_HALF: Final = re.compile("[\ud800-\udfff]")


def without_halves(text: str) -> str:
    """A text with U+FFFD in place of halves of characters, which UTF-8 cannot write.

    >>> without_halves("a\\ud83d")
    'a\ufffd'
    """
    return _HALF.sub("\ufffd", text)


class ArgumentStyle(Protocol):
    """One way to write arguments."""

    @property
    def opener(self) -> str:
        """What all arguments begin with, or what ends the call where there are none."""
        ...

    @property
    def texts(self) -> str:
        """All that it writes beside names and values: special tokens in it are text of the reply."""
        ...

    def written(self, arguments: str) -> str:
        """Arguments, a JSON object, as a model writes them."""
        ...

    def reader(self, schema: Schema, ends: Sequence[str] = ()) -> ArgumentsReader:
        """Reads the arguments of one call, which fit a schema.

        Args:
            ends: tags of which one stands behind the arguments, if any does.
        """
        ...

    def rules(self, name: str, schema: Schema, *, is_strict: bool, specials: Specials) -> list[str]:
        """Rules of a grammar: the first is called `name`, and the names of the others begin with it and a `_`.

        Raises:
            InvalidGrammar: the schema is strict, and cannot be enforced in this way to write.
        """
        ...


class ArgumentsReader(Protocol):
    """Makes JSON of arguments that come in pieces."""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are complete."""
        ...

    def push(self, held: str) -> tuple[str, int]:
        """JSON of what is held, as far as it is certain, and how many characters of `held` that takes. What is left
        over is held again the next time.
        """
        ...

    def finish(self, held: str) -> str:
        """What JSON can be made of what is held where the reply was cut."""
        ...


class _JsonArguments:
    """A JSON object.

    Args:
        is_loose: a grammar allows any white space that JSON may have, else that which templates write.
    """

    opener: Final = "{"
    texts: Final = ""

    def __init__(self, *, is_loose: bool = False) -> None:
        self._is_loose = is_loose

    def written(self, arguments: str) -> str:
        return arguments

    def reader(self, schema: Schema, ends: Sequence[str] = ()) -> ArgumentsReader:
        return _JsonReader()

    def rules(self, name: str, schema: Schema, *, is_strict: bool, specials: Specials) -> list[str]:
        rule = json_rule({"type": "object", **schema}, is_strict=is_strict, is_loose=self._is_loose)
        return [f"{name}: {rule}"]


JSON: Final[ArgumentStyle] = _JsonArguments()
LOOSE_JSON: Final[ArgumentStyle] = _JsonArguments(is_loose=True)
"""For calls that have no tags: models write these as they write any JSON."""


class _JsonReader:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, held: str) -> tuple[str, int]:
        num_characters = self._num_of_object(held)
        return held[:num_characters], num_characters

    def finish(self, held: str) -> str:
        return held

    def _num_of_object(self, text: str) -> int:
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

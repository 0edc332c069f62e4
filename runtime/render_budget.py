"""What one rendering of a chat template may cost: characters that it makes, items that it goes through, time.

An operation is paid before its result exists where that may be much larger than what it is made of. Knows values, not
templates.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MAX_CHARACTERS = 1 << 27  # made in all, of which most are gone again; no memory holds more than was made
MAX_VALUE = 1 << 25  # characters and items in one value, with all that it refers to: one list may be in it often
MAX_SECONDS = 2.0  # of a processor, so that a busy machine takes away nothing
_ITEM = 64  # bytes or so that one item of a list has, in characters
_STEPS = 100  # between two looks at the time, which take as long as some steps
_MAX_BITS = 4096  # of an integer
# A placeholder as wide as a number of four digits, or as a value says.
_WIDE_PERCENT = re.compile(r"[%)][-+ #0-9.]*?(?:\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}:]*:[^{}]*?(?:\d{4}|\{)")


class TooCostly(Exception):
    """The template does more than it may."""


class RenderBudget:
    """Pays for one rendering. Every method may raise TooCostly.

    Args:
        clock: seconds that this thread has computed; only differences count.
    """

    def __init__(
        self,
        max_characters: int = MAX_CHARACTERS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._max_characters, self._left = max_characters, max_characters
        self._max_seconds, self._clock, self._began = max_seconds, clock, clock()
        self._steps = _STEPS

    def spend(self, num_characters: int) -> None:
        """Pay for one step, and what it makes."""
        self._left -= num_characters
        if self._left < 0:
            raise TooCostly(f"it makes more than {self._max_characters} characters on the way")
        self._steps -= 1
        if self._steps <= 0 or num_characters > MAX_VALUE >> 8:
            self._steps = _STEPS
            if self._clock() - self._began > self._max_seconds:
                raise TooCostly(f"it takes more than {self._max_seconds:g} s")

    def each(self, items: Iterable[object]) -> Iterator[object]:
        """The items, each of them paid when it is asked for."""
        for item in items:
            self.spend(1)
            yield item

    def value(self, made: object) -> object:
        """Pay for what an operation made, which may be written out, compared or sorted later."""
        if isinstance(made, str):
            self.spend(len(made))
        elif isinstance(made, list | tuple | dict | set | frozenset):
            self.spend(len(made) * _ITEM)
            self.weight(made)
        elif isinstance(made, int):
            self._integer(made.bit_length())
        return made

    def part(self, made: object) -> object:
        """Pay for a part of a value that was paid, which refers to nothing that the whole does not refer to."""
        self.spend(self._length(made))
        return made

    def text(self, made: object) -> str:
        """Pay for a value that is written out."""
        if not isinstance(made, str):
            self.spend(self.weight(made))
            made = str(made)
        self.spend(len(made))
        return made

    def weight(self, value: object) -> int:
        """About how many characters a value has when it is written out; what is in it twice counts twice."""
        weight, todo = 0, [value]
        while todo:
            self.spend(1)
            item = todo.pop()
            if isinstance(item, Mapping):
                weight += len(item) * 4
                todo += item
                todo += item.values()
            elif isinstance(item, list | tuple | set | frozenset):
                weight += len(item) * 2
                todo += item
            else:
                weight += len(item) if isinstance(item, str) else 8
            if weight > MAX_VALUE or len(todo) > MAX_VALUE // _ITEM:
                raise TooCostly(f"it makes a value of more than {MAX_VALUE} characters")
        return weight

    def binary(self, operator: str, left: object, right: object) -> None:
        """Pay for `left operator right`, as far as `value` does not."""
        if operator == "*" and isinstance(left, int) and not isinstance(right, int | float):
            left, right = right, left
        if operator == "*" and isinstance(right, int):
            if isinstance(left, int):
                self._integer(left.bit_length() + right.bit_length())
            else:
                self.spend(self._length(left) * max(right, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._integer(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            self.formatted(left, right, _WIDE_PERCENT)

    def formatted(self, pattern: str, values: object, wide: re.Pattern[str] = _WIDE_BRACES) -> None:
        """Pay for a text with placeholders."""
        if wide.search(pattern):
            raise TooCostly("it writes a value wider than 999 characters, or as wide as another value says")
        num_places = pattern.count("%" if wide is _WIDE_PERCENT else "{")
        self.spend(len(pattern) + num_places * (1000 + self.weight(values)))

    def method(self, owner: str, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Pay for a method of a text, or a filter of that name, as far as `value` does not."""
        given = [*args, *kwargs.values()]
        most = max((abs(each) for each in given if isinstance(each, int)), default=8)
        if name in ("center", "ljust", "rjust", "zfill"):
            self.spend(most)
        elif name == "expandtabs":
            self.spend(len(owner) * most)
        elif name == "replace" and len(given) > 1:
            num_places = owner.count(args[0]) if args and isinstance(args[0], str) else len(owner)
            self.spend((num_places + 1) * self.weight(given[1:] if args else given))
        elif name == "translate":
            self.spend(len(owner) * self.weight(given))
        elif name in ("split", "rsplit"):
            num_parts = owner.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(owner)
            limit = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
            self.spend(_ITEM * (min(num_parts, limit) if isinstance(limit, int) and limit >= 0 else num_parts))
        elif name == "splitlines":
            self.spend(_ITEM * len(owner))
        elif name == "join":
            self.spend(self.weight(given) + sum(len(owner) * len(each) for each in given if isinstance(each, list)))

    def _length(self, value: object) -> int:
        if isinstance(value, str):
            return len(value)
        return len(value) * _ITEM if isinstance(value, list | tuple | dict | set | frozenset) else 1

    def _integer(self, num_bits: int) -> None:
        self.spend(1)
        if num_bits > _MAX_BITS:
            raise TooCostly(f"it computes an integer of more than {_MAX_BITS} bits")

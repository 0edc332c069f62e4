"""Limit the cost of rendering a chat template: characters made, items visited, CPU time.

An operation is paid before it runs if its result can be much larger than its operands. Texts and lists that are made by
appending, and slices of lists, are paid back when the template drops them: a template that appends to one text a
thousand times makes a thousand texts and keeps one. The time limit covers the copying. Knows values, not templates.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MAX_CHARACTERS = 1 << 27  # made in total and not paid back, which limits the memory
MAX_VALUE = 1 << 25  # characters and items of one value when written out: it can contain one list many times
MAX_SECONDS = 2.0  # of CPU time, so that a busy machine makes no difference
_ITEM = 64  # price of a list item, in characters: about its bytes
_SHORT = 1024  # characters; shorter texts are not worth paying back
_STEPS = 100  # between two checks of the clock, which cost as much as some steps
_MAX_BITS = 4096  # of an integer
# A placeholder as wide as a number of four digits, or of a width given by a value.
_WIDE_PERCENT = re.compile(r"[%)][-+ #0-9.]*?(?:\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}:]*:[^{}]*?(?:\d{4}|\{)")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SPACES = (
    _LINE_ENDS + "\t\x1f \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)


class TooCostly(Exception):
    """An error of a template that exceeds its budget."""


class RenderBudget:
    """The budget of one template's rendering: characters that its operations make, and seconds of CPU time.

    To pay is to subtract from it. Every method can raise TooCostly, because the budget is spent.

    Args:
        clock: CPU time of this thread in seconds; only differences count.
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
        """Pay for one step and for the characters that it makes."""
        self._left -= num_characters
        if self._left < 0:
            raise TooCostly(f"it makes more than {self._max_characters} characters on the way")
        self._steps -= 1
        if self._steps <= 0 or num_characters > MAX_VALUE >> 8:
            self._steps = _STEPS
            if self._clock() - self._began > self._max_seconds:
                raise TooCostly(f"it takes more than {self._max_seconds:g} s")

    def afford(self, num_characters: int) -> None:
        """Raise TooCostly for an amount that exceeds the budget; pay nothing otherwise."""
        if num_characters > self._left:
            self.spend(num_characters)

    def pay_back(self, num_characters: int) -> None:
        """Refund characters that the template has dropped."""
        self._left += num_characters

    def each(self, items: Iterable[object]) -> Iterator[object]:
        """Yield the items; each is paid when it is taken."""
        for item in items:
            self.spend(1)
            yield item

    def value(self, made: object) -> object:
        """Pay for the result of an operation by its size, because it may be written out or compared; return it."""
        if isinstance(made, str):
            self.spend(len(made))
        elif isinstance(made, list | tuple | dict | set | frozenset):
            self.spend(len(made) * _ITEM)
            self.weight(made)
        elif isinstance(made, int):
            self._pay_integer(made.bit_length())
        return made

    def part(self, made: object) -> object:
        """Pay for a slice of a value, and return it. The content of the slice was paid with the whole value."""
        self.spend(self._copy_cost(made))
        if type(made) is not list:
            return made
        part = _KeptList(made)
        part._budget, part._to_pay_back = self, len(made) * _ITEM
        return part

    def joined_texts(self, texts: Sequence[str]) -> str:
        """Join texts, and pay. The price of the longest piece is refunded when the joined text is dropped."""
        length = sum(map(len, texts))
        if length > MAX_VALUE:
            raise _too_large()
        self.spend(length)
        if length < _SHORT:
            return "".join(texts)
        joined = _KeptText("".join(texts))
        joined._budget, joined._to_pay_back = self, max(map(len, texts))
        return joined

    def joined_lists(self, left: list[object], right: list[object]) -> list[object]:
        """Join two lists, and pay. A list that was made here is not weighed again."""
        length = (len(left) + len(right)) * _ITEM
        weight = self.weight(left) + self.weight(right)
        if max(length, weight) > MAX_VALUE:
            raise _too_large()
        self.spend(length)
        joined = _KeptList(left)
        joined += right
        joined._weight, joined._budget, joined._to_pay_back = weight, self, max(len(left), len(right)) * _ITEM
        return joined

    def text(self, made: object) -> str:
        """Return a value as the text that the template writes, and pay for its characters."""
        if not isinstance(made, str):
            self.spend(self.weight(made))
            made = str(made)
        self.spend(len(made))
        return made

    def weight(self, value: object) -> int:
        """Return about how many characters a value has when written out. Repeated parts count each time."""
        weight, todo = 0, [value]
        while todo:
            self.spend(1)
            item = todo.pop()
            if isinstance(item, _KeptList) and item._weight is not None:
                weight += item._weight
            elif isinstance(item, Mapping):
                weight += len(item) * 4
                todo += item
                todo += item.values()
            elif isinstance(item, list | tuple | set | frozenset):
                weight += len(item) * 2
                todo += item
            else:
                weight += len(item) if isinstance(item, str) else 8
            if weight > MAX_VALUE or len(todo) > MAX_VALUE // _ITEM:
                raise _too_large()
        if isinstance(value, _KeptList):
            value._weight = weight
        return weight

    def binary(self, operator: str, left: object, right: object) -> None:
        """Pay for the part of `left operator right` that `value` does not cover."""
        if operator == "*" and isinstance(left, int) and not isinstance(right, int | float):
            left, right = right, left
        if operator == "*" and isinstance(right, int):
            if isinstance(left, int):
                self._pay_integer(left.bit_length() + right.bit_length())
            elif isinstance(left, str | list | tuple):
                self.spend(self._copy_cost(left) * max(right, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._pay_integer(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            self.formatted(left, right, _WIDE_PERCENT)

    def formatted(self, pattern: str, values: object, wide: re.Pattern[str] = _WIDE_BRACES) -> None:
        """Pay for the text that `pattern` gives with values in its placeholders, before it is made."""
        if wide.search(pattern):
            raise TooCostly("it writes a value wider than 999 characters, or as wide as another value says")
        num_places = pattern.count("%" if wide is _WIDE_PERCENT else "{")
        self.spend(len(pattern) + num_places * (1000 + self.weight(values)))

    def method(self, owner: str, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Pay for the part of a text's method, or of the filter of that name, that `value` does not cover."""
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
        elif name in ("partition", "rpartition"):
            self.spend(len(owner))
        elif name in ("split", "rsplit"):
            separator = args[0] if args else kwargs.get("sep")
            num_cuts = owner.count(separator) if isinstance(separator, str) else _count(owner, _SPACES)
            limit = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
            self._parts(owner, 1 + (min(num_cuts, limit) if isinstance(limit, int) and limit >= 0 else num_cuts))
        elif name == "splitlines":
            self._parts(owner, 1 + _count(owner, _LINE_ENDS))
        elif name == "indent":
            num_lines = 1 + _count(owner, _LINE_ENDS)
            widths = [
                len(each) if isinstance(each, str) else int(each) for each in given if isinstance(each, str | int)
            ]
            self._parts(owner, num_lines)
            self.spend(num_lines * max([4, *widths]))
        elif name == "characters":
            self._parts(owner, len(owner))
        elif name == "join":
            self.spend(self.weight(given) + sum(len(owner) * len(each) for each in given if isinstance(each, list)))

    def _parts(self, owner: str, num_parts: int) -> None:
        """Pay for the characters of a text's parts. `value` pays for the list of them."""
        self.spend(len(owner))
        self.afford(num_parts * _ITEM)

    def _copy_cost(self, value: object) -> int:
        """Return the characters that a copy of a value costs: those of a text, or `_ITEM` for each item; else 1."""
        if isinstance(value, str):
            return len(value)
        return len(value) * _ITEM if isinstance(value, list | tuple | dict | set | frozenset) else 1

    def _pay_integer(self, num_bits: int) -> None:
        """Pay for an integer of this many bits.

        Raises:
            TooCostly: there are more than `_MAX_BITS`, or the budget is spent.
        """
        self.spend(1)
        if num_bits > _MAX_BITS:
            raise TooCostly(f"it computes an integer of more than {_MAX_BITS} bits")


class _KeptText(str):
    """A text whose price is refunded when it is dropped. Its methods make plain texts."""

    _budget: RenderBudget | None = None
    _to_pay_back = 0

    def __del__(self) -> None:
        if self._budget is not None:
            self._budget.pay_back(self._to_pay_back)


class _KeptList(list[object]):
    """A list whose price is refunded when it is dropped. It never changes."""

    _budget: RenderBudget | None = None
    _to_pay_back = 0
    _weight: int | None = None

    def __del__(self) -> None:
        if self._budget is not None:
            self._budget.pay_back(self._to_pay_back)


def _count(text: str, characters: str) -> int:
    return sum(map(text.count, characters))


def _too_large() -> TooCostly:
    return TooCostly(f"it makes a value of more than {MAX_VALUE} characters")

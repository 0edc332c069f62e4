"""Options that are declared once, at the field of their class: meaning, range, and flag of the command line.

Checks, documentation and flags are made from that. Knows dataclasses, not what the options are for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from numbers import Integral, Real
from types import NoneType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from .errors import InvalidParameter

Class = TypeVar("Class", bound=type)
Self = TypeVar("Self")
First = TypeVar("First")
Several = TypeVar("Several", tuple[Any, ...], dict[Any, Any])
Keywords = ParamSpec("Keywords")

BIAS = Mapping[int, float]
_NUMBERS: dict[object, tuple[type, str]] = {int: (Integral, "an integer"), float: (Real, "a number")}


@dataclass(frozen=True)
class Flag:
    """How the command line has an option.

    Attributes:
        name: with its dashes.
        group: commands take the flags of a group together.
        unit: of its number, and how many of the field's own units that is: `("GB", 1e9)`.
        default: where the command line has another one than the field.
        metavar: what stands for the value in the help.
        path: which kind of path the value is.
        off: of a switch, the flag that turns it off; None: `--no-NAME`; empty: there is none.
    """

    name: str
    group: str
    unit: tuple[str, float] | None = None
    default: float | str | None = None
    metavar: str | None = None
    path: Literal["file", "directory", "artifact"] | None = None
    off: str | None = None


@dataclass(frozen=True)
class About:
    """What a field says of itself.

    Attributes:
        doc: its meaning; other fields are named in `backticks`.
        unset: what is done where it is not given, unless its default says so.
        low, high, above: bounds of its numbers; `low` and `high` are allowed, `above` is not.
        most: how many values it may have, where it has several.
        longest: characters of its texts.
        needs: a field without which this one may not be given.
        flag: on the command line.
        off: a number that clients of other servers send to ask for the default, such as -1 for no limit.
        names: in requests of an API that calls it otherwise, by API.
        apis: whose requests have it; None: all.
    """

    doc: str
    unset: str | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    most: int | None = None
    longest: int | None = None
    needs: str | None = None
    flag: Flag | None = None
    off: int | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apis: tuple[str, ...] | None = None

    @property
    def range(self) -> str:
        """The numbers that are allowed, in words; empty: all.

        >>> About("", low=0).range, About("", above=0, high=1).range, About("", low=1, high=9).range
        ('of 0 or more', 'above 0 and at most 1', 'from 1 to 9')
        """
        if self.above is not None:
            return f"above {self.above:g}" + ("" if self.high is None else f" and at most {self.high:g}")
        if self.low is not None:
            return f"of {self.low} or more" if self.high is None else f"from {self.low} to {self.high}"
        return ""

    def holds(self, value: float) -> bool:
        """Whether a number is within the bounds, which NaN never is."""
        above, low, high = self.above, self.low, self.high
        return (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)


@dataclass(frozen=True)
class Field:
    """An option of a class.

    Attributes:
        kind: its type but for None: `int`, `float`, `bool`, a `Literal`, `tuple[str, ...]`, or another.
        is_optional: whether None is allowed.
        default: its value where it is not given.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Any
    about: About

    @property
    def choices(self) -> tuple[str, ...]:
        """All values of a field that has only some; else empty."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def called(self) -> str:
        """What values it may have, in words."""
        if self.kind in _NUMBERS:
            return f"{_NUMBERS[self.kind][1]} {self.about.range}".rstrip()
        return "true or false" if self.kind is bool else "an object in JSON"

    @cached_property
    def check(self) -> Callable[[object], None]:
        """Raises InvalidParameter unless the field may have a value."""
        if self.choices:
            return self._check_choice
        if self.kind in _NUMBERS:
            return partial(self._check_number, _NUMBERS[self.kind][0])
        if self.kind is bool:
            return self._check_bool
        several = {tuple[str, ...]: self._check_texts, tuple[int, ...]: self._check_ids, BIAS: self._check_bias}
        return several.get(self.kind, lambda value: None)

    def parsed(self, text: str) -> Any:
        """The value that a flag's text means, in the units of the field.

        Raises:
            InvalidParameter: it is no such value.
        """
        flag = self.about.flag
        try:
            if self.kind in (int, float):
                if flag is not None and flag.unit is not None:
                    return int(float(text) * flag.unit[1])
                return self.kind(text)
            if self.kind is bool:
                return {"true": True, "false": False}[text]
            return text if self.choices or self.kind is str else json.loads(text)
        except (ValueError, KeyError, OverflowError):
            raise self.refused(f"is {text!r:.60}; it must be {self.called}") from None

    def refused(self, said: str) -> InvalidParameter:
        """The error of a value of this field: `said` follows its name."""
        return InvalidParameter(f"{self.name} {said}", param=self.name)

    def _check_choice(self, value: object) -> None:
        if value not in self.choices and not (value is None and self.is_optional):
            raise self.refused(f"is {value!r:.60}; use one of {', '.join(self.choices)}")

    def _check_number(self, kind: type, value: object) -> None:
        if value is None and self.is_optional:
            return
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not self.about.holds(value) or not -math.inf < value < math.inf:  # type: ignore[arg-type, operator]
            raise self.refused(f"is {value!r:.60}; it must be {self.called}")

    def _check_bool(self, value: object) -> None:
        if not isinstance(value, bool):
            raise self.refused(f"is {value!r:.60}; it must be {self.called}")

    def _check_texts(self, value: object) -> None:
        for text in self._few(value, tuple):
            if not isinstance(text, str) or not 0 < len(text) <= (self.about.longest or len(text)):
                raise self.refused(f"has {text!r:.60}; each must be a string of 1 to {self.about.longest} characters")

    def _check_ids(self, value: object) -> None:
        for token_id in self._few(value, tuple):
            self._check_id(token_id)

    def _check_bias(self, value: object) -> None:
        for token_id, bias in self._few(value, dict).items():
            self._check_id(token_id)
            is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not is_number or not self.about.holds(bias) or math.isnan(bias):
                raise self.refused(f"of token {token_id} is {bias!r:.60}; it must be a number {self.about.range}")

    def _check_id(self, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.refused(f"has {value!r:.60}; token ids are integers of 0 or more")

    def _few(self, value: object, kind: type[Several]) -> Several:
        """The values of a field that has several, if they are of such a kind and not too many."""
        if not isinstance(value, kind):
            raise self.refused(f"is {value!r:.60}; it must be a {kind.__name__}")
        if self.about.most is not None and len(value) > self.about.most:
            raise self.refused(f"has {len(value)} entries; at most {self.about.most} are allowed")
        return value


def option(default: Any, doc: str, **about: Any) -> Any:
    """A field of a dataclass; `about` are the attributes of `About` beside `doc`, a class as default is called."""
    made: dict[str, Any] = {"default_factory": default} if default is dict else {"default": default}
    return dataclasses.field(**made, metadata={"about": About(doc, **about)})


@cache
def fields_of(options: type) -> Mapping[str, Field]:
    """The fields of a class of options by name, in order."""
    hints = get_type_hints(options, vars(sys.modules[options.__module__]))
    return {each.name: _field(each, hints[each.name]) for each in dataclasses.fields(options)}


def check_fields(options: object) -> None:
    """Raise InvalidParameter unless each field has a value that it may have."""
    values = vars(options)
    for name, field in fields_of(type(options)).items():  # type: ignore[arg-type]  # a class is hashable
        field.check(values[name])


def check_needs(
    fields: Mapping[str, Field], given: Mapping[str, object], called: Callable[[Field], str] = lambda field: field.name
) -> None:
    """Raise InvalidParameter where a field is given and the one that it needs is not; `called` names them."""
    for name in given:
        needs = fields[name].about.needs
        if needs is not None and given.get(needs) is None:
            one, other = called(fields[name]), called(fields[needs])
            raise InvalidParameter(f"{one} is given and {other} is not; give both, or leave {one} out")


def given_of(options: object) -> dict[str, object]:
    """The fields that are None where they are not given, and are given, with their values."""
    fields = fields_of(type(options))  # type: ignore[arg-type]  # a class is hashable
    return {name: value for name, value in vars(options).items() if value is not None and fields[name].default is None}


def documented(options: Class) -> Class:
    """Add to a class of options, as its attributes, what its fields say of themselves."""
    lines = [f"    {field.name}: {_described(field)}" for field in fields_of(options).values()]
    options.__doc__ = "\n".join([(options.__doc__ or "").rstrip(), "", "    Attributes:", *lines, "    "])
    return options


def takes_fields_of(
    options: Callable[Keywords, Any],
) -> Callable[[Callable[Concatenate[Self, First, ...], None]], Callable[Concatenate[Self, First, Keywords], None]]:
    """Give an `__init__(self, first, **options)` the signature in which these are the fields of a class of options."""
    return lambda method: method


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    kind = kinds[0] if len(kinds) == 1 else hint
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Field(field.name, kind, NoneType in get_args(hint), default, field.metadata["about"])


def _described(field: Field) -> str:
    said = field.about.unset if field.default is None else None
    return field.about.doc + ("" if said is None else f" None: {said}.")

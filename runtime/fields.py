"""Options that are declared once, at the field of their class: meaning, range, and command-line flag.

Checks, documentation and flags are derived from that. Knows dataclasses, not what the options are for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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

_LISTS: dict[object, str] = {
    tuple[str, ...]: "a text or a list of texts",
    tuple[int, ...]: "a list of token ids",
    BIAS: "an object of token ids and numbers",
}


@dataclass(frozen=True)
class Flag:
    """The command-line flag of an option.

    Attributes:
        name: with its dashes.
        group: commands take the flags of a group together.
        unit: unit of its number, and its size in the field's own units: `("GB", 1e9)`.
        default: the command line's default, if it differs from the field's.
        metavar: placeholder for the value in the help.
        path: the kind of path that the value is.
        off: for a switch, the flag that turns it off; None: `--no-NAME`; empty: there is none.
    """

    name: str
    group: str
    unit: tuple[str, float] | None = None
    default: float | str | None = None
    metavar: str | None = None
    path: Literal["file", "directory", "model"] | None = None
    off: str | None = None


@dataclass(frozen=True)
class FieldInfo:
    """The declaration of one field: its meaning, its valid values, and its names in other places.

    Attributes:
        doc: its meaning; other fields are named in `backticks`.
        unset: the effect of leaving it out, unless its default shows it.
        low, high, above: bounds of its numbers; `low` and `high` are allowed, `above` is not.
        most: the most values, if it can have several.
        longest: the most characters of its texts.
        needs: another field that must be given with this one.
        flag: its command-line flag.
        secret: its value is not printed.
        off: a number that clients of other servers send to ask for the default, such as -1 for no limit.
        names: its name in requests, by API, if an API has another name for it.
        apis: the APIs whose requests have it; None: all.
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
    secret: bool = False
    off: int | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apis: tuple[str, ...] | None = None

    @property
    def range(self) -> str:
        """The valid numbers, in words; empty if all are.

        >>> FieldInfo("", low=0).range, FieldInfo("", above=0, high=1).range, FieldInfo("", low=1, high=9).range
        ('of 0 or more', 'above 0 and at most 1', 'from 1 to 9')
        """
        if self.above is not None:
            return f"above {self.above:g}" + ("" if self.high is None else f" and at most {self.high:g}")
        if self.low is not None:
            return f"of {self.low} or more" if self.high is None else f"from {self.low} to {self.high}"
        return ""

    def holds(self, value: float) -> bool:
        """Return whether a number is within the bounds; NaN never is."""
        above, low, high = self.above, self.low, self.high
        return (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)


@dataclass(frozen=True)
class Field:
    """An option of a class.

    Attributes:
        kind: its type without None: `int`, `float`, `bool`, a `Literal`, `tuple[str, ...]`, or another.
        is_optional: whether None is allowed.
        default: its value if it is not given.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Any
    about: FieldInfo

    @property
    def choices(self) -> tuple[str, ...]:
        """All values of a field of a `Literal` type; else empty."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def valid_values(self) -> str:
        """The valid values in words, such as `a number from 0 to 2`."""
        if self.kind in _NUMBERS:
            return f"{_NUMBERS[self.kind][1]} {self.about.range}".rstrip()
        if self.kind in _LISTS:
            return _LISTS[self.kind]
        return "true or false" if self.kind is bool else "an object in JSON"

    @cached_property
    def check(self) -> Callable[[object], None]:
        """The function that raises InvalidParameter if a value that it gets is not valid."""
        if self.choices:
            return self._check_choice
        if self.kind in _NUMBERS:
            return partial(self._check_number, _NUMBERS[self.kind][0])
        if self.kind is bool:
            return self._check_bool
        several = {tuple[str, ...]: self._check_texts, tuple[int, ...]: self._check_ids, BIAS: self._check_bias}
        return several.get(self.kind, lambda value: None)

    def parsed(self, text: str) -> Any:
        """Parse the text of a flag; return the value in the units of the field.

        Raises:
            InvalidParameter: the text is not a valid value.
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
            raise self.refused(f"is {text!r:.60}; it must be {self.valid_values}") from None

    def refused(self, said: str) -> InvalidParameter:
        """Return the error for an invalid value; its message is the field's name followed by `said`."""
        return InvalidParameter(f"{self.name} {said}", param=self.name)

    def _check_choice(self, value: object) -> None:
        """Raise InvalidParameter unless a value is one of the field's choices, or an allowed None."""
        if value not in self.choices and not (value is None and self.is_optional):
            raise self.refused(f"is {value!r:.60}; use one of {', '.join(self.choices)}")

    def _check_number(self, kind: type, value: object) -> None:
        """Raise InvalidParameter unless a value is a finite number of this type in the field's range.

        None is valid if the field is optional.
        """
        if value is None and self.is_optional:
            return
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not self.about.holds(value) or not -math.inf < value < math.inf:  # type: ignore[arg-type, operator]
            raise self.refused(f"is {value!r:.60}; it must be {self.valid_values}")

    def _check_bool(self, value: object) -> None:
        if not isinstance(value, bool):
            raise self.refused(f"is {value!r:.60}; it must be {self.valid_values}")

    def _check_texts(self, value: object) -> None:
        """Raise InvalidParameter unless a value is a tuple of strings, few and short enough."""
        for text in self._few(value, tuple):
            if not isinstance(text, str) or not 0 < len(text) <= (self.about.longest or len(text)):
                raise self.refused(f"has {text!r:.60}; each must be a string of 1 to {self.about.longest} characters")

    def _check_ids(self, value: object) -> None:
        for token_id in self._few(value, tuple):
            self._check_id(token_id)

    def _check_bias(self, value: object) -> None:
        """Raise InvalidParameter unless a value maps few token ids to numbers in the field's range."""
        for token_id, bias in self._few(value, dict).items():
            self._check_id(token_id)
            is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not is_number or not self.about.holds(bias) or math.isnan(bias):
                raise self.refused(f"of token {token_id} is {bias!r:.60}; it must be a number {self.about.range}")

    def _check_id(self, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.refused(f"has {value!r:.60}; token ids are integers of 0 or more")

    def _few(self, value: object, kind: type[Several]) -> Several:
        """Return the values of a field with several, after checking their type and number."""
        if not isinstance(value, kind):
            raise self.refused(f"is {value!r:.60}; it must be {self.valid_values}")
        if self.about.most is not None and len(value) > self.about.most:
            raise self.refused(f"has {len(value)} entries; at most {self.about.most} are allowed")
        return value


def option(default: Any, doc: str, **about: Any) -> Any:
    """Declare a field of a dataclass.

    `about` are the other attributes of `FieldInfo`; a class as `default` is a factory.
    """
    made: dict[str, Any] = {"default_factory": default} if default is dict else {"default": default}
    return dataclasses.field(**made, metadata={"about": FieldInfo(doc, **about)})


@cache
def fields_of(options: type) -> Mapping[str, Field]:
    """Return the fields of a class of options by name, in order."""
    hints = get_type_hints(options, vars(sys.modules[options.__module__]))
    return {each.name: _field(each, hints[each.name]) for each in dataclasses.fields(options)}


def check_fields(options: object) -> None:
    """Raise InvalidParameter unless each field has a valid value."""
    values = vars(options)
    for name, field in fields_of(type(options)).items():  # type: ignore[arg-type]  # a class is hashable
        field.check(values[name])


def normalize_fields(options: object) -> None:
    """Make fields with several values tuples and dicts of their own; one text in place of a list is a list of it."""
    values = vars(options)
    for name, field in fields_of(type(options)).items():  # type: ignore[arg-type]  # a class is hashable
        value = values[name]
        if field.kind == tuple[str, ...] and isinstance(value, str):
            object.__setattr__(options, name, (value,))
        elif field.kind in _SEVERAL.values() and isinstance(value, Iterable) and not isinstance(value, str):
            object.__setattr__(options, name, tuple(value))
        elif field.kind == BIAS and isinstance(value, Mapping):
            # A dict of its own, because a read-only view cannot be pickled, copied or passed to `asdict`.
            object.__setattr__(options, name, dict(value))


def check_needs(
    fields: Mapping[str, Field], given: Mapping[str, object], called: Callable[[Field], str] = lambda field: field.name
) -> None:
    """Raise InvalidParameter if a field is given without the one that it needs; `called` names a field."""
    for name in given:
        needs = fields[name].about.needs
        if needs is not None and given.get(needs) is None:
            one, other = called(fields[name]), called(fields[needs])
            raise InvalidParameter(f"{one} is given and {other} is not; give both, or leave {one} out")


def given_of(options: object) -> dict[str, object]:
    """Return the optional fields that are given, with their values."""
    fields = fields_of(type(options))  # type: ignore[arg-type]  # a class is hashable
    return {name: value for name, value in vars(options).items() if value is not None and fields[name].default is None}


def brief(options: object) -> str:
    """Return the call that makes this value, in one line, without fields that have their default."""
    fields, values = fields_of(type(options)), vars(options)  # type: ignore[arg-type]  # a class is hashable
    changed = [each for name, each in fields.items() if values[name] != each.default]
    given = [f"{each.name}={'...' if each.about.secret else repr(values[each.name])}" for each in changed]
    return f"{type(options).__name__}({', '.join(given)})"


def documented(options: Class) -> Class:
    """Add the documentation of its fields to the docstring of a class of options: meaning, range and default."""
    lines = [f"    {field.name}: {_described(field)}" for field in fields_of(options).values()]
    options.__doc__ = "\n".join([(options.__doc__ or "").rstrip(), "", "    Attributes:", *lines, "    "])
    return options


def takes_fields_of(
    options: Callable[Keywords, Any],
) -> Callable[[Callable[Concatenate[Self, First, ...], None]], Callable[Concatenate[Self, First, Keywords], None]]:
    """Give an `__init__(self, first, **options)` the signature of a class of options, for type checkers."""
    return lambda method: method


_SEVERAL: dict[object, Any] = {Sequence[str]: tuple[str, ...], Sequence[int]: tuple[int, ...]}  # the stored types


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    """Return the declaration of a dataclass's field, with the type that `hint` allows besides None."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    kind = kinds[0] if len(kinds) == 1 else hint
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    about = field.metadata["about"]
    if about.most is not None:  # a bounded list becomes a tuple, and is checked as one
        kind = _SEVERAL.get(kind, kind)
    return Field(field.name, kind, NoneType in get_args(hint), default, about)


def _described(field: Field) -> str:
    """Return the documentation of a field in one line: meaning, range or choices, default.

    >>> _described(Field("share", float, False, 0.5, FieldInfo("How much.", low=0, high=1)))
    'How much. A number from 0 to 1. Default: 0.5.'
    """
    about, default = field.about, field.default
    said = [about.doc]
    if field.choices:
        said.append(f"One of {', '.join(field.choices)}.")
    elif about.range:
        called = field.valid_values if field.kind in _NUMBERS else f"numbers {about.range}"
        said.append(f"{called[0].upper()}{called[1:]}.")
    if about.most is not None:
        said.append(f"At most {about.most}" + (f", of 1 to {about.longest} characters." if about.longest else "."))
    if about.needs is not None:
        said.append(f"Needs `{about.needs}`.")
    if default is None:
        said.append(f"Default: None{'' if about.unset is None else f', {about.unset}'}.")
    else:
        said.append(f"Default: {getattr(default, '__name__', None) or repr(default)}.")
    return " ".join(said)

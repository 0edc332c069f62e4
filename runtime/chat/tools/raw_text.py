"""Grammar rules for strings without JSON's quotes, up to a text that ends them.

Rules are whole lines, `name: expression`. Knows schemas of strings, not calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...errors import InvalidGrammar
from .format_texts import Specials, cut_at_specials, escaped, quoted
from .schema_types import STRING, Types, follow_reference, target, types_of

_MAX_LENGTH: Final = 4096  # of a string whose length is enforced
_UNENFORCED: Final = ("pattern", "format")  # keywords of strings that rules cannot enforce
_MAX_SEEN: Final = 256  # schemas that are visited to classify one: hostile ones have too many branches
_WAYS: Final = ("anyOf", "oneOf", "allOf")
_NULLS: Final = ("null", "None")  # in JSON and in Python


def text_rules(
    name: str,
    types: Types,
    asked: Mapping[str, Any],
    close: str,
    *,
    root: Mapping[str, Any],
    is_strict: bool,
    specials: Specials,
    line: str = "",
    goes_on: bool = False,
) -> list[str]:
    """Return grammar rules, the first one called `name`, for a string that fits `asked` and the `close` that ends it.

    The word null is allowed if `types` has it. If `types` has others, too, any string is allowed.

    Args:
        types: the types that `asked` allows, one of them a string.
        asked: the schema of the string.
        close: the text that ends the string.
        root: the schema that `asked` is a part of.
        line: can come before `close`, and is no part of the string.
        goes_on: strings without enumerated values and limits of length can contain `close`: what follows in the grammar
            decides where they end.

    Raises:
        InvalidGrammar: `is_strict`, and `asked` cannot be enforced.
    """
    unenforced = unenforced_keywords(asked, root)
    if is_strict and (unenforced or types & {"object", "array"}):
        reason = f"has {unenforced[0]}" if unenforced else "may be a string, an object or an array"
        raise InvalidGrammar(
            f"an argument of a function {reason}, which cannot be enforced where the model writes strings without "
            "quotes; leave it out, or do not ask for strict"
        )
    if types - {"null"} != STRING:
        return _any_rules_with_close(name, close, specials, goes_on=goes_on)
    nulls = _NULLS if "null" in types else ()
    values, times = enumerated_values(asked, root), length_quantifier(_with_string_alternative(asked, root))
    white = "WS? " if close in dict(specials) else "BLANK "
    end = f"{white if line else ''}{quoted(close, specials)}"
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        return [f"{name}: ({' | '.join(quoted(text, specials) for text in (*texts, *nulls))}) {end}"]
    if times == "*":
        return _any_rules_with_close(name, close, specials, goes_on=goes_on)
    if not nulls:
        return _rules_with_close(name, times, close, specials, line)
    null = f"({' | '.join(map(quoted, nulls))}) {end}"
    return [f"{name}: {name}_string | {null}", *_rules_with_close(f"{name}_string", times, close, specials, line)]


def unenforced_keywords(asked: Mapping[str, Any], root: Mapping[str, Any], seen: set[int] | None = None) -> list[str]:
    """Return the keywords of a schema within `root`, and of its alternatives, that our rules do not enforce.

    Also `anyOf`, `oneOf` or `allOf`, if there are too many alternatives to visit.

    >>> unenforced_keywords({"anyOf": [{"type": "string", "pattern": "^a$"}, {"type": "null"}]}, {})
    ['pattern']

    Args:
        seen: ids of schemas that were visited on the way here.
    """
    found, seen = [word for word in _UNENFORCED if word in asked], set() if seen is None else seen
    for way in _WAYS:
        for ref in asked[way] if isinstance(asked.get(way), list) else ():
            each = target(ref, root)
            if len(seen) >= _MAX_SEEN:
                return [*found, way]
            if id(each) not in seen:
                seen.add(id(each))
                found += unenforced_keywords(follow_reference(each, root), root, seen)
    return found


def enumerated_values(
    asked: Mapping[str, Any], root: Mapping[str, Any], seen: set[int] | None = None
) -> list[Any] | None:
    """Return the values of a schema within `root` that enumerates all its strings; None if it does not.

    They are those of `enum` or `const`, also of alternatives that allow strings; some are no strings.

    >>> enumerated_values({"anyOf": [{"enum": ["a", "b"]}, {"const": "c"}, {"type": "null"}]}, {})
    ['a', 'b', 'c']

    Args:
        seen: ids of schemas that were visited on the way here; None for the outermost one.
    """
    values = [asked["const"]] if "const" in asked else asked.get("enum")
    if isinstance(values, list):
        return values
    ways = next((asked[way] for way in ("anyOf", "oneOf") if isinstance(asked.get(way), list)), None)
    if ways is None:
        return None
    is_first, found = seen is None, list[Any]()
    seen = set() if seen is None else seen
    for way in ways:
        each = target(way, root)
        if id(each) in seen or not types_of(each, root) & STRING:
            continue
        if len(seen) >= _MAX_SEEN:
            return None
        seen.add(id(each))
        inner = enumerated_values(follow_reference(each, root), root, seen)
        if inner is None:
            return None
        found += inner
    return None if is_first and not found else found


def _with_string_alternative(asked: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with the keywords of its only alternative that can be a string added.

    It is unchanged if none or several can. Keywords of the schema override those of the alternative.
    """
    ways = next((asked[way] for way in ("anyOf", "oneOf") if isinstance(asked.get(way), list)), ())
    found = [follow_reference(each, root) for each in ways if types_of(each, root) & STRING]
    return {**found[0], **asked} if len(found) == 1 else asked


def length_quantifier(asked: Mapping[str, Any]) -> str:
    """Return the limits of a string's length as a quantifier of a regular expression, such as `{1,8}`.

    `*` if its schema has none, or they are too high to enforce.
    """
    least, most = asked.get("minLength", 0), asked.get("maxLength", "")
    if not isinstance(least, int) or not (most == "" or isinstance(most, int)) or max(least, most or 0) > _MAX_LENGTH:
        return "*"
    return f"{{{least},{most}}}" if least or most != "" else "*"


def _any_rules_with_close(name: str, close: str, specials: Specials, *, goes_on: bool) -> list[str]:
    """Return rules, the first one called `name`, for a text of any length and the `close` that ends it.

    Args:
        goes_on: the text can contain `close`, unless that is a special token.
    """
    if not goes_on or close in dict(specials):
        return _rules_with_close(name, "*", close, specials)
    return [f"{name}: {name}_part+", *_rules_with_close(f"{name}_part", "*", close, specials)]


def _rules_with_close(name: str, times: str, close: str, specials: Specials, line: str = "") -> list[str]:
    """Return rules, the first one called `name`, for a text and the `close` that ends it.

    The text ends at the first `close`; if that has special tokens in it, at its first part.

    Args:
        times: number of its characters, as a quantifier of a regular expression.
        line: can come before `close`, and is no part of the text.
    """
    first, *rest = cut_at_specials(close, specials)
    behind = " ".join(quoted(piece, specials) for piece in rest)
    text = f"/(.|\\n){times}{f'({escaped(line)})?' if line else ''}/"
    if first in dict(specials):
        return [f"{name}: ({text})? {quoted(first, specials)} {behind}".rstrip()]
    if not rest:
        return [f"{name}[lazy]: {text} {quoted(first)}"]
    return [f"{name}: {name}_lazy {behind}", f"{name}_lazy[lazy]: {text} {quoted(first)}"]

"""Write the grammar of a reply that can call tools.

If a reply need not call, it is free text until it can only be a call: until the format's texts and
the name of a tool are there, and in JSON the key of its arguments, too. From there on it follows the tool's schema to
the end of the call. White space and further calls can follow a call. Anything else that the model writes ends the
reply, by `OVER`, and is dropped: no model is made to call again. Rules are whole lines, `name: expression`; an
expression is the right side of one. Knows texts, not tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from ..grammar import OVER, Grammar
from .arguments import JSON, ArgumentStyle
from .format_texts import (
    AS_TEMPLATES_WRITE,
    BLANK,
    Piece,
    Rules,
    Specials,
    cut_at_slots,
    cut_at_specials,
    escaped,
    lexeme_rule,
    loose,
    loose_after_white,
    pattern_of,
    prefix_pattern,
    quoted,
    with_options,
)

MAX_CALLS: Final = 64  # of one reply
_NAME_LETTERS: Final = "[a-zA-Z0-9_.\\-]*"
_NOTHING: Final = '""'
_BLANK: Final = Piece("blank")
_TERMINALS: Final = ("TEXT: /(.|\\n)+/", f"BLANK: /{BLANK}/", "WS: /[ \\t\\r\\n]{1,16}/")


class CallTexts(Protocol):
    """The texts of a format; `ToolFormat` describes each."""

    @property
    def begin(self) -> str: ...
    @property
    def middle(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def open(self) -> str: ...
    @property
    def close(self) -> str: ...
    @property
    def separator(self) -> str | None: ...
    @property
    def arguments(self) -> ArgumentStyle: ...
    @property
    def specials(self) -> Specials: ...
    @property
    def is_tagged(self) -> bool: ...
    @property
    def openings(self) -> tuple[str, ...]: ...
    @property
    def later_openings(self) -> tuple[str, ...]: ...
    @property
    def has_blank_before_name(self) -> bool: ...
    @property
    def end_tags(self) -> tuple[str, ...]: ...


def content_expression(content: Grammar) -> str:
    """Return the grammar expression for replies without calls that follow a JSON schema.

    If a call begins like JSON, white space that JSON allows after its `{` would be allowed in the call as
    well, and the call would not be recognized.
    """
    return f"%json {with_options(content.schema(), is_strict=content.is_strict, **AS_TEMPLATES_WRITE)}"


class ToolGrammar:
    """Writes the grammar of replies in one format.

    Args:
        names: of the tools that can be called.
        arguments: for each tool the name of its arguments' rule, and the rules to add.
        is_parallel: whether one reply may have several calls.
    """

    def __init__(
        self,
        format: CallTexts,
        names: Sequence[str],
        arguments: Iterable[tuple[str, list[str]]],
        *,
        is_parallel: bool,
    ) -> None:
        self._format, self._names, self._arguments = format, names, arguments
        self._max_more = MAX_CALLS - 1 if is_parallel and format.separator is not None else 0
        self._specials = format.specials
        self._named = _NameRules(format, names)

    def required(self) -> Grammar:
        """Return the grammar of a reply that calls; the first call has the template's white space."""
        return self._make_grammar(["start: first after"], has_first=True)

    def or_content(self, content: Grammar) -> Grammar:
        """Return the grammar of a reply that calls, or follows a JSON schema.

        Raises:
            InvalidGrammar: the schema is no object.
        """
        return self._make_grammar(
            ["start: first after | content", f"content: {content_expression(content)}"], has_first=True
        )

    def or_text(self) -> Grammar:
        """Return the grammar of a reply of any text, with or without calls."""
        named, core = ["call after"], self._format.openings[-1]
        if self._named.has_key:
            named.append("name text")
        if not self._format.is_tagged:
            rules = ["start: begun named | TEXT?", f"begun[lazy]: BLANK /{pattern_of(loose(core))}/", "text: TEXT?"]
            return self._make_grammar([*rules, f"named: {' | '.join(named)} | text"])
        first, *others = cut_at_specials(core, self._specials)
        is_special = first in dict(self._specials)
        lead = "".join(others) if is_special else ""
        core = quoted(first, self._specials) if is_special else f"/{pattern_of(loose(core))}/"
        # Special tokens that begin no call: the ones before a call, and others in the model's text.
        strays = [quoted(each, self._specials) for each, _ in self._specials if not is_special or each != first]
        rules = ["start: text", *([f"lead[lazy]: BLANK /{pattern_of(loose(lead))}/"] if lead else [])]
        for suffix in ("", "_n") if self._named.excluded else ("",):
            text, before = f"TEXT{suffix.upper()}", f"SAID{suffix.upper()}"
            stray = f" | {text}? ({' | '.join(strays)}) text" if strays else ""
            rules += [f"said{suffix}: {text}? {core}" if is_special else f"said{suffix}[lazy]: {before}"]
            rules += [f"text{suffix}: said{suffix} {'(lead named | text)' if lead else 'named'} | {text}?{stray}"]
        if not is_special:
            rules += [f"SAID: /(.|\\n)*/ {core}", *(["SAID_N: SAID & ~NAMED"] if self._named.excluded else [])]
        nexts = [quoted(each, self._specials) for each in self._named.nexts]
        if nexts:
            others = [each for each in strays if each not in nexts]
            rules += ["text_c: said named | TEXT?" + (f" | TEXT? ({' | '.join(others)}) text" if others else "")]
            rules += [f"unnamed: TEXT_C? ({' | '.join(nexts)}) text", "TEXT_C: TEXT & ~NAMED"]
            named.append("text_c | unnamed")
        else:
            named.append("text_n" if self._named.excluded else "text")
        return self._make_grammar([*rules, f"named: {' | '.join(named)}"])

    def _make_grammar(self, start: list[str], *, has_first: bool = False) -> Grammar:
        """Return a Lark grammar: the rules `start`, followed by those for calls, names, arguments and ends.

        Args:
            start: rules for the whole reply, which use the others.
            has_first: `start` uses a rule `first`, a call with the template's own white space.
        """
        numbers = range(len(self._names))
        rules = Rules([*start, *_TERMINALS, *self._named.rules, *self._end_rules(), *self._after_rules()])
        rules.add(["call: " + " | ".join(f"call_{number}" for number in numbers)])
        if self._named.has_key and not has_first:
            rules.add(["name: " + " | ".join(f"name_{number}" for number in numbers)])
        begin, quote = self._format.openings[0], ""
        if self._format.arguments is JSON and begin.endswith('"'):
            begin, quote = begin[:-1], '"'
        if has_first:
            firsts = " | ".join(f"first_{number}" for number in numbers)
            rules.add([f"first: {self._exact_expression(begin)} ({firsts})"])
        for number, (name, (arguments, more)) in enumerate(zip(self._names, self._arguments, strict=True)):
            rules.add([f"call_{number}: name_{number} {self._named.behind} {arguments} end"])
            rules.add(self._named.name_rules(number, name))
            if has_first:
                head = self._exact_expression(quote + name + self._format.middle)
                rules.add([f"first_{number}: {head} {arguments} end"])
            rules.add(more)
        return Grammar("lark", "\n".join(rules) + "\n")

    def _exact_expression(self, text: str) -> str:
        """Return the expression for a literal text, split at quotes as the library splits JSON."""
        pieces = re.findall(r'"[^"]*"|[^"]+', text) if self._format.arguments is JSON else [text]
        return " ".join(text_expression(piece, self._specials) for piece in pieces)

    def _end_rules(self) -> list[str]:
        """Return whole rules for the end of a call, called `end`: the text as the template writes it, or its tags.

        Of several tags, models can write all, only the first, or all but the first.
        """
        tags = self._format.end_tags
        if not tags and not self._format.is_tagged:
            return lexeme_rule("end", loose_after_white(self._format.end), self._specials)
        if not tags:
            return [f"end: {text_expression(self._format.end, self._specials) or _NOTHING}"]
        first = lexeme_rule("end_first", loose_after_white(tags[0]), self._specials)
        if len(tags) == 1:
            return [*first, "end: end_first"]
        last = lexeme_rule("end_last", loose_after_white("".join(tags[1:])), self._specials)
        return [*first, *last, "end: end_first end_last? | end_last"]

    def _after_rules(self) -> list[str]:
        """Return whole rules for the text after a call, called `after`, and the rules that it uses.

        It is white space, the end of all calls, more calls, or other text, which ends the reply.
        """
        again, format = self._later_openings(), self._format
        expected = [*again, *(loose_after_white("".join(tags)) for tags in [format.end_tags[1:]] if tags)]
        text = "TEXT_N" if self._named.excluded else "TEXT"
        rules, close, section = list[str](), "", ""
        if format.close:
            closing = loose_after_white(format.close.strip())
            rules, close = lexeme_rule("close", closing, self._specials), "close? "
            expected.append(closing)
            if again:  # models close all calls, and open them again
                rules += lexeme_rule("section", (_BLANK, *loose(format.openings[0])), self._specials)
                section = " | close section"
        if not self._max_more:
            rules.append("after: tail")
        elif not again:
            rules.append(f"after: call{{0,{self._max_more}}} tail")
        else:
            rules += [f"again: {' | '.join(f'again_{number}' for number in range(len(again)))}{section}"]
            for number, pieces in enumerate(again):
                rules += lexeme_rule(f"again_{number}", pieces, self._specials)
            more = "again?" if self._is_bare else "again"
            rules.append(f"after: ({more} call){{0,{self._max_more}}} (tail | again {text}?)")
        prefixes = [prefix_pattern(_before_specials(pieces, self._specials)) for pieces in expected]
        if self._max_more and self._is_bare:
            prefixes.append(f"{BLANK}{_NAME_LETTERS}")
        awaited = "|".join(prefix for prefix in [*prefixes, BLANK] if prefix)
        return [
            *rules,
            f"AWAITED: /{awaited}/",
            f"tail: {close}(AWAITED? | over TEXT?)",
            f"{OVER}[capture, lazy]: OTHER",
            f"OTHER: {text} & ~/{awaited}/",
        ]

    @property
    def _is_bare(self) -> bool:
        """Return whether a later call can begin with its name."""
        return not (self._format.begin + (self._format.separator or "")).strip()

    def _later_openings(self) -> list[tuple[Piece, ...]]:
        """Return the possible texts between the end of a call and the name of the next one, each in pieces.

        Empty if a reply has only one call, or only white space can be there.
        """
        if not self._max_more:
            return []
        separator = loose((self._format.separator or "").strip())
        found = []
        for opening in self._format.later_openings:
            is_section = bool(self._format.open) and opening == self._format.openings[0]
            pieces = (_BLANK, *(() if is_section or not separator else (*separator, _BLANK)), *loose(opening))
            if any(piece.kind == "text" for piece in pieces):
                found.append(pieces)
        return found


class _NameRules:
    """Rules for the name of a tool after the beginning of a call, and for the text up to the arguments.

    A name must be complete: `now` does not begin `nowhere`. So the rule for a name includes the first letter after it.
    That is impossible if arguments begin with this letter: then text after the beginning of a call is text that does
    not begin with a name and this letter, which `excluded` says.

    Attributes:
        nexts: special tokens, one of which after a name makes it a call: after other text it is text.
        has_key: JSON's key of the arguments, or the like, follows the name: the name alone is text.
        behind: rules for the text between the name and the arguments.
        rules: rules that these need.
    """

    def __init__(self, format: CallTexts, names: Sequence[str]) -> None:
        self.excluded, self.has_key = False, False
        self.nexts, self.rules = list[str](), list[str]()
        known = " | ".join(f"NAME_{number}" for number in range(len(names)))
        self._blank = "BLANK " if format.has_blank_before_name else ""
        pieces = loose(format.middle)
        blank = " BLANK" if pieces and pieces[0] == _BLANK else ""
        texts = pieces[1:] if blank else pieces
        specials = [special for special, _ in format.specials]
        is_special_next = (
            any(texts[0].text.startswith(special) for special in specials)
            if texts
            else (format.arguments.opener == "<" and any(special in format.arguments.texts for special in specials))
        )
        self._is_over_by_itself = bool(texts) and not is_special_next
        self._behind_name = blank
        before_arguments = "WS?" if format.arguments is JSON else ""
        self.behind = before_arguments
        if is_special_next:
            self.behind = text_expression(format.middle.lstrip(), format.specials)
            self.nexts = (
                cut_at_specials(texts[0].text, format.specials)[:1]
                if texts
                else [special for special in specials if special.startswith(format.arguments.opener)]
            )
            self.rules.append(f"NAMED: {known}")
        elif not re.search(r"[^\W_]", format.middle):
            # Names alone, or in a tag, can also be text: it is a call if arguments follow.
            self.excluded, self._is_over_by_itself = True, False
            self._behind_name = "".join(" BLANK" if piece == _BLANK else f" {quoted(piece.text)}" for piece in pieces)
            self._behind_name = f"{self._behind_name.removesuffix(' BLANK')} BLANK"
            self.rules += [
                f"NAMED: ({known}) /{escaped(format.arguments.opener)}(.|\\n)*/",
                "TEXT_N: TEXT & ~NAMED",
            ]
        else:
            first = texts[0].text
            self._behind_name += f" {quoted(first[0])}"
            rest = (Piece("text", first[1:]), *texts[1:]) if first[1:] else texts[1:]
            if any(special in format.middle for special in specials):
                self.behind = text_expression(format.middle.lstrip()[1:], format.specials)
            elif any(piece.kind != "blank" for piece in rest):
                self.has_key, self.behind = True, f"key {before_arguments}"
                self.rules.append(f"key[lazy]: /{pattern_of(rest[:-1] if rest[-1] == _BLANK else rest)}/")

    def name_rules(self, number: int, name: str) -> list[str]:
        """Return whole rules, the first called `name_NUMBER`, for a tool's name and the text that shows its end.

        Args:
            number: the tool's index.
            name: the tool's name.
        """
        text = f"{self._blank}{quoted(name)}{self._behind_name}"
        if self._is_over_by_itself:
            return [f"name_{number}[lazy]: {text}"]
        return [f"name_{number}: NAME_{number}", f"NAME_{number}: {text}"]


def text_expression(text: str, specials: Specials) -> str:
    """Return the grammar expression for a literal text, with a pattern for each slot; empty for an empty text."""
    rules = [
        (quoted(piece, specials) if piece else "", f"/{slot}/" if slot else "") for piece, slot in cut_at_slots(text)
    ]
    return " ".join(rule for pair in rules for rule in pair if rule)


def _before_specials(pieces: tuple[Piece, ...], specials: Specials) -> tuple[Piece, ...]:
    """Return the pieces before the first special token; a literal is cut there."""
    found = []
    for piece in pieces:
        texts = cut_at_specials(piece.text, specials) if piece.text else [""]
        if texts[0] in dict(specials):
            break
        found.append(piece._replace(text=texts[0]))
        if len(texts) > 1:
            break
    return tuple(found)

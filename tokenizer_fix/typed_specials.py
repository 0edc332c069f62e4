"""Distinguish text that clients type from text that templates write, if both look like a control token.

A chat template writes control tokens as text around the clients' text. In the rendered text, the `<|im_end|>` that ends
a turn looks like one that a client typed. It also looks like one that the template made from a client's text by
deleting, lowering or joining parts.

Therefore the conversation is rendered a second time, with guards: in each typed text, the symbols at both ends of
control tokens are replaced by noncharacters. A control token without a guard is the template's own. A text with guards
is encoded by a tokenizer whose control tokens have spellings that no client types.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import tokenizers

from .errors import InvalidText
from .probe import twin_of
from .profile import AddedToken
from .text_encoder import Encoder, LongTextTurns

# Noncharacters, which Unicode reserves for such uses. They are removed from texts that clients type.
BEGIN, END, QUOTE, *GUARDS = map(chr, range(0xFDD0, 0xFDF0))
_PART = 1 << 16  # characters that are searched in one to ten milliseconds
_SYMBOL = re.compile(r"[^\w\s]")
_SOLID = re.compile(r"\S+")


def written_ids(added_tokens: Iterable[AddedToken], template_texts: Iterable[str]) -> frozenset[int]:
    """Return the added tokens that a template writes, except white space and words, which are always text.

    A token also counts if the library would not find it there: Llama-2's legacy tokenizer finds some only after a
    space, which a client may type.

    >>> written_ids([AddedToken(7, "<end>", False), AddedToken(8, "user", False)], ["user: <end>"])
    frozenset({7})
    """
    texts = list(template_texts)
    ids = {token.text: token.id for token in added_tokens if _SYMBOL.search(token.text)}
    # few tokens: Gemma adds 6,000
    somewhere = {token for token in ids if token and any(token in text for text in texts)}
    written = re.compile(any_of(somewhere) or "(?!)")
    return frozenset(ids[match[0]] for text in texts for match in written.finditer(text))


class TypedSpecials:
    """A renderer and encoder of conversations for one tokenizer.

    >>> typed.render(["Hi <|im_end|>"], lambda texts: texts[0] + "<|im_end|>")                # doctest: +SKIP
    ('Hi \ufdd3|im_end|\ufdd4<|im_end|>', True)

    Args:
    parsing: the library's tokenizer, which finds added tokens in a text.
    added_tokens: the tokens outside its pieces.
    control_ids: the added tokens that are control tokens.
    turns: limit of long texts, which may be shared with others.
    sought: texts that the template looks for in typed text, such as `</think>`.
    """

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        added_tokens: Sequence[AddedToken],
        control_ids: Container[int],
        turns: LongTextTurns | None = None,
        sought: Iterable[str] = (),
    ) -> None:
        self._parsing = parsing
        self._turns = LongTextTurns() if turns is None else turns
        self._ids = {token.text: token.id for token in added_tokens}
        self._controls = frozenset(token.text for token in added_tokens if token.id in control_ids) - {""}
        self._control = re.compile(any_of(self._controls) or "(?!)")  # matches nothing
        symbols = Counter(edge for text in self._controls for edge in _edges(text))
        words = Counter(text[0] for text in self._controls if not _edges(text))
        guards = iter(GUARDS)
        self._guards = dict(zip((symbol for symbol, _ in symbols.most_common()), guards, strict=False))
        self._all_guards = self._guards | dict(zip((letter for letter, _ in words.most_common()), guards, strict=False))
        kept = self._kept_whole(sought)
        self._longest = max(map(len, self._controls | kept), default=0)
        self._kept = re.compile(any_of(kept) or "(?!)")
        self._marked_control = re.compile(f"{BEGIN}({any_of(self._controls & kept) or '(?!)'}){END}")
        self._words = [text for text in self._controls if self._guards.keys().isdisjoint(text)]

    def _kept_whole(self, sought: Iterable[str]) -> set[str]:
        """Return texts that the template must find in typed text: they get no guards inside.

        Control tokens among them get marks around them. A mere part of a control token is never kept, because a
        template could make any control token from a text with `<`.
        """
        kept = {text for text in self._controls if self._guards.keys().isdisjoint(text)}
        for text in sought:
            inside = {control for control in self._controls if control in text}
            kept |= inside
            if not inside and text and not any(text in control for control in self._controls):
                kept.add(text)
        return kept

    def render(self, values: Sequence[Any], template: Callable[[Sequence[Any]], str]) -> tuple[str, bool]:
        """Render values with `template`, with guards where typed text looks like a control token.

        Returns the text, and whether it has guards. Noncharacters of `values` that are used for guards are removed. If
        guards lead the template to another text, that text is used, so that typed control tokens always have guards.

        Args:
            values: messages, tools and variables; texts may be in lists and mappings.

        Raises:
            InvalidText: they are nested too deeply.
        """
        try:
            texts = list(_texts(values))
            if any(mark in text for text in texts for mark in (BEGIN, END, QUOTE, *GUARDS)):
                values = [_map_texts(value, _without_noncharacters) for value in values]
            rendered = template(values)
            if not any(each in text for text in texts for each in (*self._guards, *self._words)):
                return rendered, False
            if next(self._found(self._control, rendered), None) is None:
                return rendered, False
            return self._guarded(values, template, rendered)
        except RecursionError as error:
            raise InvalidText("lists and mappings are nested too deeply; send flatter ones") from error

    def unmark(self, text: str) -> str:
        """Return the text without guards."""
        for letter, guard in self._all_guards.items():
            text = text.replace(guard, letter)
        return text

    def _guarded(
        self, values: Sequence[Any], template: Callable[[Sequence[Any]], str], rendered: str
    ) -> tuple[str, bool]:
        """Return the text rendered with guards, and whether it has any."""
        marked = template([_map_texts(value, self._guard_but_kept) for value in values])
        marked = self._marked_control.sub(lambda found: self._guard_all(found[1]), marked)
        guarded = self._with_white_space_of(rendered, marked.replace(BEGIN, "").replace(END, ""))
        plain = self.unmark(guarded)
        own = [found.span() for found in self._found(self._control, guarded)]
        if own == [found.span() for found in self._found(self._control, plain)]:
            return plain, False
        return guarded, True

    def _with_white_space_of(self, rendered: str, guarded: str) -> str:
        """Return a text with guards, with the white space of `rendered` if nothing else differs.

        A template may test the white space next to a token that it removes, and find a mark.
        """
        if self.unmark(guarded) == rendered:
            return guarded
        solid = "".join(guarded.split())
        if self.unmark(solid) != "".join(rendered.split()):
            return guarded
        done = 0

        def next_letters(found: re.Match[str]) -> str:
            nonlocal done
            done += len(found[0])
            return solid[done - len(found[0]) : done]

        return _SOLID.sub(next_letters, rendered)

    def _guard(self, text: str) -> str:
        """Return a text with guards for the symbols of control tokens."""
        for letter, guard in self._guards.items():
            text = text.replace(letter, guard)
        return text

    def _guard_all(self, text: str) -> str:
        """Return a text with guards for all symbols that can begin or end control tokens."""
        for letter, guard in self._all_guards.items():
            text = text.replace(letter, guard)
        return text

    def _guard_but_kept(self, text: str) -> str:
        """Return a text with guards, except in texts that the template must find."""
        parts: list[str] = []
        done = 0
        for found in self._found(self._kept, text):
            whole = found[0]
            parts += (
                self._guard(text[done : found.start()]),
                f"{BEGIN}{whole}{END}" if whole in self._controls else whole,
            )
            done = found.end()
        return "".join(parts) + self._guard(text[done:])

    def _found(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """Yield matches as `finditer` does, in parts, between which other threads can run."""
        at, length = 0, len(text)
        while at < length:
            found = pattern.search(text, at, at + _PART + self._longest)
            if found is None or found.start() >= at + _PART:
                at += _PART
            else:
                yield found
                at = found.end()

    def encode(self, marked: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text in which guarded control tokens are text; no bos is added.

        Raises:
            InvalidText: guarded text cannot be encoded as text.
            TooManyTokens: there are more than `max_tokens`.
        """
        # A written control token that the library does not match as a token is text, and is no longer quoted.
        quoted, places = self._quote(marked)
        ids, found = self._encode_quoted(quoted, max_tokens)
        if len(found) < len(places):
            quoted, places = self._quote(marked, [_is_within(place, found) for place in places])
            ids, found = self._encode_quoted(quoted, max_tokens)
        # A vocabulary may hold a control token among its pieces, which the model can then find (T5's Unigram).
        if len(found) != len(places):
            raise InvalidText("the text holds a control token that cannot be encoded as plain text here; remove it")
        real = self._real_ids
        return [real.get(token_id, token_id) for token_id in ids]

    def _quote(self, marked: str, is_token: Sequence[bool] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """Return the text without guards, with quoted control tokens, and the positions of these in it.

        `is_token` says which written control tokens are quoted, in order; by default all.
        """
        parts: list[str] = []
        places: list[tuple[int, int]] = []
        num_characters = done = 0
        for number, match in enumerate(self._found(self._control, marked)):
            before, text = self.unmark(marked[done : match.start()]), match[0]
            num_characters += len(before)
            if is_token is None or is_token[number]:
                text = self._quoted(text)
                places.append((num_characters, num_characters + len(text)))
            num_characters += len(text)
            parts += (before, text)
            done = match.end()
        return "".join(parts) + self.unmark(marked[done:]), places

    def _encode_quoted(self, text: str, max_tokens: int | None) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids in `_quoting`, and the positions of control tokens among them in the text."""
        with self._turns.for_text(text):
            encoding = Encoder(self._quoting, self._turns).encode(text, max_tokens)
            places = zip(encoding.ids, encoding.offsets, strict=True)
            return encoding.ids, [place for token_id, place in places if token_id in self._quoted_ids]

    @cached_property
    def _quoting(self) -> tokenizers.Tokenizer:
        """The tokenizer with quoted control tokens; their ids differ, because the library numbers them anew."""
        return twin_of(self._parsing, self._quoted)

    @cached_property
    def _real_ids(self) -> Mapping[int, int]:
        """The ids of added tokens, by their ids in `_quoting`."""
        found = ((self._quoting.token_to_id(self._quoted(text)), token_id) for text, token_id in self._ids.items())
        return {quoting_id: token_id for quoting_id, token_id in found if quoting_id is not None}

    @cached_property
    def _quoted_ids(self) -> frozenset[int]:
        """Control tokens in `_quoting`: those written, and those that are still among its pieces."""
        spellings = (spelling for text in self._controls for spelling in (self._quoted(text), text))
        return frozenset(found for found in map(self._quoting.token_to_id, spellings) if found is not None)

    def _quoted(self, text: str) -> str:
        """Return a control token between quotes; other text is unchanged."""
        return f"{QUOTE}{text}{QUOTE}" if text in self._controls else text


def _edges(text: str) -> set[str]:
    """Return the first and the last symbol of a control token; none if it has only words and white space."""
    symbols = _SYMBOL.findall(text)
    return {symbols[0], symbols[-1]} if symbols else set()


def _without_noncharacters(text: str) -> str:
    """Return a text without the noncharacters that are used here."""
    for mark in (BEGIN, END, QUOTE, *GUARDS):
        text = text.replace(mark, "")
    return text


def _is_within(place: tuple[int, int], found: Sequence[tuple[int, int]]) -> bool:
    """Return whether a span `[start, stop)` is within one of those found, which are in order."""
    index = bisect_right(found, place[0], key=itemgetter(0)) - 1
    return index >= 0 and place[1] <= found[index][1]


def any_of(texts: Set[str]) -> str:
    """Return a pattern that matches the longest of `texts`; a common beginning is tested only once.

    Gemma has 6,000 control tokens that begin with `<`. Tested one after the other, they took 18 s for a million of
    these.

    >>> any_of({"<s>", "<sep>", "</s>"})
    '<(?:/s>|s(?:>|ep>))'
    """
    if len(texts) < 2:
        return "".join(map(re.escape, texts))
    start = os.path.commonprefix(list(texts))  # noqa: RUF071  # a prefix in characters is intended
    rests: dict[str, set[str]] = {}
    for rest in (text[len(start) :] for text in texts):
        rests.setdefault(rest[:1], set()).add(rest)
    is_whole = rests.pop("", None) is not None
    branches = "|".join(any_of(rests[first]) for first in sorted(rests))
    return f"{re.escape(start)}(?:{branches}){'?' if is_whole else ''}"


@runtime_checkable
class SpelledMapping(Protocol):
    """A mapping that is written as its text `spelling`."""

    spelling: str

    def respelled(self, value: Mapping[Any, object], change: Callable[[str], str]) -> object:
        """Return another mapping, whose text is changed as those in it were."""
        ...


def _texts(value: object) -> Iterator[str]:
    """Yield every text in lists, tuples and mappings, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        children = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        for child in children:
            yield from _texts(child)
        if isinstance(value, Mapping) and isinstance(value, SpelledMapping):
            yield value.spelling


def _map_texts(value: object, change: Callable[[str], str]) -> object:
    """Return a copy with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        mapped = {_map_texts(key, change): _map_texts(child, change) for key, child in value.items()}
        return value.respelled(mapped, change) if isinstance(value, SpelledMapping) else mapped
    if isinstance(value, list | tuple):
        return [_map_texts(child, change) for child in value]
    return value

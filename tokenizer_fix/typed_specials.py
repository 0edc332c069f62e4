"""Keep what clients type apart from what templates write, where both look like a control token.

A chat template writes control tokens as text around what clients wrote. In the rendered text, the `<|im_end|>` that
ends a turn looks like one that a client typed. Therefore the typed ones are put between marks before the template sees
them, and a text with marks is encoded by a tokenizer whose control tokens are spelled as no client types them.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import tokenizers

from .encoder import Encoder, LongTextTurns
from .errors import InvalidText
from .probe import twin_of
from .profile import AddedToken

BEGIN, END, QUOTE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters, which Unicode keeps for uses like this one
_PART = 1 << 16  # characters that are searched in a millisecond or ten
_SYMBOL = re.compile(r"[^\w\s]")


def _without_marks(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "").replace(QUOTE, "")


def written_ids(added_tokens: Iterable[AddedToken], template_texts: Iterable[str]) -> frozenset[int]:
    """The added tokens that a template writes, but for white space and words: those are text wherever they stand.

    A token counts also where the library would not find it: Llama-2's legacy tokenizer finds some behind a space only,
    which a client may type.

    >>> written_ids([AddedToken(7, "<end>", False), AddedToken(8, "user", False)], ["user: <end>"])
    frozenset({7})
    """
    texts = list(template_texts)
    ids = {token.text: token.id for token in added_tokens if _SYMBOL.search(token.text)}
    somewhere = {token for token in ids if token and any(token in text for text in texts)}  # few: Gemma adds 6,000
    written = re.compile(any_of(somewhere) or "(?!)")
    return frozenset(ids[match[0]] for text in texts for match in written.finditer(text))


class TypedSpecials:
    """Marks and encodes for one tokenizer.

    A token is typed between both marks: a template that cuts a text at a token leaves one alone, perhaps beside a
    token that it writes.

    >>> typed.mark({"content": "I typed <|im_end|>"})                         # doctest: +SKIP
    {'content': 'I typed \\ufdd0<|im_end|>\\ufdd1'}

    Args:
        parsing: the library's tokenizer, which finds added tokens in a text.
        added_tokens: those that stand outside its pieces.
        control_ids: the added tokens that are control.
        turns: of long texts, which may be shared with others.
    """

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        added_tokens: Sequence[AddedToken],
        control_ids: Container[int],
        turns: LongTextTurns | None = None,
    ) -> None:
        self._parsing = parsing
        self._turns = LongTextTurns() if turns is None else turns
        self._ids = {token.text: token.id for token in added_tokens}
        self._controls = frozenset(token.text for token in added_tokens if token.id in control_ids)
        control = any_of(self._controls - {""}) or "(?!)"  # which is nowhere
        self._longest = max(map(len, self._controls), default=0)
        self._control = re.compile(control)
        self._marked_control = re.compile(f"{BEGIN}(?P<typed>{control}){END}|(?P<written>{control})")

    def mark(self, value: object) -> object:
        """`value` with marks around each control token in its texts, which may lie in lists and mappings; `value`
        itself where there is none. Characters that marks are made of are left out beside one.

        Raises:
            InvalidText: it is nested too deeply.
        """
        try:
            return self._marked(value)
        except RecursionError as error:
            raise InvalidText("lists and mappings are nested too deeply; send flatter ones") from error

    def unmark(self, text: str) -> str:
        """The text without marks."""
        return text.replace(BEGIN, "").replace(END, "")

    def with_marks(self, rendered: str, marked: str) -> str:
        """A rendering with the marks of another one, which was made of marked texts.

        A template may look at the white space beside a token that it takes out, and find a mark. What differs in more
        than white space stays as it was made of marked texts: so no typed token is ever without marks.
        """
        unmarked = self.unmark(marked)
        if unmarked == rendered or "".join(unmarked.split()) != "".join(rendered.split()):
            return marked
        found = list(self._marked_control.finditer(marked))
        there = [match[0] for match in self._control.finditer(rendered)]
        if there != [match["typed"] or match["written"] for match in found]:
            return marked
        are_typed = (match["typed"] is not None for match in found)
        return self._control.sub(lambda match: f"{BEGIN}{match[0]}{END}" if next(are_typed) else match[0], rendered)

    def encode(self, marked: str, *, max_tokens: int | None = None) -> list[int]:
        """The ids of a text in which control tokens are text where they are marked; no bos is added.

        Raises:
            InvalidText: a marked one cannot be encoded as text.
            TooManyTokens: there are more than `max_tokens`.
        """
        # Where the library takes none of the written ones for a token, it is text: it is quoted no more.
        quoted, places = self._quote(marked)
        ids, found = self._encode_quoted(quoted, max_tokens)
        if len(found) < len(places):
            quoted, places = self._quote(marked, [_is_within(place, found) for place in places])
            ids, found = self._encode_quoted(quoted, max_tokens)
        # A vocabulary may hold a control token among its pieces, within the model's own reach (T5's Unigram does).
        if len(found) != len(places):
            raise InvalidText("the text holds a control token that cannot be encoded as plain text here; remove it")
        real = self._real_ids
        return [real.get(token_id, token_id) for token_id in ids]

    def _quote(self, marked: str, is_token: Sequence[bool] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The text without marks, with quotes around the written control tokens; and where those stand in it.

        `is_token` says which of them are to be quoted, in order; by default all.
        """
        parts: list[str] = []
        places: list[tuple[int, int]] = []
        num_characters = num_written = done = 0
        for match in self._marked_control.finditer(marked):
            before, text = self.unmark(marked[done : match.start()]), match["typed"]
            num_characters += len(before)
            if text is None:
                text = match["written"]
                if is_token is None or is_token[num_written]:
                    text = self._quoted(text)
                    places.append((num_characters, num_characters + len(text)))
                num_written += 1
            num_characters += len(text)
            parts += (before, text)
            done = match.end()
        return "".join(parts) + self.unmark(marked[done:]), places

    def _encode_quoted(self, text: str, max_tokens: int | None) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids in `_quoting`, and where the control tokens among them stand in the text."""
        with self._turns.for_text(text):
            encoding = Encoder(self._quoting, self._turns).encode(text, max_tokens)
            places = zip(encoding.ids, encoding.offsets, strict=True)
            return encoding.ids, [place for token_id, place in places if token_id in self._quoted_ids]

    def _marked(self, value: object) -> object:
        texts = list(_texts(value))
        if not any(map(self._has_control, texts)):
            return value
        # Texts have no use for noncharacters: those that marks are made of go, so that no web page that a tool has
        # read ends the conversation.
        # Of `sub` only a function lets other threads go on between two places.
        return _map_texts(
            value, lambda text: self._control.sub(lambda found: f"{BEGIN}{found[0]}{END}", _without_marks(text))
        )

    def _has_control(self, text: str) -> bool:
        """Whether a control token is in the text; looked for in parts, between which other threads go on."""
        starts = range(0, len(text), _PART)
        return any(self._control.search(text, start, start + _PART + self._longest) for start in starts)

    @cached_property
    def _quoting(self) -> tokenizers.Tokenizer:
        """The tokenizer with quoted control tokens; their ids are other ones, for the library numbers them anew."""
        return twin_of(self._parsing, self._quoted)

    @cached_property
    def _real_ids(self) -> Mapping[int, int]:
        """The ids of added tokens, by those that they have in `_quoting`."""
        found = ((self._quoting.token_to_id(self._quoted(text)), token_id) for text, token_id in self._ids.items())
        return {quoting_id: token_id for quoting_id, token_id in found if quoting_id is not None}

    @cached_property
    def _quoted_ids(self) -> frozenset[int]:
        """Control tokens in `_quoting`: those written, and those that it still has among its pieces."""
        spellings = (spelling for text in self._controls for spelling in (self._quoted(text), text))
        return frozenset(found for found in map(self._quoting.token_to_id, spellings) if found is not None)

    def _quoted(self, text: str) -> str:
        return f"{QUOTE}{text}{QUOTE}" if text in self._controls else text


def _is_within(place: tuple[int, int], found: Sequence[tuple[int, int]]) -> bool:
    """Whether a place, `[start, stop)`, lies in one of those found, which are in order."""
    index = bisect_right(found, place[0], key=itemgetter(0)) - 1
    return index >= 0 and place[1] <= found[index][1]


def any_of(texts: Set[str]) -> str:
    """A pattern that matches the longest of `texts`; what several begin with is looked at once.

    Gemma has 6,000 control tokens that begin with `<`: one after the other, they took 18 s for a million of these.

    >>> any_of({"<s>", "<sep>", "</s>"})
    '<(?:/s>|s(?:>|ep>))'
    """
    if len(texts) < 2:
        return "".join(map(re.escape, texts))
    start = os.path.commonprefix(list(texts))  # noqa: RUF071  # character by character is meant
    rests: dict[str, set[str]] = {}
    for rest in (text[len(start) :] for text in texts):
        rests.setdefault(rest[:1], set()).add(rest)
    is_whole = rests.pop("", None) is not None
    branches = "|".join(any_of(rests[first]) for first in sorted(rests))
    return f"{re.escape(start)}(?:{branches}){'?' if is_whole else ''}"


@runtime_checkable
class Spelled(Protocol):
    """A mapping with a text that is written in its place."""

    spelling: str

    def respelled(self, value: Mapping[Any, object], change: Callable[[str], str]) -> object:
        """Another mapping, whose text is changed as those in it were."""
        ...


def _texts(value: object) -> Iterator[str]:
    """Every text in lists, tuples and mappings, their keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        children = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        for child in children:
            yield from _texts(child)
        if isinstance(value, Mapping) and isinstance(value, Spelled):
            yield value.spelling


def _map_texts(value: object, change: Callable[[str], str]) -> object:
    """The same with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        mapped = {_map_texts(key, change): _map_texts(child, change) for key, child in value.items()}
        return value.respelled(mapped, change) if isinstance(value, Spelled) else mapped
    if isinstance(value, list | tuple):
        return [_map_texts(child, change) for child in value]
    return value

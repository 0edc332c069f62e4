"""Walk the tree by what its tokens spell: find the run that is the same text as a prompt, whatever its ids.

A model's own ids are often not the encoding of their text. Where a run was generated it is followed as long as it
spells the prompt's bytes between the same special tokens; what clients wrote is followed by the prompt's own ids alone,
but for the few tokens right before a generated run, whose encoding changed when the reply was put behind them. Knows
nodes and aliases; a cursor knows the prompt, and pages are looked up afterwards, by the ids that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from radixlm.tokenizer_fix import SpelledPrompt

from ..artifact.manifest import PAGE_SIZE
from .prompt_cursor import PromptCursor, PromptText, tokens_of
from .radix_node import TOKEN_BYTES, Node, encode_key
from .reply_alias import ReplyAlias

EXACT, TEXT, ALIAS = 0, 1, 2  # how an id of a prompt was found; weaker and weaker
FEW_CHILDREN = 8  # so many are simply tried
MAX_IN_VAIN = 256  # runs that are followed one after the other and lead no further: some 20 ms

FindAliases = Callable[[int, Callable[[], bytes]], Sequence[ReplyAlias]]
"""Of the replies to a prompt of so many tokens, whose ids are made only if there may be any."""


class AliasSpan(NamedTuple):
    """The used ids `[start, stop)` stand for a rendered reply that ends at `offset` of the prompt's text."""

    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Walked:
    """The ids to use for a prompt, of which the tree has the first `len(kinds)`; `kinds` has a byte for each.

    The tree has the prompt's text up to byte `reach`.
    """

    ids: tuple[int, ...]
    kinds: bytes
    reach: int


@dataclass(frozen=True)
class _Place:
    """Token `done` of a node's run, where the prompt goes on at `offset`."""

    node: Node
    done: int
    offset: int
    spans: tuple[AliasSpan, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens from the root to here."""
        return self.node.start * PAGE_SIZE + self.done

    def key(self) -> bytes:
        """The ids from the root to here."""
        runs: list[bytes | bytearray] = [self.node.run[: self.done * TOKEN_BYTES]]
        node = self.node.parent
        while node is not None:
            runs.append(node.run)
            node = node.parent
        return b"".join(reversed(runs))


@dataclass
class _Visit:
    """A run to follow from token `done` on; `reply` is where the generated run began that the walk is in, if any.

    It leads no further than to the offset `bound`.
    """

    node: Node
    done: int
    cursor: PromptCursor
    reply: _Place | None
    spans: tuple[AliasSpan, ...]
    bound: int | None = None


class TextWalk:
    """One search; `run` gives the best walk.

    Args:
        num_match: how many of the prompt's ids may be looked up.
        find_aliases: replies that a later prompt renders as another text.
    """

    def __init__(self, root: Node, prompt: SpelledPrompt, num_match: int, find_aliases: FindAliases) -> None:
        self._root, self._prompt, self._find_aliases = root, PromptText(prompt, num_match), find_aliases
        self._visits: list[_Visit] = []
        self._tried: set[tuple[int, int, tuple[int, ...], int]] = set()  # places where aliases were looked for
        self._best_reach = -1
        self._best: tuple[_Place, PromptCursor] | None = None

    def run(self) -> Walked:
        """Return the walk that covers the most of the prompt's text, of those that were tried.

        Thousands of replies may spell the same text in other ids, and each could be followed. The search ends with
        `MAX_IN_VAIN` that led no further. What is found then may be less than what the prompt's own ids find.
        """
        start = PromptCursor(self._prompt)
        self._leave(self._root, 0, start, ())
        self._go_below(_Visit(self._root, 0, start, None, ()))
        num_in_vain = 0
        while self._visits and num_in_vain < MAX_IN_VAIN:
            visit, reach = self._visits.pop(), self._best_reach
            if visit.bound is None or visit.bound > reach:
                self._follow(visit)
                num_in_vain = 0 if self._best_reach > reach else num_in_vain + 1
        assert self._best is not None
        place, cursor = self._best
        path, rest = tokens_of(place.key(), 0, place.num_tokens), cursor.rest()
        assert rest is not None
        ids = (*path, *rest)
        kinds = _kinds_of(self._prompt.spelled, ids, place.spans)
        return Walked(ids, kinds[: len(ids) - 1], self._best_reach)

    def _follow(self, visit: _Visit) -> None:
        """Go along a run as far as it goes, then to what is below, or back to where the reply began."""
        node, cursor = visit.node, visit.cursor
        num_tokens, safe, sure = node.num_tokens, None, None
        while True:
            if cursor.may_leave:
                safe = (visit.done, cursor.copy())
                sure = safe if cursor.is_sure else sure
            if visit.done == num_tokens:
                break
            is_generated = node.generated[visit.done]
            if not is_generated:
                visit.reply = None
            elif visit.reply is None:
                visit.reply = _Place(node, visit.done, cursor.offset, visit.spans)
            change = node.generated.find(1 - is_generated, visit.done)
            count = cursor.step(node.run, visit.done, num_tokens if change < 0 else change, bool(is_generated))
            if not count:
                break
            visit.done += count
        for left in (safe, sure):
            if left is not None and self._leave(node, *left, visit.spans):
                break
        if visit.done == num_tokens:
            self._go_below(visit)
        elif visit.reply is not None and not cursor.is_alias:
            self._try_aliases(visit.reply)

    def _leave(self, node: Node, done: int, cursor: PromptCursor, spans: tuple[AliasSpan, ...]) -> bool:
        """End a walk here, if it is the best so far; whether the prompt can be gone on with."""
        if cursor.offset > self._best_reach:
            if cursor.rest(0) is None:
                return False
            self._best_reach, self._best = cursor.offset, (_Place(node, done, cursor.offset, spans), cursor)
        return True

    def _go_below(self, visit: _Visit) -> None:
        node, cursor = visit.node, visit.cursor
        if len(node.children) > FEW_CHILDREN:
            if visit.reply is not None and not cursor.is_alias:
                self._try_aliases(visit.reply)
            self._try_aliases_below(visit)
        self._visit_children(node, cursor, visit.reply, visit.spans)

    def _visit_children(
        self, node: Node, cursor: PromptCursor, reply: _Place | None, spans: tuple[AliasSpan, ...]
    ) -> None:
        """Follow those that may go on as the prompt does, the likeliest first."""
        children: Iterable[tuple[Node, int | None]] = ((child, None) for child in node.children)
        if len(node.children) > FEW_CHILDREN:
            children = self._likely_children(node, cursor)
        for child, most in children:
            bound = None if most is None else cursor.offset + most
            self._visits.append(_Visit(child, 0, cursor.copy(), reply, spans, bound))

    def _likely_children(self, node: Node, cursor: PromptCursor) -> Iterable[tuple[Node, int | None]]:
        """Of many children those that may go on as the prompt does, the likeliest last, and for how many bytes."""
        likely = dict(node.spelled_like(cursor.next_text(), self._prompt.spelled.spell))
        expected, common = node.nearest(cursor.next_page(), 0)
        if expected is not None and common:
            likely.pop(expected, None)
            likely[expected] = None
        return likely.items()

    def _try_aliases(self, reply: _Place) -> None:
        """Go back to where a reply began that the walk cannot follow, and take it for what it is rendered as."""
        node = reply.node
        if node.parent is None or reply.done >= PAGE_SIZE:
            self._expect_aliases(reply, (), reply.offset)
        else:  # siblings begin with the same rows: which of them goes on with the alias, its ids say
            above = _Place(node.parent, node.parent.num_tokens, reply.offset, reply.spans)
            self._expect_aliases(above, node.tokens(0, reply.done), reply.offset)

    def _try_aliases_below(self, visit: _Visit) -> None:
        """The same where too many children begin with a reply, or with a prompt's last tokens, to go to each."""
        above = _Place(visit.node, visit.done, visit.cursor.offset, visit.spans)
        for before, offset in visit.cursor.next_places():
            self._expect_aliases(above, before, offset)

    def _expect_aliases(self, above: _Place, before: tuple[int, ...], offset: int) -> None:
        """Visit what is at a place, or below it, for the ids `before` and then a reply that is rendered at `offset`."""
        length = above.num_tokens + len(before)
        tried = (length, above.node.node_id, before, offset)
        if tried in self._tried:
            return
        self._tried.add(tried)
        for alias in self._find_aliases(length, lambda: above.key() + encode_key(before)):
            end = offset + len(alias.rendered)
            if end > self._prompt.end or not self._prompt.has_reply(alias, offset):
                continue
            if self._prompt.tail(end) is not None:
                cursor = PromptCursor(self._prompt, end, alias=alias.ids, before=before)
                spans = (*above.spans, AliasSpan(length, length + len(alias.ids), end))
                if above.done == above.node.num_tokens:
                    self._visit_children(above.node, cursor, None, spans)
                else:
                    self._visits.append(_Visit(above.node, above.done, cursor, None, spans))


def _kinds_of(prompt: SpelledPrompt, ids: Sequence[int], spans: Sequence[AliasSpan]) -> bytes:
    """A byte an id: EXACT where the prompt has the same id at the same place of its text, else TEXT, or ALIAS."""
    kinds = np.full(len(ids), TEXT, np.uint8)
    start, offset = 0, 0
    for span in (*spans, AliasSpan(len(ids), len(ids), 0)):
        kinds[start : span.start][_are_canonical(prompt, ids[start : span.start], offset)] = EXACT
        kinds[span.start : span.stop] = ALIAS
        start, offset = span.stop, span.offset
    return kinds.tobytes()


def _are_canonical(prompt: SpelledPrompt, ids: Sequence[int], offset: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of `ids`, spelling the text from `offset` on, are the prompt's at their place; bool[len(ids)]."""
    lengths = np.fromiter(map(len, map(prompt.spell, ids)), np.int64, len(ids))
    offsets = offset + np.cumsum(lengths) - lengths
    starts = np.array(prompt.starts[:-1])
    index = np.minimum(np.searchsorted(starts, offsets), len(starts) - 1)
    are_at_place = np.equal(starts[index], offsets)
    found: np.ndarray[Any, np.dtype[np.bool_]] = are_at_place & np.equal(np.array(prompt.ids)[index], ids)
    return found

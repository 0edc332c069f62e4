"""Match a prompt with the tree by text: find the run that spells the same text, whatever its ids.

A model's generated ids are often not the encoding of their text. A generated run is followed as long as it spells the
prompt's bytes between the same special tokens. Client text is followed by the prompt's own ids alone. The exception are
the few tokens right before a generated run, whose encoding changed when the reply came after them. Knows nodes and
aliases; a cursor knows the prompt. Pages are looked up afterwards, by the resulting ids.
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

EXACT, TEXT, ALIAS = 0, 1, 2  # kinds of match of one id, strongest first
FEW_CHILDREN = 8  # up to this number all children are tried
MAX_FUTILE_RUNS = 256  # runs followed in a row that match no more text: some 20 ms

FindAliases = Callable[[int, Callable[[], bytes]], Sequence[ReplyAlias]]
"""Return the aliases of replies to a prompt of this many tokens; its key is made only if there can be any."""


class AliasSpan(NamedTuple):
    """The matched ids `[start, stop)` that replace a rendered reply, which ends at `offset` of the prompt's text."""

    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class TextMatch:
    """The ids to use for a prompt. The tree has the first `len(kinds)` of them; `kinds` has a byte for each.

    The tree has the prompt's text up to byte `reach`.
    """

    ids: tuple[int, ...]
    kinds: bytes
    reach: int


@dataclass(frozen=True)
class _TreePosition:
    """A position in the tree, before token `done` of a node's run, where the prompt is at `offset`."""

    node: Node
    done: int
    offset: int
    spans: tuple[AliasSpan, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the root to here."""
        return self.node.start * PAGE_SIZE + self.done

    def key(self) -> bytes:
        """Return the ids from the root to here as a key."""
        runs: list[bytes | bytearray] = [self.node.run[: self.done * TOKEN_BYTES]]
        node = self.node.parent
        while node is not None:
            runs.append(node.run)
            node = node.parent
        return b"".join(reversed(runs))


@dataclass
class _Visit:
    """A run to follow from token `done` on. `reply` is the start of the generated run that the walk is in, if any.

    Following it matches no text beyond the offset `bound`.
    """

    node: Node
    done: int
    cursor: PromptCursor
    reply: _TreePosition | None
    spans: tuple[AliasSpan, ...]
    bound: int | None = None


class TextWalk:
    """One search of the tree by text; `run` returns the best match.

    Args:
        num_match: number of the prompt's first ids that can match.
        find_aliases: finds replies that a later prompt renders as another text.
    """

    def __init__(self, root: Node, prompt: SpelledPrompt, num_match: int, find_aliases: FindAliases) -> None:
        self._root, self._prompt, self._find_aliases = root, PromptText(prompt, num_match), find_aliases
        self._visits: list[_Visit] = []
        self._tried: set[tuple[int, int, tuple[int, ...], int]] = set()  # positions where aliases were searched for
        self._best_reach = -1
        self._best: tuple[_TreePosition, PromptCursor] | None = None

    def run(self) -> TextMatch:
        """Return the match that covers the most of the prompt's text, among those that were tried.

        Thousands of replies can spell the same text in other ids, and each could be followed. The search ends after
        `MAX_FUTILE_RUNS` runs in a row that matched no more text. Its result can then be shorter than a match by ids.
        """
        start = PromptCursor(self._prompt)
        self._record_match(self._root, 0, start, ())
        self._visit_below(_Visit(self._root, 0, start, None, ()))
        num_futile = 0
        while self._visits and num_futile < MAX_FUTILE_RUNS:
            visit, reach = self._visits.pop(), self._best_reach
            if visit.bound is None or visit.bound > reach:
                self._follow_run(visit)
                num_futile = 0 if self._best_reach > reach else num_futile + 1
        assert self._best is not None
        place, cursor = self._best
        path, rest = tokens_of(place.key(), 0, place.num_tokens), cursor.rest()
        assert rest is not None
        ids = (*path, *rest)
        kinds = _kinds_of(self._prompt.spelled, ids, place.spans)
        return TextMatch(ids, kinds[: len(ids) - 1], self._best_reach)

    def _follow_run(self, visit: _Visit) -> None:
        """Follow a run as far as it spells the prompt, record the match, and schedule what to follow next.

        That is the run's children if all of it matched. Else, if a generated reply did not match, the reply's beginning
        is tried again with the texts that a chat template makes of it (aliases).
        """
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
                visit.reply = _TreePosition(node, visit.done, cursor.offset, visit.spans)
            change = node.generated.find(1 - is_generated, visit.done)
            count = cursor.step(node.run, visit.done, num_tokens if change < 0 else change, bool(is_generated))
            if not count:
                break
            visit.done += count
        for left in (safe, sure):
            if left is not None and self._record_match(node, *left, visit.spans):
                break
        if visit.done == num_tokens:
            self._visit_below(visit)
        elif visit.reply is not None and not cursor.is_alias:
            self._try_aliases(visit.reply)

    def _record_match(self, node: Node, done: int, cursor: PromptCursor, spans: tuple[AliasSpan, ...]) -> bool:
        """Record a position if it covers the most text so far; return whether the prompt's rest can follow there."""
        if cursor.offset > self._best_reach:
            if cursor.rest(0) is None:
                return False
            self._best_reach, self._best = cursor.offset, (_TreePosition(node, done, cursor.offset, spans), cursor)
        return True

    def _visit_below(self, visit: _Visit) -> None:
        """Schedule the children of a run that matched as a whole.

        With too many to visit each, also look up aliases of the reply that the run is in, and of those in the next
        page.
        """
        node, cursor = visit.node, visit.cursor
        if len(node.children) > FEW_CHILDREN:
            if visit.reply is not None and not cursor.is_alias:
                self._try_aliases(visit.reply)
            self._try_aliases_below(visit)
        self._visit_children(node, cursor, visit.reply, visit.spans)

    def _visit_children(
        self, node: Node, cursor: PromptCursor, reply: _TreePosition | None, spans: tuple[AliasSpan, ...]
    ) -> None:
        """Schedule the children that can continue the prompt, the likeliest to be followed first."""
        children: Iterable[tuple[Node, int | None]] = ((child, None) for child in node.children)
        if len(node.children) > FEW_CHILDREN:
            children = self._likely_children(node, cursor)
        for child, most in children:
            bound = None if most is None else cursor.offset + most
            self._visits.append(_Visit(child, 0, cursor.copy(), reply, spans, bound))

    def _likely_children(self, node: Node, cursor: PromptCursor) -> Iterable[tuple[Node, int | None]]:
        """Return those of many children that can continue the prompt, the likeliest last, with a bound in bytes."""
        likely = dict(node.spelled_like(cursor.next_text(), self._prompt.spelled.spell))
        expected, common = node.nearest(cursor.next_page(), 0)
        if expected is not None and common:
            likely.pop(expected, None)
            likely[expected] = None
        return likely.items()

    def _try_aliases(self, reply: _TreePosition) -> None:
        """Go back to the start of a reply that the walk cannot follow, and try its aliases there."""
        node = reply.node
        if node.parent is None or reply.done >= PAGE_SIZE:
            self._expect_aliases(reply, (), reply.offset)
        else:  # siblings begin with the same rows: the alias's ids tell which of them to follow
            above = _TreePosition(node.parent, node.parent.num_tokens, reply.offset, reply.spans)
            self._expect_aliases(above, node.tokens(0, reply.done), reply.offset)

    def _try_aliases_below(self, visit: _Visit) -> None:
        """Try the aliases of replies in the next page, if there are too many children to visit each."""
        above = _TreePosition(visit.node, visit.done, visit.cursor.offset, visit.spans)
        for before, offset in visit.cursor.reply_positions():
            self._expect_aliases(above, before, offset)

    def _expect_aliases(self, above: _TreePosition, before: tuple[int, ...], offset: int) -> None:
        """Find recorded replies whose rendered text is at `offset` of the prompt, and schedule visits along their ids.

        The ids start at the position `above`, after the ids `before`. Each position is tried once.
        """
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
    """Return a byte per id: EXACT if the prompt has the same id at the same place of its text, else TEXT or ALIAS."""
    kinds = np.full(len(ids), TEXT, np.uint8)
    start, offset = 0, 0
    for span in (*spans, AliasSpan(len(ids), len(ids), 0)):
        kinds[start : span.start][_are_canonical(prompt, ids[start : span.start], offset)] = EXACT
        kinds[span.start : span.stop] = ALIAS
        start, offset = span.stop, span.offset
    return kinds.tobytes()


def _are_canonical(prompt: SpelledPrompt, ids: Sequence[int], offset: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which of `ids`, spelling the text from `offset` on, are the prompt's at their place; bool[len(ids)]."""
    lengths = np.fromiter(map(len, map(prompt.spell, ids)), np.int64, len(ids))
    offsets = offset + np.cumsum(lengths) - lengths
    starts = np.array(prompt.starts[:-1])
    index = np.minimum(np.searchsorted(starts, offsets), len(starts) - 1)
    are_at_place = np.equal(starts[index], offsets)
    found: np.ndarray[Any, np.dtype[np.bool_]] = are_at_place & np.equal(np.array(prompt.ids)[index], ids)
    return found

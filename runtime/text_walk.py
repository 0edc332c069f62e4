"""Walk the tree by what its tokens spell: find the run that is the same text as a prompt, whatever its ids.

A model's own ids are often not the encoding of their text. Where a run was generated it is followed as long as it
spells the prompt's bytes between the same special tokens; what clients wrote is followed by the prompt's own ids alone,
but for the few tokens right before a generated run, whose encoding changed when the reply was put behind them. Knows
nodes, bytes and ids; pages are looked up afterwards, by the ids that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from radixlm.tokenizer_fix import SpelledPrompt

from .manifest import PAGE_SIZE
from .radix_node import TOKEN_BYTES, Node, encode_key, num_common_tokens, token_at
from .reply_alias import ReplyAlias

EXACT, TEXT, ALIAS = 0, 1, 2  # how a token was found, weaker and weaker
FEW_CHILDREN = 8  # so many are simply tried
MAX_PAGE_TEXT = 4096  # bytes: what a page spells is hardly more

FindAliases = Callable[[Sequence[int]], Sequence[ReplyAlias]]  # of the replies to exactly these ids


@dataclass(frozen=True)
class Walked:
    """The ids to use for a prompt, of which the tree has the first `len(kinds)`; `kinds` says how each was found."""

    ids: tuple[int, ...]
    kinds: bytes


@dataclass(frozen=True)
class _Plan:
    """Which ids come next: `extra`, then the prompt's own from `index` on. Text up to `offset` is spelled.

    `extra` is None inside one of the prompt's tokens, where nothing is expected until it is asked for.
    """

    offset: int
    extra: tuple[int, ...] | None
    index: int
    kind: int = EXACT  # of `extra`


@dataclass
class _Trail:
    """The tokens of the walk so far, a piece for each node, and how each was found."""

    before: _Trail | None
    length_before: int
    ids: list[int] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)

    @property
    def length(self) -> int:
        """Tokens up to here."""
        return self.length_before + len(self.ids)

    def joined(self, length: int) -> tuple[list[int], bytes]:
        """The first `length` ids and kinds."""
        pieces: list[_Trail] = []
        trail: _Trail | None = self
        while trail is not None:
            pieces.append(trail)
            trail = trail.before
        ids = [token_id for piece in reversed(pieces) for token_id in piece.ids]
        return ids[:length], b"".join(piece.kinds for piece in reversed(pieces))[:length]


@dataclass(frozen=True)
class _Place:
    """Token `done` of a node's run, after `length` tokens of the walk."""

    node: Node
    done: int
    trail: _Trail
    length: int
    plan: _Plan


@dataclass(frozen=True)
class _Visit:
    """A run to follow from token `done` on.

    `stretch` is where the generated run began that the last token belongs to, if it does; `is_pending` says that the
    last tokens are a client's, followed by what they spell, and count only if a generated one comes next.
    """

    node: Node
    done: int
    plan: _Plan
    trail: _Trail
    stretch: _Place | None
    is_pending: bool


class TextWalk:
    """One search; `run` gives the best walk.

    Args:
        key_length: how many of the prompt's ids may be looked up.
        find_aliases: replies that a later prompt renders as another text.
    """

    def __init__(self, root: Node, prompt: SpelledPrompt, key_length: int, find_aliases: FindAliases) -> None:
        self._root, self._prompt, self._find_aliases = root, prompt, find_aliases
        self._ids = tuple(prompt.ids[:key_length])
        self._key = encode_key(self._ids)
        self._end = prompt.starts[key_length]
        self._visits: list[_Visit] = []
        self._best_reach = -1
        self._best: tuple[_Trail, int, _Plan] | None = None

    def run(self) -> Walked:
        """The walk that covers the most of the prompt's text."""
        trail, start = _Trail(None, 0), self._canonical(0)
        self._leave(trail, 0, start)
        self._visit_children(self._root, start, trail, None, False)
        while self._visits:
            self._follow(self._visits.pop())
        assert self._best is not None
        trail, length, plan = self._best
        path, kinds = trail.joined(length)
        extra, index = self._expected(plan)
        ids = (*path, *extra, *self._prompt.ids[index:])
        return Walked(ids, kinds[: len(ids) - 1])

    def _follow(self, visit: _Visit) -> None:
        node, done, plan, stretch, is_pending = visit.node, visit.done, visit.plan, visit.stretch, visit.is_pending
        trail, num_tokens = visit.trail, len(node.run) // TOKEN_BYTES
        safe = None if is_pending or not self._may_leave(plan) else (trail.length, plan)
        safe_for_sure = safe if plan.extra is not None else None
        while done < num_tokens:
            count = self._num_canonical(node, done, plan)
            if count:
                last_of_client = node.generated[done : done + count].rfind(0)
                ahead = last_of_client + 1
                if last_of_client >= 0:
                    stretch = None
                if ahead < count:
                    is_pending = False
                    stretch = stretch or _Place(
                        node, done + ahead, trail, trail.length + ahead, self._canonical(plan.index + ahead)
                    )
                trail.ids += self._ids[plan.index : plan.index + count]
                trail.kinds += bytes(count)
                done, plan = done + count, self._canonical(plan.index + count)
            else:
                token, is_generated = token_at(node.run, done), bool(node.generated[done])
                step = self._step(token, plan, is_generated)
                if step is None:
                    break
                next_plan, kind, is_expected = step
                if not is_generated:
                    stretch = None
                elif stretch is None:
                    stretch = _Place(node, done, trail, trail.length, plan)
                is_pending = not is_generated and (is_pending or not is_expected)
                trail.ids.append(token)
                trail.kinds.append(kind)
                done, plan = done + 1, next_plan
            if not is_pending and self._may_leave(plan):
                safe = (trail.length, plan)
                safe_for_sure = safe if plan.extra is not None else safe_for_sure
        if safe is not None and safe[1].extra is None and self._prompt.tail(safe[1].offset) is None:
            safe = safe_for_sure
        if safe is not None:
            self._leave(trail, *safe)
        if done == num_tokens:
            self._visit_children(node, plan, trail, stretch, is_pending)
        elif plan.kind != ALIAS:
            if stretch is None and node.generated[done]:
                stretch = _Place(node, done, trail, trail.length, plan)
            if stretch is not None:
                self._visit_aliases(stretch)

    def _num_canonical(self, node: Node, done: int, plan: _Plan) -> int:
        """How many tokens of the run are the prompt's own."""
        if plan.extra != ():
            return 0
        return num_common_tokens(node.run, self._key, done * TOKEN_BYTES, plan.index * TOKEN_BYTES)

    def _step(self, token: int, plan: _Plan, is_generated: bool) -> tuple[_Plan, int, bool] | None:
        """After `token`: the plan, how it was found, whether it was expected; None if the text goes on otherwise."""
        if plan.kind == ALIAS:
            assert plan.extra
            return (
                (self._after(plan, plan.extra, plan.index, plan.offset), ALIAS, True)
                if token == plan.extra[0]
                else None
            )
        if is_generated and (spelled := self._spelled(token, plan.offset)) is not None:
            return spelled, TEXT, False
        extra, index = self._expected(plan)
        if extra and token == extra[0]:
            offset = plan.offset + len(self._prompt.spell(token))
            return self._after(plan, extra, index, offset), TEXT, True
        if not extra and index < len(self._ids) and token == self._ids[index]:
            return self._canonical(index + 1), EXACT, True
        if not is_generated and (spelled := self._spelled(token, plan.offset)) is not None:
            return spelled, TEXT, False
        return None

    def _after(self, plan: _Plan, extra: tuple[int, ...], index: int, offset: int) -> _Plan:
        return _Plan(offset, extra[1:], index, plan.kind) if extra[1:] else self._canonical(index)

    def _spelled(self, token: int, offset: int) -> _Plan | None:
        """The plan after a token that spells what comes next; None if it does not."""
        if self._prompt.is_special(token):
            return None
        spelled = self._prompt.spell(token)
        after = offset + len(spelled)
        if not spelled or after > self._end or not self._prompt.text.startswith(spelled, offset):
            return None
        index = self._prompt.canonical_index(after)
        return _Plan(after, None if index is None else (), index or 0)

    def _expected(self, plan: _Plan) -> tuple[tuple[int, ...], int]:
        """The ids that come next, then the prompt's own from an index on; none where no ids spell the rest."""
        if plan.extra is not None:
            return plan.extra, plan.index
        tail = self._prompt.tail(plan.offset) if self._prompt.is_character_boundary(plan.offset) else None
        return tail or ((), len(self._ids))

    def _canonical(self, index: int) -> _Plan:
        return _Plan(self._prompt.starts[index], (), index)

    def _may_leave(self, plan: _Plan) -> bool:
        return plan.extra is not None or self._prompt.is_character_boundary(plan.offset)

    def _leave(self, trail: _Trail, length: int, plan: _Plan) -> None:
        """End a walk here, if it is the best so far."""
        reach = plan.offset
        if plan.kind == ALIAS and plan.extra:  # what is not there yet does not count
            reach -= sum(len(self._prompt.spell(token_id)) for token_id in plan.extra)
        if reach > self._best_reach:
            self._best_reach, self._best = reach, (trail, length, plan)

    def _visit_children(self, node: Node, plan: _Plan, trail: _Trail, stretch: _Place | None, is_pending: bool) -> None:
        for child in self._candidates(node, plan):
            self._visits.append(_Visit(child, 0, plan, _Trail(trail, trail.length), stretch, is_pending))

    def _candidates(self, node: Node, plan: _Plan) -> Sequence[Node]:
        """Children that may go on as the prompt does, the likeliest last; a few more do no harm."""
        if len(node.children) <= FEW_CHILDREN:
            return node.children
        candidates = {child.node_id: child for child in self._spelled_children(node, plan.offset)}
        extra, index = self._expected(plan)
        expected, common = node.nearest(encode_key((extra + self._ids[index : index + PAGE_SIZE])[:PAGE_SIZE]), 0)
        if expected is not None and common:
            candidates.pop(expected.node_id, None)
            candidates[expected.node_id] = expected
        return list(candidates.values())

    def _spelled_children(self, node: Node, offset: int) -> Iterable[Node]:
        return node.spelled_like(self._prompt.text[offset : offset + MAX_PAGE_TEXT], self._prompt.spell)

    def _visit_aliases(self, stretch: _Place) -> None:
        """Go back to where the reply began that the walk cannot follow, and take it for what it is rendered as."""
        path, kinds = stretch.trail.joined(stretch.length)
        for alias in self._find_aliases(path):
            offset = stretch.plan.offset + len(alias.rendered)
            if not self._prompt.text.startswith(alias.rendered, stretch.plan.offset) or offset > self._end:
                continue
            if (tail := self._prompt.tail(offset)) is not None:
                extra, index = tail
                plan = _Plan(offset, (*alias.ids, *extra), index, ALIAS)
                trail = _Trail(None, 0, path.copy(), bytearray(kinds))
                self._visits.append(_Visit(stretch.node, stretch.done, plan, trail, None, False))

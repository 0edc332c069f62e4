"""By which kinds of match a prefix is found, and why it ends where it does: what cache and prompt have from there on.

Values only: `prefix_match.py` finds the ids, the engine adds their texts. Knows nothing of pages or nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

MAX_IDS_SHOWN = 8
MAX_IDS_COMPARED = 64  # on each side, of which texts are made
MAX_CHANGE = 80  # characters of each side
MAX_BEFORE = 40  # characters that both sides have

# `off`: nothing is found for a request, and nothing is kept of it
MatchPolicy = Literal["exact", "seam", "text", "off"]
# from strong to weak: ids of the prompt's encoding; the same, found without encoding everything again; what the model
# generated where it spells the prompt; a reply that the template renders with other white space
MatchKind = Literal["exact", "seam", "text", "alias"]
WhyKind = Literal[
    "complete", "differs", "retokenized", "not_generated", "evicted", "unseen", "namespace", "no_state", "off"
]


@dataclass(frozen=True)
class Around:
    """Ids around the place where a match ends: of both sides, of the cache, of the prompt."""

    before: tuple[int, ...]
    cached: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class TextChange:
    """What a client has changed: behind `before`, which ends what is equal, the cache says `was`, the prompt `now`."""

    before: str
    was: str
    now: str

    @classmethod
    def of(cls, around: Around, spell: Callable[[int], bytes]) -> TextChange:
        """Cut at the first letter that differs, which may stand within a token."""
        before, was, now = (_text(ids, spell) for ids in (around.before, around.cached, around.wanted))
        num_common = len(os.path.commonprefix([was, now]))  # noqa: RUF071  # letters are meant
        before += was[:num_common]
        return cls(before[-MAX_BEFORE:], was[num_common:][:MAX_CHANGE], now[num_common:][:MAX_CHANGE])


@dataclass(frozen=True)
class WhyNotMore:
    """Why a match ended at token `position`, and the first ids on both sides from there on.

    `complete`: everything that may be reused was (the last token is always computed).
    `differs`: the cache goes on with `cached_ids`; of several runs, with one that shares the most tokens.
    `retokenized`: so it does, in other ids for the same text. The model generated them: matching by text reuses them.
    `not_generated`: the same, but a client wrote them, and what clients wrote is reused by its own encoding only.
    `evicted`: a run that began with the first of `wanted_ids` was cached and is dropped by now.
    `unseen`: nothing cached goes on here, as far as the cache remembers.
    `namespace`: another namespace has more. Only the owner of all namespaces is told: see `radixlm explain-cache`.
    `no_state`: of a recurrent model; keys and values are cached up to `num_with_kv`, a state stands at `position` only.
    `off`: the request's match is `off`, so that nothing was looked for.

    >>> why = WhyNotMore("differs", 40, cached_ids=(1, 2), wanted_ids=(3,), is_generated=True)
    >>> print(why)
    at token 40 the cache has [1, 2], the prompt [3]
    >>> print(why.spelled({1: b"Han", 2: b"zi", 3: b"Hanzi"}.__getitem__, special_ids=()))
    at token 40 the cache has the text of [3] 'Hanzi' as the model generated it, [1, 2] 'Hanzi'; match "text" reuses it
    """

    kind: WhyKind
    position: int
    cached_ids: tuple[int, ...] = ()
    wanted_ids: tuple[int, ...] = ()
    is_generated: bool = False  # whether the model made the first of `cached_ids`
    cached_text: str | None = None  # None: not looked up
    wanted_text: str | None = None
    around: Around | None = field(default=None, compare=False, repr=False)
    change: TextChange | None = field(default=None, compare=False)  # of `differs`, once it is spelled
    num_with_kv: int | None = None  # of `no_state`

    def spelled(self, spell: Callable[[int], bytes], special_ids: Container[int]) -> WhyNotMore:
        """The same with texts; a difference that is none in the text is called by its name.

        Args:
            spell: the bytes of a token.
            special_ids: tokens that are control and no text.
        """
        if self.kind in ("complete", "no_state", "off"):
            return self
        kind = self.kind
        if kind == "differs" and _begin_with_the_same_text(self.cached_ids, self.wanted_ids, spell, special_ids):
            kind = "retokenized" if self.is_generated else "not_generated"
        cached_text = _text(self.cached_ids, spell) if self.cached_ids else None
        change = TextChange.of(self.around, spell) if kind == "differs" and self.around is not None else None
        wanted_text = _text(self.wanted_ids, spell)
        return replace(self, kind=kind, cached_text=cached_text, wanted_text=wanted_text, around=None, change=change)

    def withheld(self) -> WhyNotMore:
        """The same without the cache's side."""
        kind: WhyKind = "differs" if self.kind in ("retokenized", "not_generated") else self.kind
        return replace(self, kind=kind, cached_ids=(), cached_text=None, is_generated=False, around=None, change=None)

    def __str__(self) -> str:
        """One line for humans."""
        cached, wanted = _shown(self.cached_ids, self.cached_text), _shown(self.wanted_ids, self.wanted_text)
        at = f"at token {self.position}"
        return {
            "complete": "all that may be reused was",
            "differs": f"{at} the cache has {cached}, the prompt {wanted}",
            "retokenized": f"{at} the cache has the text of {wanted} as the model generated it, {cached}; "
            'match "text" reuses it',
            "not_generated": f"{at} the cache has the text of {wanted} as a client wrote it, {cached}; that is reused "
            "by its own encoding only",
            "evicted": f"{at} something was cached that went on like {wanted}, and is dropped by now",
            "unseen": f"{at} nothing cached goes on with {wanted}",
            "namespace": f"{at} only another namespace goes on with {wanted}, and namespaces share nothing",
            "no_state": f"no state at token {self.num_with_kv}, the nearest is at {self.position}",
            "off": 'match is "off": nothing is reused for this request, and nothing is kept of it',
        }[self.kind]


def _begin_with_the_same_text(
    left: Sequence[int], right: Sequence[int], spell: Callable[[int], bytes], special_ids: Container[int]
) -> bool:
    """Whether some first ids of both spell the same text, before any special token."""
    ours, theirs = b"", b""
    left, right = list(left), list(right)
    while not ours or ours != theirs:
        is_left = len(ours) <= len(theirs)
        rest = left if is_left else right
        if not rest or rest[0] in special_ids:
            return False
        piece = spell(rest.pop(0))
        if is_left:
            ours += piece
        else:
            theirs += piece
        if not (ours.startswith(theirs) or theirs.startswith(ours)):
            return False
    return True


def _text(ids: Sequence[int], spell: Callable[[int], bytes]) -> str:
    """What ids spell; bytes that are no character are written as `\\xff`, for texts that differ must look so."""
    return b"".join(map(spell, ids)).decode(errors="backslashreplace")


def _shown(ids: tuple[int, ...], text: str | None) -> str:
    if not ids:
        return "something else"
    return f"{list(ids)}" if text is None else f"{list(ids)} {text!r}"

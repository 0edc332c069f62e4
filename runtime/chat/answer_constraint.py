"""A reply that may think before it keeps to a constraint.

Knows the tokens of a format's tags, not what the constraint is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConstraintFailed
from ..model.batch import Int32Array
from .reasoning_format import ReasoningFormat
from .reasoning_splitter import splitter_of
from .scan import RewindableScan
from .token_constraint import (
    ConstraintSource,
    Foresight,
    MinTokens,
    TokenConstraint,
    allowed_of,
    mask_of,
    restore,
    state_of,
)


@dataclass(frozen=True)
class ReasoningTokens:
    """A format in a model's tokens.

    Args:
        begin_ids: the tokens that begin reasoning; none where each part of a reply has a header.
        first_ids: the tokens that begin the first header; none where parts have none.
        gap: the white space between reasoning and its answer, as the template writes it.
        white_ids: the tokens of all pieces of it that are one.
        last_tag: what stands right before the answer, but for white space.
        spilling: the tokens that write what is left of `last_tag`, and words behind it; by what is left.
        decoder: makes what spells a reply token by token.
    """

    format: ReasoningFormat
    begin_ids: Sequence[int]
    first_ids: Sequence[int]
    gap: str
    white_ids: Mapping[str, int]
    last_tag: str
    spilling: Mapping[str, Sequence[int]]
    vocab_size: int
    decoder: Callable[[], RewindableScan[int, str]]


class AnswerConstraint:
    """Lets reasoning be as it is, and holds what follows to a constraint. A reply may end inside its reasoning.

    Where tags are ordinary text, a token may have a tag's end and the answer's beginning, which no constraint could be
    held to: it may not come.

    Args:
        prompt: which may have begun the reasoning.
        source: of the reply behind the reasoning, or of all of it if there is none.
    """

    def __init__(self, tokens: ReasoningTokens, prompt: str, source: ConstraintSource) -> None:
        self._tokens, self._source = tokens, source
        self._splitter = splitter_of(tokens.format, prompt)
        self._decoder = tokens.decoder()
        self._inner: TokenConstraint | None = source.start()  # None: the reply can only be reasoning
        self._is_inside = self._splitter.may_think
        self._is_first = True
        self._begin = [] if self._is_inside else list(tokens.begin_ids)  # what is left of them, while they come
        self._gap = ""  # likewise, of the white space
        self._written = ""  # of the reasoning, the end: as much of it as may begin a tag
        self._thinking_masks: dict[tuple[str, ...], Int32Array] = {}  # by what may be left of the last tag

    @property
    def is_finished(self) -> bool:
        """Whether the reply is complete."""
        is_answer = not self._is_inside and not self._gap
        return is_answer and self._inner is not None and self._inner.is_finished

    def mask(self) -> Int32Array | None:
        """Which tokens may come next; see `TokenConstraint`."""
        size = self._tokens.vocab_size
        if self._is_inside:
            if self._is_first and self._tokens.first_ids:
                return mask_of(np.isin(np.arange(size), self._tokens.first_ids))
            return self._thinking_mask()
        if self._gap:
            white_ids = [token_id for text, token_id in self._tokens.white_ids.items() if self._gap.startswith(text)]
            return mask_of(np.isin(np.arange(size), white_ids))
        inner = None if self._inner is None else self._inner.mask()
        if not self._begin or (inner is None and self._inner is not None):
            return inner
        allowed = np.zeros(size, np.bool_) if inner is None else allowed_of(inner, size).copy()
        allowed[self._begin[0]] = True
        return mask_of(allowed)

    def accept(self, token_id: int) -> None:
        """Go on by a token of the reply; see `TokenConstraint`."""
        self._is_first = False
        if self._is_inside:
            self._think(token_id)
        elif self._gap:
            self._gap = self._gap[len(self._decoder.push(token_id)) :]
        elif self._begin and token_id == self._begin[0]:
            self._begin_reasoning(token_id)
        else:
            self._begin.clear()
            assert self._inner is not None, "the mask allows no other token"
            self._inner.accept(token_id)

    def forced(self) -> tuple[int, ...]:
        """As the constraint of the answer says, once that has begun; see `Foresight`."""
        return self._answers.forced() if isinstance(self._answers, Foresight) else ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """As the constraint of the answer says, once that has begun; see `Foresight`."""
        return self._answers.num_allowed(token_ids) if isinstance(self._answers, Foresight) else len(token_ids)

    def fork(self) -> TokenConstraint:
        """What goes on by itself from here: the constraint of the answer, and before it one that allows all."""
        return self._answers.fork() if isinstance(self._answers, Foresight) else MinTokens(0, frozenset(), 0)

    def state(self) -> Any:
        """See `Rewindable`."""
        own = self._is_inside, self._is_first, tuple(self._begin), self._gap, self._written
        return own, self._splitter.state(), self._decoder.state(), self._inner, state_of(self._inner)

    def restore(self, state: Any) -> None:
        """See `Rewindable`."""
        own, splitter, decoder, self._inner, inner = state
        self._is_inside, self._is_first, begin, self._gap, self._written = own
        self._begin = list(begin)
        self._splitter.restore(splitter)
        self._decoder.restore(decoder)
        restore(self._inner, inner)

    @property
    def _answers(self) -> TokenConstraint | None:
        """The constraint of the answer, once nothing but that can come."""
        return None if self._is_inside or self._gap or self._begin else self._inner

    def _thinking_mask(self) -> Int32Array:
        """Any token but those that spill from reasoning into the answer."""
        tag = self._tokens.last_tag
        lefts = (tag[size:] for size in range(len(tag)) if self._written.endswith(tag[:size]))
        key = tuple(left for left in lefts if left in self._tokens.spilling)
        if key not in self._thinking_masks:
            unwanted = [each for left in key for each in self._tokens.spilling[left]]
            self._thinking_masks[key] = mask_of(~np.isin(np.arange(self._tokens.vocab_size), unwanted))
        return self._thinking_masks[key]

    def _begin_reasoning(self, token_id: int) -> None:
        """Go on by a token that may begin reasoning, or what the constraint allows."""
        self._begin.pop(0)
        if not self._begin:
            self._inner, self._is_inside = self._source.start(), True
        elif self._inner is not None:
            mask = self._inner.mask()
            if mask is None or allowed_of(mask, self._tokens.vocab_size)[token_id]:
                self._inner.accept(token_id)
            else:
                self._inner = None
        self._splitter.push(self._decoder.push(token_id))

    def _think(self, token_id: int) -> None:
        text = self._decoder.push(token_id)
        self._written = (self._written + text)[-len(self._tokens.last_tag) :]
        said = self._splitter.push(text)
        if self._splitter.may_think:
            return
        self._is_inside = False
        white = text[len(text.rstrip()) :]
        self._gap = self._tokens.gap.removeprefix(white) if self._tokens.gap.startswith(white) else ""
        answer = (said.answer + self._splitter.finish().answer).strip()
        if answer:  # of tokens that spell a part of a character, which are not looked through
            raise ConstraintFailed(
                f"a token ends the thought and begins the answer with {answer!r:.40}, which its grammar cannot be held "
                "to; ask again, or switch thoughts off"
            )


def spilling_ids(tag: str, pieces: Iterable[bytes]) -> dict[str, list[int]]:
    """The tokens that write what is left of a tag, and words behind it; by what is left, of which one is all of it.

    >>> spilling_ids("</t>", [b"</t>", b">", b">\\n", b'>"', b"a</t>b"])
    {'>': [3], '</t>': [4]}
    """
    found: dict[str, list[int]] = {}
    lefts = [tag[size:].encode() for size in range(len(tag))]
    for token_id, piece in enumerate(pieces):
        if lefts[-1] not in piece[:-1]:
            continue
        for left in lefts:
            at = piece.find(left) if left is lefts[0] else 0 if piece.startswith(left) else -1
            if at >= 0 and piece[at + len(left) :].strip():
                found.setdefault(left.decode(), []).append(token_id)
    return found

"""Apply a constraint to a reply that may begin with reasoning.

Knows the tokens of a format's tags, not the constraint.
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
    """A reasoning format in a model's tokens.

    Args:
        begin_ids: the tokens that begin reasoning; empty if each part of a reply has a header.
        first_ids: the tokens that begin the first header; empty if parts have none.
        gap: the white space between reasoning and its answer, as the template writes it.
        white_ids: pieces of that white space that are one token, and their ids.
        last_tag: the text right before the answer, apart from white space.
        spilling: the tokens that write the rest of `last_tag`, and text after it; by that rest.
        decoder: makes a decoder of a reply's tokens.
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
    """Allows any reasoning, and applies a constraint to the answer. A reply may end inside its reasoning.

    If tags are ordinary text, a token can contain the end of a tag and the beginning of the answer. No constraint could
    apply to that part, so such tokens are forbidden.

    Args:
        prompt: can already have begun the reasoning.
        source: the constraint of the reply after the reasoning, or of all of it if there is none.
    """

    def __init__(self, tokens: ReasoningTokens, prompt: str, source: ConstraintSource) -> None:
        self._tokens, self._source = tokens, source
        self._splitter = splitter_of(tokens.format, prompt)
        self._decoder = tokens.decoder()
        self._inner: TokenConstraint | None = source.start()  # None: the reply can only be reasoning
        self._is_inside = self._splitter.may_think
        self._is_first = True
        self._begin = [] if self._is_inside else list(tokens.begin_ids)  # rest of the begin tag, while it comes
        self._gap = ""  # remaining white space
        self._written = ""  # end of the reasoning: as much of it as can begin a tag
        self._thinking_masks: dict[tuple[str, ...], Int32Array] = {}  # by the possible rests of the last tag

    @property
    def is_finished(self) -> bool:
        """Return whether the reply is complete."""
        is_answer = not self._is_inside and not self._gap
        return is_answer and self._inner is not None and self._inner.is_finished

    def mask(self) -> Int32Array | None:
        """Return the mask of tokens that may come next; see `TokenConstraint`."""
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
        """Advance by a token of the reply; see `TokenConstraint`."""
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
        """Return what the answer's constraint returns, once the answer has begun; see `Foresight`."""
        return self._answers.forced() if isinstance(self._answers, Foresight) else ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return what the answer's constraint returns, once the answer has begun; see `Foresight`."""
        return self._answers.num_allowed(token_ids) if isinstance(self._answers, Foresight) else len(token_ids)

    def fork(self) -> TokenConstraint:
        """Return an independent copy of the answer's constraint; before the answer, one that allows everything."""
        return self._answers.fork() if isinstance(self._answers, Foresight) else MinTokens(0, frozenset(), 0)

    def state(self) -> Any:
        """Return the value that `restore` needs to continue from here."""
        own = self._is_inside, self._is_first, tuple(self._begin), self._gap, self._written
        return own, self._splitter.state(), self._decoder.state(), self._inner, state_of(self._inner)

    def restore(self, state: Any) -> None:
        """Rewind to a state that `state` returned; see `Rewindable`."""
        own, splitter, decoder, self._inner, inner = state
        self._is_inside, self._is_first, begin, self._gap, self._written = own
        self._begin = list(begin)
        self._splitter.restore(splitter)
        self._decoder.restore(decoder)
        restore(self._inner, inner)

    @property
    def _answers(self) -> TokenConstraint | None:
        """The constraint of the answer, once nothing else can come."""
        return None if self._is_inside or self._gap or self._begin else self._inner

    def _thinking_mask(self) -> Int32Array:
        """Return a mask of all tokens except those that reach from reasoning into the answer."""
        tag = self._tokens.last_tag
        lefts = (tag[size:] for size in range(len(tag)) if self._written.endswith(tag[:size]))
        key = tuple(left for left in lefts if left in self._tokens.spilling)
        if key not in self._thinking_masks:
            unwanted = [each for left in key for each in self._tokens.spilling[left]]
            self._thinking_masks[key] = mask_of(~np.isin(np.arange(self._tokens.vocab_size), unwanted))
        return self._thinking_masks[key]

    def _begin_reasoning(self, token_id: int) -> None:
        """Advance by a token that may begin reasoning, or be one that the constraint allows."""
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
        """Advance by a token of the reasoning; the constraint applies once the reasoning has ended.

        Raises:
            ConstraintFailed: the token also begins the answer.
        """
        text = self._decoder.push(token_id)
        self._written = (self._written + text)[-len(self._tokens.last_tag) :]
        said = self._splitter.push(text)
        if self._splitter.may_think:
            return
        self._is_inside = False
        white = text[len(text.rstrip()) :]
        self._gap = self._tokens.gap.removeprefix(white) if self._tokens.gap.startswith(white) else ""
        answer = (said.answer + self._splitter.finish().answer).strip()
        if answer:  # from tokens with a part of a character, which `spilling` cannot include
            raise ConstraintFailed(
                f"a token ends the reasoning and begins the answer with {answer!r:.40}, to which its grammar cannot "
                "be applied; ask again, or turn reasoning off"
            )


def spilling_ids(tag: str, pieces: Iterable[bytes]) -> dict[str, list[int]]:
    """Return the tokens that write the rest of a tag and text after it, by that rest; the whole tag is one rest, too.

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

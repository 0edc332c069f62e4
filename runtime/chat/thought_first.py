"""A reply that may think before it keeps to a constraint.

Knows the tokens of a format's tags, not what the constraint is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConstraintFailed
from ..model.batch import Int32Array
from .thought_format import ThoughtFormat
from .thought_splitter import splitter_of
from .token_constraint import ConstraintSource, TokenConstraint, allowed_of, mask_of


@dataclass(frozen=True)
class ThoughtTokens:
    """A format in a model's tokens.

    Args:
        begin_ids: the tokens that begin a thought; none where each part of a reply has a header.
        first_ids: the tokens that begin the first header; none where parts have none.
        gap: the white space between a thought and its answer, as the template writes it.
        white_ids: the tokens of all pieces of it that are one.
        end_ids: the tokens that end a reply.
        decoder: makes a function that spells a reply token by token.
    """

    format: ThoughtFormat
    begin_ids: Sequence[int]
    first_ids: Sequence[int]
    gap: str
    white_ids: Mapping[str, int]
    end_ids: frozenset[int]
    vocab_size: int
    decoder: Callable[[], Callable[[int], str]]


class ThoughtFirst:
    """Lets a thought be as it is, but for the end of the reply in it, and holds what follows to a constraint.

    Args:
        prompt: which may have begun the thought.
        source: of the reply behind the thought, or of all of it if there is none.
    """

    def __init__(self, tokens: ThoughtTokens, prompt: str, source: ConstraintSource) -> None:
        self._tokens, self._source = tokens, source
        self._splitter = splitter_of(tokens.format, prompt)
        self._spell = tokens.decoder()
        self._inner: TokenConstraint | None = source.start()  # None: the reply can only be a thought
        self._is_inside = self._splitter.may_think
        self._is_first = True
        self._begin = [] if self._is_inside else list(tokens.begin_ids)  # what is left of them, while they come
        self._gap = ""  # likewise, of the white space
        self._thinking_mask: Int32Array | None = None

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
            if self._thinking_mask is None:
                self._thinking_mask = mask_of(~np.isin(np.arange(size), list(self._tokens.end_ids)))
            return self._thinking_mask
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
            self._gap = self._gap[len(self._spell(token_id)) :]
        elif self._begin and token_id == self._begin[0]:
            self._begin_thought(token_id)
        else:
            self._begin.clear()
            assert self._inner is not None, "the mask allows no other token"
            self._inner.accept(token_id)

    def _begin_thought(self, token_id: int) -> None:
        """Go on by a token that may begin a thought, or what the constraint allows."""
        self._begin.pop(0)
        if not self._begin:
            self._inner, self._is_inside = self._source.start(), True
        elif self._inner is not None:
            mask = self._inner.mask()
            if mask is None or allowed_of(mask, self._tokens.vocab_size)[token_id]:
                self._inner.accept(token_id)
            else:
                self._inner = None
        self._splitter.push(self._spell(token_id))

    def _think(self, token_id: int) -> None:
        text = self._spell(token_id)
        said = self._splitter.push(text)
        if self._splitter.may_think:
            return
        self._is_inside = False
        white = text[len(text.rstrip()) :]
        self._gap = self._tokens.gap.removeprefix(white) if self._tokens.gap.startswith(white) else ""
        answer = (said.answer + self._splitter.finish().answer).strip()
        if answer:
            raise ConstraintFailed(
                f"a token ends the thought and begins the answer with {answer!r:.40}, which its grammar cannot be held "
                "to; ask again, or switch thoughts off"
            )

"""The reasoning of one model, as its chat template defines it, for prompts and for replies.

Knows a template's format and a tokenizer; not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from radixlm.tokenizer_fix import Tokenizer

from .answer_constraint import AnswerConstraint, ReasoningTokens, spilling_ids
from .chat_template import ChatTemplate
from .reasoning_format import Message, ReasoningFormat, reasoning_format_of, without_reasoning
from .reasoning_splitter import HeadIn, ReasoningSplitter, no_head, splitter_of
from .scan import RewindableScan
from .token_constraint import ConstraintSource, TokenConstraint


class Reasoning:
    """Handles the reasoning of one model, in any thread. The template is inspected at the first use.

    Args:
        template: None if the model has none.
        vocab_size: number of tokens that can be sampled.
    """

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._template, self._tokenizer, self._vocab_size = template, tokenizer, vocab_size

    @cached_property
    def format(self) -> ReasoningFormat | None:
        """The format of reasoning; None if the model is not known to reason."""
        return None if self._template is None else reasoning_format_of(self._template)

    @cached_property
    def shown_ids(self) -> frozenset[int]:
        """Ids of special tokens that a decoder of replies spells out, so that the reply is split at them."""
        return frozenset() if self.format is None else self._tokenizer.special_ids_in(self.format.texts)

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, with earlier reasoning (`reasoning_content`) in the field that the template reads."""
        return without_reasoning(messages) if self.format is None else self.format.for_template(messages)

    def splitter(self, prompt: str, head_in: HeadIn = no_head) -> ReasoningSplitter | None:
        """Return a splitter for the reply to a rendered prompt; None if all of it is the answer.

        Args:
            head_in: returns the text that replaces a part's header in the answer.
        """
        return None if self.format is None else splitter_of(self.format, prompt, head_in)

    def before(
        self,
        constraint: ConstraintSource,
        prompt: str,
        *,
        decoder: Callable[[], RewindableScan[int, str]],
    ) -> TokenConstraint:
        """Return a constraint that applies to the reply to a prompt after its reasoning.

        If each part of a reply has a header, it applies to the first part that is no reasoning.

        Args:
            decoder: makes a decoder of a reply's tokens.
        """
        if self.format is None:
            return constraint.start()
        is_headed = self.format.header_end is not None
        headers = (self.format.begin, self.format.bare) if is_headed else ()
        gap = "" if self.format.is_loose or is_headed else self.format.end[len(self.format.end.rstrip()) :]
        white_ids = self._white_ids(gap)
        if not all(character in white_ids for character in gap):
            gap = ""  # it cannot be written piece by piece
        tokens = ReasoningTokens(
            self.format,
            () if is_headed else self._ids(self.format.begin.strip()),
            [self._ids(header)[0] for header in headers if header],
            gap,
            white_ids,
            self._last_tag,
            self._spilling,
            self._vocab_size,
            decoder,
        )
        return AnswerConstraint(tokens, prompt, constraint)

    @property
    def _last_tag(self) -> str:
        """The text right before an answer after reasoning, apart from white space."""
        assert self.format is not None
        return self.format.header_end or self.format.end.strip()

    @cached_property
    def _spilling(self) -> Mapping[str, Sequence[int]]:
        """The tokens that end reasoning and begin the answer."""
        return spilling_ids(self._last_tag, map(self._tokenizer.token_bytes, range(self._vocab_size)))

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a text that the format writes."""
        return self._tokenizer.encode(text, add_bos=False, parse_special=True)

    def _white_ids(self, gap: str) -> dict[str, int]:
        """Return the pieces of a white-space text that are one token, and their ids."""
        pieces = {gap[start:end] for start in range(len(gap)) for end in range(start + 1, len(gap) + 1)}
        ids = {piece: self._tokenizer.encode_inside(piece) for piece in pieces}
        return {piece: found[0] for piece, found in ids.items() if len(found) == 1}

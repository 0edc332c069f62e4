"""Say random things that a grammar allows: a model that knows nothing, and so tries every corner."""

from __future__ import annotations

import random

import numpy as np
from radixlm.runtime.chat.grammar_constraint import GrammarConstraint
from radixlm.runtime.chat.token_constraint import allowed_of
from radixlm.tokenizer_fix import Tokenizer


def allowed_ids(constraint: GrammarConstraint, tokenizer: Tokenizer) -> list[int]:
    return [int(i) for i in np.flatnonzero(allowed_of(constraint.mask(), tokenizer.vocab_size))]


def say(
    constraint: GrammarConstraint,
    tokenizer: Tokenizer,
    eos: tuple[int, ...],
    chance: random.Random,
    max_tokens: int = 300,
) -> str | None:
    """A random text of the grammar; None if it does not end. Ends as soon as it may, but for one time in four; takes
    the closing characters that a text needs to end more often than others."""
    ids: list[int] = []
    closing = np.array([token for char in '"}],' for token in tokenizer.encode(char)])
    for _ in range(max_tokens):
        if constraint.is_finished:
            break
        allowed = allowed_of(constraint.mask(), tokenizer.vocab_size)
        may_end = bool(allowed[list(eos)].any())
        allowed[list(eos)] = False
        text = np.flatnonzero(allowed)
        if may_end and (not len(text) or chance.random() < 0.75):
            break
        near = closing[allowed[closing]]
        candidates = near if len(near) and chance.random() < 0.6 else text
        token = int(candidates[chance.randrange(len(candidates))])
        constraint.accept(token)
        ids.append(token)
    else:
        return None
    said = b"".join(map(tokenizer.token_bytes, ids)).decode()  # whole characters
    assert not set(ids) & tokenizer.profile.special_ids
    return said

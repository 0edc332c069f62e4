"""The lone space that a template appends to a prompt, and that the next turn's prompt no longer has.

A chat template whose generation prompt ends in a space ('[/INST] ') appends a token of its own to each prompt
(Llama-2: 29871). In the next turn's history that space merges into the reply's first word ('▁The') and the
token is gone, so the cache, which holds it, matches nothing behind it. A chat prompt therefore loses the
token before matching and before prefill; if the reply then begins with a space, that space is the prompt's. A
raw completion is fed as the client wrote it.

What that reuses in the next turn, where `|` is the end of the prompt:

    prompt         reply    next prompt     reused
    '[/INST] |'    '▁The'   '[/INST]  The'  all: a raw completion gives the reply back with its space
    '[/INST] |'    'The'    '[/INST] The'   up to the space: '▁', 'The' is not how the text encodes
    '[/INST]|'     '▁The'   '[/INST] The'   all
    '[/INST]|'     'The'    '[/INST] The'   up to the reply: the template puts a space that the model did not
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as it is computed: all of `ids` is fed, `ids[:num_match]` is looked up in the cache."""

    ids: tuple[int, ...]
    num_match: int
    swallow_leading_space: bool  # a space that begins the reply is the prompt's, not the client's
    text: str | None  # None if the client sent ids
    num_known: int = 0  # of `ids`, found without encoding: the text goes on from an earlier one


def strip_suffix(ids: Sequence[int], text: str, suffix_ids: Container[int], *, num_known: int = 0) -> PreparedPrompt:
    """A rendered chat without the token of a lone space at its end.

    Without that token the ids are the encoding of the text without the space: the merges of BPE (and
    Unigram's best path) that leave the last character alone are those of the text before it.
    """
    is_lone_space = text.endswith(" ") and not text.endswith("  ")
    stripped = is_lone_space and len(ids) > 1 and ids[-1] in suffix_ids
    kept = tuple(ids[:-1] if stripped else ids)
    return PreparedPrompt(kept, len(kept), swallow_leading_space=stripped, text=text, num_known=num_known)


def keep_suffix(
    ids: Sequence[int], text: str | None, suffix_ids: Container[int], *, num_known: int = 0
) -> PreparedPrompt:
    """A raw prompt, all of it; the token of a space at its end is no part of the match key."""
    ends_in_suffix = len(ids) > 0 and ids[-1] in suffix_ids
    return PreparedPrompt(
        tuple(ids), len(ids) - ends_in_suffix, swallow_leading_space=False, text=text, num_known=num_known
    )

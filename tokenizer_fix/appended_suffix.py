"""The lone space that ends a prompt, and that the next turn's prompt no longer has.

A prompt that ends in a space ('[/INST] ') ends in a token of its own (Llama-2: 29871). In the next turn's history that
space merges into the reply's first word ('▁The') and the token is gone, so the cache, which holds it, matches nothing
behind it. A prompt therefore loses the token before matching and before prefill, and the space comes with the reply,
of which it is not sent: after a chat, if the reply begins with one; after a raw completion, always, for its first token
must begin with a space or end the reply. So the text of a completion stays what it was.

What that reuses in the next turn, where `|` is the end of the prompt:

    prompt         reply         next prompt     reused
    '[/INST]|'     '▁The'        '[/INST] The'   all
    '[/INST]|'     'The'         '[/INST] The'   a chat: up to the reply, for the template puts a space that it lacks
    '[/INST]|'     '▁', 'The'    '[/INST] The'   a completion, whose reply has the space: up to it by ids, all by text
    '[/INST] |'    '▁The'        '[/INST]  The'  fed as it is: all, where the next prompt has both spaces
    '[/INST] |'    'The'         '[/INST] The'   fed as it is: up to the space by ids, all by text
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as it is computed: all of `ids` is fed, `ids[:num_match]` is looked up in the cache."""

    ids: tuple[int, ...]
    num_match: int
    swallow_leading_space: bool  # a space that begins the reply is the prompt's, not the client's
    text: str | None  # None if the client sent ids
    num_known: int = 0  # of `ids`, found without encoding: the text goes on from an earlier one
    space_id: int | None = None  # the token that was stripped, if the reply must begin with a space or be empty
    healed: bytes = b""  # of a token that was stripped to be chosen anew: the reply begins with them

    def without_last(self, spelled: bytes) -> PreparedPrompt:
        """The same without its last token, which the reply begins with the bytes of."""
        ids = self.ids[:-1]
        num_match, num_known = min(self.num_match, len(ids)), min(self.num_known, len(ids))
        return replace(self, ids=ids, num_match=num_match, num_known=num_known, healed=spelled)


def strip_suffix(ids: Sequence[int], text: str, suffix_ids: Container[int], *, num_known: int = 0) -> PreparedPrompt:
    """A rendered chat without the token of a lone space at its end.

    Without that token the ids are the encoding of the text without the space: the merges of BPE (and
    Unigram's best path) that leave the last character alone are those of the text before it.
    """
    is_alone = text.endswith(" ") and not text.endswith("  ")
    stripped = is_alone and len(ids) > 1 and ids[-1] in suffix_ids
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


def strip_completion(kept: PreparedPrompt) -> PreparedPrompt:
    """A raw prompt of `keep_suffix` without its last token, which the reply brings back as its first space."""
    *ids, suffix_id = kept.ids
    return replace(kept, ids=tuple(ids), num_match=len(ids), swallow_leading_space=True, space_id=suffix_id)


def is_lone_space(before: str) -> bool:
    """Whether a space behind this text is one that a reply can bring back.

    Behind white space it is indentation, and behind nothing it may be what a tokenizer puts there by itself.

    >>> [is_lone_space(before) for before in ("Answer:", "Answer: ", "Answer:\\n", "")]
    [True, False, False, False]
    """
    return before != "" and not before[-1].isspace()

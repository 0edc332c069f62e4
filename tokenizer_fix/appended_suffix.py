"""Strip the lone space at the end of a prompt, which the next turn's prompt does not have.

A prompt that ends in a space ('[/INST] ') ends in a token of its own (Llama-2: 29871). In the next turn's history that
space merges into the reply's first word ('▁The') and the token is gone. The cache, which holds the token, would match
nothing after it. A prompt therefore loses the token before matching and before prefill. The space comes with the reply,
and is not sent with it. After a chat, this happens if the reply begins with a space. After a raw completion, it always
happens, because the first token must begin with a space or end the reply. The text of a completion is unchanged.

Reuse in the next turn, where `|` is the end of the prompt:

    prompt         reply         next prompt     reused
    '[/INST]|'     '▁The'        '[/INST] The'   all
    '[/INST]|'     'The'         '[/INST] The'   chat: up to the reply, because the template adds a space that it lacks
    '[/INST]|'     '▁', 'The'    '[/INST] The'   completion, whose reply has the space: up to it by ids, all by text
    '[/INST] |'    '▁The'        '[/INST]  The'  prompt kept as it is: all, if the next prompt has both spaces
    '[/INST] |'    'The'         '[/INST] The'   prompt kept as it is: up to the space by ids, all by text
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready for prefill: all of `ids` is computed, and `ids[:num_match]` is matched with the cache."""

    ids: tuple[int, ...]
    num_match: int
    swallow_leading_space: bool  # a space that begins the reply belongs to the prompt, and is not sent
    text: str | None  # None if the client sent ids
    num_known: int = 0  # number of ids found without encoding, because the text continues an earlier one
    space_id: int | None = None  # the token that was stripped, if the reply must begin with a space or be empty
    healed: bytes = b""  # bytes of a stripped token that is chosen anew; the reply begins with them

    def without_last(self, spelled: bytes) -> PreparedPrompt:
        """Return the prompt without its last token, whose bytes `spelled` the reply begins with."""
        ids = self.ids[:-1]
        num_match, num_known = min(self.num_match, len(ids)), min(self.num_known, len(ids))
        return replace(self, ids=ids, num_match=num_match, num_known=num_known, healed=spelled)


def strip_suffix(ids: Sequence[int], text: str, suffix_ids: Container[int], *, num_known: int = 0) -> PreparedPrompt:
    """Return a rendered chat without the token of a lone space at its end.

    Without that token, the ids are the encoding of the text without the space. The reason is that BPE merges (and
    Unigram's best path) that do not touch the last character are those of the text before it.
    """
    is_alone = text.endswith(" ") and not text.endswith("  ")
    stripped = is_alone and len(ids) > 1 and ids[-1] in suffix_ids
    kept = tuple(ids[:-1] if stripped else ids)
    return PreparedPrompt(kept, len(kept), swallow_leading_space=stripped, text=text, num_known=num_known)


def keep_suffix(
    ids: Sequence[int], text: str | None, suffix_ids: Container[int], *, num_known: int = 0
) -> PreparedPrompt:
    """Return a whole raw prompt; the token of a space at its end is not part of the match key."""
    ends_in_suffix = len(ids) > 0 and ids[-1] in suffix_ids
    return PreparedPrompt(
        tuple(ids), len(ids) - ends_in_suffix, swallow_leading_space=False, text=text, num_known=num_known
    )


def strip_completion(kept: PreparedPrompt) -> PreparedPrompt:
    """Return the prompt of `keep_suffix` without its last token; the reply begins with that space."""
    *ids, suffix_id = kept.ids
    return replace(kept, ids=tuple(ids), num_match=len(ids), swallow_leading_space=True, space_id=suffix_id)


def is_lone_space(before: str) -> bool:
    """Return whether a space after this text can be stripped and returned by a reply.

    After white space it is indentation. After an empty text, it may be a space that the tokenizer adds by itself.

    >>> [is_lone_space(before) for before in ("Answer:", "Answer: ", "Answer:\\n", "")]
    [True, False, False, False]
    """
    return before != "" and not before[-1].isspace()

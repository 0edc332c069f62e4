"""What this project does not do, to be compared with: remember the ids of each reply by its text.

A prompt is put together from the remembered ids where a whole message is known, and from the usual encoding elsewhere;
its ids are then matched. True, but worth nothing once a message is changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.tokenizer_fix import SpelledPrompt, is_mark

from .replay_engine import Turn


class Memo:
    """Ids of the text between two special tokens, that ended in a reply, by that text."""

    def __init__(self) -> None:
        self._ids: dict[bytes, tuple[int, ...]] = {}

    def prompt_ids(self, prompt: SpelledPrompt) -> list[int]:
        """The ids of the prompt, remembered ones where there are some."""
        return [
            token_id
            for section in _sections(prompt, prompt.ids)
            for token_id in self._ids.get(b"".join(map(prompt.spell, section)), section)
        ]

    def note(self, prompt: SpelledPrompt, turn: Turn) -> None:
        """Remember a reply, with what the template puts right before it."""
        *_, last = _sections(prompt, (*turn.prompt_ids, *turn.reply_ids[:-1]))
        self._ids[b"".join(map(prompt.spell, last))] = last


def _sections(prompt: SpelledPrompt, ids: Sequence[int]) -> list[tuple[int, ...]]:
    """The ids from each special token to the next; each special token is one of its own."""
    sections: list[tuple[int, ...]] = [()]
    for token_id in ids:
        if is_mark(prompt.spell(token_id)):
            sections += [(token_id,), ()]
        else:
            sections[-1] = (*sections[-1], token_id)
    return [section for section in sections if section]

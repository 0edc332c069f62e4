"""Everything that was ever computed, and what a prompt may and must reuse of it: the slow, obvious version.

Knows ids, what they spell, and which of them a model made; not trees, pages or messages.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from radixlm.tokenizer_fix import SpelledPrompt

from bench.replay.engine import Turn


@dataclass(frozen=True)
class _Computed:
    ids: tuple[int, ...]
    generated: list[bool]
    text: bytes
    ends: list[int]  # of each id in `text`


class Ledger:
    """Of one namespace. Replies stand in later prompts with all their white space."""

    def __init__(self) -> None:
        self._computed: list[_Computed] = []

    def num_allowed(self, prompt: SpelledPrompt) -> int:
        """Bytes of the prompt's text that must be reused: up to the last token before the first changed byte.

        A model's tokens count where they spell the prompt, a client's where they are the prompt's own.
        """
        most = 0
        for computed in self._computed:
            same = _num_common(prompt.text, computed.text)
            if same > most:
                most = max(most, _reach(prompt, computed, same))
        return most

    def check_truth(self, prompt: SpelledPrompt, turn: Turn) -> None:
        """Raise AssertionError unless the used ids spell the prompt, and the reused were computed in that order."""
        assert b"".join(map(prompt.spell, turn.prompt_ids)) == prompt.text, "the ids that were used spell another text"
        reused = turn.reused_ids
        known = any(computed.ids[: len(reused)] == reused for computed in self._computed)
        assert known or not reused, "ids were reused that nobody computed one after the other"

    def num_reused(self, prompt: SpelledPrompt, turn: Turn) -> int:
        """Bytes that the reused ids spell; the whole prompt if only its last token was computed."""
        if len(turn.prefilled_ids) == 1:
            return len(prompt.text)
        return len(b"".join(map(prompt.spell, turn.reused_ids)))

    def note(self, prompt: SpelledPrompt, turn: Turn) -> None:
        """Add what the turn computed: all but the last sampled token."""
        ids = (*turn.prompt_ids, *turn.reply_ids[:-1])
        pieces = list(map(prompt.spell, ids))
        generated = [False] * len(turn.prompt_ids) + [True] * (len(turn.reply_ids) - 1)
        for computed in self._computed:
            if computed.ids[: len(turn.reused_ids)] == turn.reused_ids:
                for index in range(len(turn.reused_ids)):
                    generated[index] |= computed.generated[index]
        self._computed.append(_Computed(ids, generated, b"".join(pieces), list(accumulate(map(len, pieces)))))


def _reach(prompt: SpelledPrompt, computed: _Computed, same: int) -> int:
    """How far the prompt may go along with what was computed, of which the first `same` bytes are its own."""
    done = bisect_right(computed.ends, same)
    while done and not (computed.generated[done - 1] and prompt.is_character_boundary(computed.ends[done - 1])):
        done -= 1
    reply_end = computed.ends[done - 1] if done else 0
    return max(_client_reach(prompt, computed, 0, 0), _client_reach(prompt, computed, done, reply_end))


def _client_reach(prompt: SpelledPrompt, computed: _Computed, done: int, offset: int) -> int:
    """How far the computed ids from `done` on are those of the prompt's encoding from `offset` on."""
    index = prompt.canonical_index(offset)
    if index is None:
        return offset
    for mine, theirs in zip(prompt.ids[index:], computed.ids[done:], strict=False):
        if mine != theirs:
            break
        index += 1
    return prompt.starts[index]


def _num_common(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left.startswith(right[low:middle], low) else (low, middle - 1)
    return low

"""Hold the slot of one sequence's recurrent state, and the token counts at which snapshots of it are wanted.

Knows slots, token ids and their counts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..artifact.manifest import PAGE_SIZE
from .state_pool import NO_STATE, SPARE_SLOTS, StatePool


class SequenceState:
    """The state after a sequence's computed tokens. For a model without recurrent states, every method does nothing.

    Attributes:
        slot: the slot of the state; the zeros if nothing is computed.
        page_slot: the slot of the state after the first `num_page_tokens` tokens, the last full page at which a step
            ended. The zeros if there is none. Only used if states are stored on disk, and there are many slots.
    """

    def __init__(self, pool: StatePool | None) -> None:
        self.pool = pool
        self.slot = self.page_slot = NO_STATE
        self.num_page_tokens = 0
        self._stops: tuple[int, ...] = ()  # sorted

    @property
    def logged(self) -> dict[str, bool]:
        """Fields about it in lines of a KV log."""
        return {} if self.pool is None else {"state": True}

    @property
    def slots(self) -> tuple[int, int]:
        """All slots that it uses."""
        return self.slot, self.page_slot

    def restart(self, slot: int) -> None:
        """Move to another slot, for other tokens."""
        self._keep_page(NO_STATE, 0)
        self.move(slot)

    def computed(self, num_tokens: int) -> None:
        """Record that the state is after `num_tokens` tokens.

        At the end of a page it is kept until the end of the next.
        """
        pool = self.pool
        if pool is not None and pool.is_stored and num_tokens % PAGE_SIZE == 0:
            if pool.num_available > pool.num_in_use + SPARE_SLOTS:
                pool.retain(self.slot)
                self._keep_page(self.slot, num_tokens)
            else:
                self._keep_page(NO_STATE, 0)

    def _keep_page(self, slot: int, num_tokens: int) -> None:
        """Make `slot` the state after `num_tokens` tokens, kept at the end of a page; release the one kept before."""
        if self.pool is not None:
            self.pool.release(self.page_slot)
            self.page_slot, self.num_page_tokens = slot, num_tokens

    def move(self, slot: int) -> None:
        """Move to another slot, which the caller has retained or allocated for it."""
        if self.pool is not None:
            self.pool.release(self.slot)
            self.slot = slot

    def want_at(self, num_tokens: int) -> None:
        """Make the sequence stop once after `num_tokens` tokens, because others are likely to resume from there."""
        if self.pool is not None:
            self._stops = tuple(sorted({*self._stops, num_tokens}))

    def cut(self, num_tokens: int) -> None:
        """Drop the wanted stops, and the state kept at the end of a page, that come after `num_tokens` tokens."""
        self._stops = tuple(stop for stop in self._stops if stop <= num_tokens)
        if self.num_page_tokens > num_tokens:
            self._keep_page(NO_STATE, 0)

    def next_stop(self, num_computed: int) -> int | None:
        """Return the next count of tokens, above those computed, at which the state is wanted; None if none is."""
        return next((stop for stop in self._stops if stop > num_computed), None)

    def is_wanted_at(self, num_tokens: int) -> bool:
        """Return whether the state after `num_tokens` tokens is wanted."""
        return num_tokens in self._stops

    def check(self, num_computed: int) -> None:
        """Raise AssertionError unless there is a state exactly if something is computed."""
        has_state = self.pool is not None and num_computed > 0
        assert has_state == (self.slot != NO_STATE), f"slot {self.slot} is the state after {num_computed} tokens"


MAX_BETWEEN = 4  # tokens between the special tokens of one boundary, as in `<|im_end|>\\n<|im_start|>`
MIN_BEFORE = 16  # tokens; recomputing fewer costs less than stopping for a snapshot
MIN_MESSAGE = 8  # tokens; fewer after the last boundary are not a message but the template's generation prompt


def turn_start(token_ids: Sequence[int], special_ids: Container[int]) -> int | None:
    """Return the number of tokens before the last message, special tokens included; None if no boundary was found.

    A client that changes its last message, or adds text after it that it removes again, resumes from there.

    >>> turn_start([1] * 20 + [9, 7, 8] + [1] * 10 + [9, 7, 8], special_ids=(7, 9))
    22
    """
    before = len(token_ids)
    for place in range(len(token_ids) - 1, -1, -1):
        if token_ids[place] in special_ids:
            if before - place > MAX_BETWEEN and before - place - 1 >= MIN_MESSAGE:
                return place + 1 if place >= MIN_BEFORE else None
            before = place
    return None

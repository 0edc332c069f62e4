"""Hold where one sequence's recurrent state is, and at which tokens others want it: where its last message begins.

Knows slots, token ids and their counts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..artifact.manifest import PAGE_SIZE
from .state_pool import NO_STATE, SPARE_SLOTS, StatePool


class SequenceState:
    """The state after a sequence's computed tokens. Of a model that keeps none, all of it does nothing.

    Attributes:
        slot: where it is; the zeros if nothing is computed.
        page_slot: where that after the first `num_page_tokens` is, the last full page that a step ended with; the zeros
            if there is none. Only where states are stored, and slots are many.
    """

    def __init__(self, pool: StatePool | None) -> None:
        self.pool = pool
        self.slot = self.page_slot = NO_STATE
        self.num_page_tokens = 0
        self._stops: tuple[int, ...] = ()  # sorted

    @property
    def logged(self) -> dict[str, bool]:
        """What lines of a KV log say of it."""
        return {} if self.pool is None else {"state": True}

    @property
    def slots(self) -> tuple[int, int]:
        """All that it uses."""
        return self.slot, self.page_slot

    def restart(self, slot: int) -> None:
        """Be in another slot, as `move`, for other tokens."""
        self._keep_page(NO_STATE, 0)
        self.move(slot)

    def computed(self, num_tokens: int) -> None:
        """Say that it is after so many tokens: at the end of a page it is kept until the end of the next."""
        pool = self.pool
        if pool is not None and pool.is_stored and num_tokens % PAGE_SIZE == 0:
            if pool.num_available > pool.num_in_use + SPARE_SLOTS:
                pool.retain(self.slot)
                self._keep_page(self.slot, num_tokens)
            else:
                self._keep_page(NO_STATE, 0)

    def _keep_page(self, slot: int, num_tokens: int) -> None:
        if self.pool is not None:
            self.pool.release(self.page_slot)
            self.page_slot, self.num_page_tokens = slot, num_tokens

    def move(self, slot: int) -> None:
        """Be in another slot, which the caller has retained or allocated for it."""
        if self.pool is not None:
            self.pool.release(self.slot)
            self.slot = slot

    def want_at(self, num_tokens: int) -> None:
        """Have the sequence stop once behind so many tokens, because others may go on from there."""
        if self.pool is not None:
            self._stops = tuple(sorted({*self._stops, num_tokens}))

    def cut(self, num_tokens: int) -> None:
        """Want nothing behind so many tokens."""
        self._stops = tuple(stop for stop in self._stops if stop <= num_tokens)
        if self.num_page_tokens > num_tokens:
            self._keep_page(NO_STATE, 0)

    def next_stop(self, num_computed: int) -> int | None:
        """The least count of tokens, above those that are computed, at which it is wanted; None: nowhere."""
        return next((stop for stop in self._stops if stop > num_computed), None)

    def is_wanted_at(self, num_tokens: int) -> bool:
        """Whether it is wanted behind so many tokens."""
        return num_tokens in self._stops

    def check(self, num_computed: int) -> None:
        """Raise AssertionError unless there is a state exactly if something is computed."""
        has_state = self.pool is not None and num_computed > 0
        assert has_state == (self.slot != NO_STATE), f"slot {self.slot} is the state after {num_computed} tokens"


MAX_BETWEEN = 4  # tokens from one special token to the next of the same seam, as in `<|im_end|>\\n<|im_start|>`
MIN_BEFORE = 16  # tokens; it costs more to stop than to compute less again
MIN_MESSAGE = 8  # tokens; less behind the last seam is no message, but how the template asks for one


def turn_start(token_ids: Sequence[int], special_ids: Container[int]) -> int | None:
    """How many tokens are before the last message, the special ones included; None: no seam was found.

    A client that changes its last message each time, or puts words behind it that it takes away again, goes on from
    there.

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

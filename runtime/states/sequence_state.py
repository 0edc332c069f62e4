"""Hold where one sequence's recurrent state is, and at which tokens others want it.

Knows slots and counts of tokens.
"""

from __future__ import annotations

from .state_pool import NO_STATE, StatePool


class SequenceState:
    """The state after a sequence's computed tokens. Of a model that keeps none, all of it does nothing.

    Attributes:
        slot: where it is; the zeros if nothing is computed.
    """

    def __init__(self, pool: StatePool | None) -> None:
        self.pool = pool
        self.slot = NO_STATE
        self._stops: tuple[int, ...] = ()  # sorted

    @property
    def logged(self) -> dict[str, bool]:
        """What lines of a KV log say of it."""
        return {} if self.pool is None else {"state": True}

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

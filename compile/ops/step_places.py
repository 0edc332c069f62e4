"""What several layers share in a step: angles, temperatures, first rows, units of work.

Each is computed where it is asked for first, into a place that nothing else gets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from radixlm.runtime.artifact.model_config import AnyAttention, Rope, Temperature

from ..kernels.attention_units import AttentionLimits, find_starts, find_units, units_ints
from ..kernels.rope import query_temperatures, rope_angles
from ..weights.plan import WeightPlan
from .program import Argument, Input, Place, Program, Size, Stored
from .rope_frequencies import ROPE_FREQUENCIES, attention_factor


class StepPlaces:
    """Appends to `program`; `ropes` are all that the model has, and get a vector of frequencies each in `plan`."""

    def __init__(self, program: Program, plan: WeightPlan, ropes: tuple[Rope, ...], limits: AttentionLimits) -> None:
        self._program, self._limits = program, limits
        parts = ((frequencies_name(i), rope.rotary_dim // 2) for i, rope in enumerate(ropes))
        self._frequencies = {rope: plan.vector((part,)).name for rope, part in zip(ropes, parts, strict=True)}
        self._computed: set[Hashable] = set()

    def angles(self, rope: Rope) -> Place:
        """Cosines and sines of the step's positions, float32 `[tokens, rotary_dim]`."""
        dim, factor = rope.rotary_dim, attention_factor(rope)
        inputs = Input("positions"), Stored(self._frequencies[rope])
        size = self._limits.num_tokens * dim
        return self.once(("angles", rope), size, ("rope_angles", dim, factor), lambda: rope_angles(dim, factor), inputs)

    def temperatures(self, of: Temperature) -> Place:
        """What queries are multiplied with, float32 `[tokens]`."""

        def build() -> Any:
            return query_temperatures(of.beta, of.original_length, of.shift)

        key = ("temperatures", of)
        return self.once(key, self._limits.num_tokens, key, build, (Input("positions"),))

    def starts(self, attention: AnyAttention) -> tuple[Place, ...]:
        """The first row that each token sees, int32 `[tokens]`; nothing where that is the first of its sequence."""
        window, chunk, skips_first = attention.window, attention.chunk, attention.skips_first
        if window is None and chunk is None and not skips_first:
            return ()
        key = ("starts", window, chunk, skips_first)

        def build() -> Any:
            return find_starts(window=window, chunk=chunk, skips_first=skips_first)

        return (self.once(key, self._limits.num_tokens, key, build, (Input("kv_lengths"),)),)

    def units(self, attention: AnyAttention, micro_tokens: int) -> Place:
        """The units of work of such layers, in micro-tiles of so many tokens."""
        starts = self.starts(attention)

        def build() -> Any:
            return find_units(self._limits, micro_tokens, has_starts=bool(starts))

        place, kernel = ("units", micro_tokens, *starts), ("find_units", micro_tokens, bool(starts))
        inputs: tuple[Argument, ...] = (Input("row_of_token"), Input("kv_lengths"), *starts)
        return self.once(place, units_ints(self._limits), kernel, build, inputs)

    def once(
        self, role: Hashable, size: int, key: Hashable, build: Callable[[], Any], inputs: tuple[Argument, ...]
    ) -> Place:
        """The place of `role`, `size` numbers of four bytes; the kernel writes it for all tokens, the first time."""
        place = self._program.place(role, size * 4)
        if role not in self._computed:
            self._computed.add(role)
            self._program.call(key, build, *inputs, place, Size("num_tokens"))
        return place


def frequencies_name(index: int) -> str:
    """The computed tensor of the model's rotary positions of this number: `rope.frequencies`, `rope.frequencies.1`."""
    return f"{ROPE_FREQUENCIES}.{index}" if index else ROPE_FREQUENCIES

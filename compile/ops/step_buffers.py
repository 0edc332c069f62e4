"""Data that several layers share in a step: angles, temperatures, first rows, units of work.

Each is computed at its first use, in memory that is used for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from radixlm.runtime.artifact.model_config import AnyAttention, Rope, Temperature

from ..kernels.attention_units import AttentionLimits, find_ends, find_starts, find_units, units_ints
from ..kernels.rope import query_temperatures, rope_angles
from ..weights.plan import WeightPlan
from .program import Argument, Input, Program, Scratch, Size, WeightTensor
from .rope_frequencies import ROPE_FREQUENCIES, attention_factor


class StepBuffers:
    """The shared data of `program`. `ropes` are all that the model has; each gets a vector of frequencies in `plan`."""

    def __init__(self, program: Program, plan: WeightPlan, ropes: tuple[Rope, ...], limits: AttentionLimits) -> None:
        self._program, self._limits = program, limits
        parts = ((frequencies_name(i), rope.rotary_dim // 2) for i, rope in enumerate(ropes))
        self._frequencies = {rope: plan.vector((part,)).name for rope, part in zip(ropes, parts, strict=True)}
        self._computed: set[Hashable] = set()

    def angles(self, rope: Rope) -> Scratch:
        """Return cosines and sines of the step's positions, float32 `[tokens, rotary_dim]`."""
        dim, factor = rope.rotary_dim, attention_factor(rope)
        inputs = Input("positions"), WeightTensor(self._frequencies[rope])
        size = self._limits.num_tokens * dim
        return self.once(("angles", rope), size, ("rope_angles", dim, factor), lambda: rope_angles(dim, factor), inputs)

    def temperatures(self, of: Temperature) -> Scratch:
        """Return the factors of queries, float32 `[tokens]`."""

        def build() -> Any:
            return query_temperatures(of.beta, of.original_length, of.shift)

        key = ("temperatures", of)
        return self.once(key, self._limits.num_tokens, key, build, (Input("positions"),))

    def starts(self, attention: AnyAttention) -> tuple[Scratch, ...]:
        """Return the first row that each token sees, int32 `[tokens]`; () if it is always the sequence's first."""
        window, chunk, skips_first = attention.window, attention.chunk, attention.skips_first
        if window is None and chunk is None and not skips_first:
            return ()
        key = ("starts", window, chunk, skips_first)

        def build() -> Any:
            return find_starts(window=window, chunk=chunk, skips_first=skips_first)

        return (self.once(key, self._limits.num_tokens, key, build, (Input("kv_lengths"),)),)

    def ends(self, attention: AnyAttention) -> Argument:
        """Return the row after the last that each token sees, int32 `[tokens]`: its own, or of those after it, too."""
        if not attention.bidirectional:
            return Input("kv_lengths")
        key, window = ("ends", attention.window), attention.window
        inputs = Input("row_of_token"), Input("kv_lengths")
        return self.once(key, self._limits.num_tokens, key, lambda: find_ends(window=window), inputs)

    def units(self, attention: AnyAttention, micro_tokens: int) -> Scratch:
        """Return the units of work of such layers, with micro-tiles of `micro_tokens` tokens."""
        starts, ends = self.starts(attention), self.ends(attention)

        def build() -> Any:
            return find_units(self._limits, micro_tokens, has_starts=bool(starts))

        place, kernel = ("units", micro_tokens, ends, *starts), ("find_units", micro_tokens, bool(starts))
        inputs: tuple[Argument, ...] = (Input("row_of_token"), ends, *starts)
        return self.once(place, units_ints(self._limits), kernel, build, inputs)

    def once(
        self, role: Hashable, size: int, key: Hashable, build: Callable[[], Any], inputs: tuple[Argument, ...]
    ) -> Scratch:
        """Return the memory of `role`, `size` numbers of four bytes.

        At the first use, a kernel is appended that writes it for all tokens.
        """
        place = self._program.scratch(role, size * 4)
        if role not in self._computed:
            self._computed.add(role)
            self._program.call(key, build, *inputs, place, Size("num_tokens"))
        return place


def frequencies_name(index: int) -> str:
    """Return the name of the frequencies of rotary embedding `index`: `rope.frequencies`, `rope.frequencies.1`."""
    return f"{ROPE_FREQUENCIES}.{index}" if index else ROPE_FREQUENCIES

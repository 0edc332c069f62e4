"""Cases of matrices times rows, at SmolLM2's shapes and at 4096 x 4096, in every kind of weight.

Weights are read from copies that together are larger than the caches, one copy after the other, as in a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.float_linear import float_linear
from radixlm.compile.kernels.integer_linear import integer_linear
from radixlm.compile.kernels.linear import LinearSpec
from radixlm.compile.kernels.quantized_rows import quantized_bytes
from radixlm.compile.weights.kinds import BF16, F16, F32, Q4, Q4_MINIMUM, Q8, Q8_GROUP16, Q8_MINIMUM, WeightKind
from radixlm.compile.weights.layout import ALIGNMENT, round_up
from radixlm.compile.weights.packing import packed_shape

from ..native import aligned
from .case import Case, Work

ROWS = (1, 4, 8, 64, 512)
SMOLLM2 = (  # as SmolLM2-135M's Q4_1 file is compiled: outputs, inputs, kind, 16-bit activations
    (768, 576, Q4_MINIMUM, False),
    (192, 576, Q4_MINIMUM, True),
    (576, 576, Q4_MINIMUM, False),
    (3072, 576, Q4_MINIMUM, False),
    (576, 1536, Q4_MINIMUM, False),
    (49152, 576, Q8, False),
)
INTEGER_KINDS = (Q4, Q4_MINIMUM, Q8, Q8_MINIMUM, Q8_GROUP16)
FLOAT_KINDS = (F16, BF16, F32)
KINDS_SHAPE, LARGE_SHAPE = (3072, 576), (4096, 4096)
COLD_BYTES = 160 << 20


@dataclass(frozen=True)
class Arena:
    """Memory for the weights and rows of all cases; only the range of its numbers matters, as no float is NaN
    or denormal."""

    num_bytes: int = COLD_BYTES
    most_rows: int = ROWS[-1]

    @cached_property
    def codes(self) -> np.ndarray:
        """Return random bytes."""
        return aligned(np.random.default_rng(0).integers(0, 256, self.num_bytes, np.uint8))

    @cached_property
    def floats(self) -> dict[str, np.ndarray]:
        """Return small numbers, by kind of weight; a bfloat16 is kept as its bits."""
        return {
            "f32": aligned(np.full(self.num_bytes // 4, 1 / 64, np.float32)),
            "f16": aligned(np.full(self.num_bytes // 2, 1 / 64, np.float16)),
            "bf16": aligned(np.full(self.num_bytes // 2, 0x3C80, np.uint16)),
        }

    def rows(self, count: int, width: int) -> np.ndarray:
        """Return float32 rows."""
        return aligned(np.full(count * width, 1 / 64, np.float32))


def linear_cases(target: Target, arena: Arena) -> Iterator[Case]:
    """Yield every matrix with every number of rows."""
    for num_outputs, num_inputs, kind, wide in SMOLLM2:
        yield from _integer(target, arena, kind, num_outputs, num_inputs, wide)
    for kind in INTEGER_KINDS:
        for wide in (False, True):
            if (*KINDS_SHAPE, kind, wide) not in SMOLLM2:
                yield from _integer(target, arena, kind, *KINDS_SHAPE, wide)
    for kind in (Q4, Q4_MINIMUM, Q8):
        yield from _integer(target, arena, kind, *LARGE_SHAPE, False)
    for kind in FLOAT_KINDS:
        yield from _float(target, arena, kind, *KINDS_SHAPE)
        yield from _float(target, arena, kind, *LARGE_SHAPE)


def _integer(
    target: Target, arena: Arena, kind: WeightKind, num_outputs: int, num_inputs: int, wide: bool
) -> Iterator[Case]:
    spec = LinearSpec(kind, num_outputs, num_inputs, num_outputs, wide=wide)
    shape = packed_shape(kind, num_outputs, num_inputs)
    codes, scales, offsets = (round_up(size, ALIGNMENT) for size in (shape.codes, shape.scales, shape.offsets))
    weight_bytes = shape.codes + shape.scales + shape.offsets
    half = arena.floats["f16"]
    scale_memory, minimum_memory = half[: half.size // 2], half[half.size // 2 :]
    copies = min(arena.codes.size // codes, scale_memory.nbytes // scales)
    for num_rows in (n for n in ROWS if n <= arena.most_rows):
        if num_outputs > 16384 and num_rows > 64:
            continue  # so many logits are never requested
        sizes = quantized_bytes(num_rows, num_inputs, wide)
        x_codes, x_sums = (aligned(np.ones(size // 4, np.int32)) for size in (sizes[0], sizes[2]))
        x_scales, y = arena.rows(1, sizes[1] // 4), arena.rows(num_rows, num_outputs)
        yield Case(
            f"linear {kind.label} {num_outputs}x{num_inputs}{' wide' if wide else ''}",
            lambda: integer_linear(spec, target),
            f"{num_rows} rows",
            (arena.codes, scale_memory, minimum_memory, None, x_codes, x_scales, x_sums, y, num_rows),
            Work(
                weight_bytes + sum(sizes) + 4 * num_rows * num_outputs,
                integer_operations=2.0 * num_rows * num_outputs * num_inputs * (2 if wide else 1),
                weight_bits=4 if kind.codes == "q4" else 8,
            ),
            (codes, scales // 2, offsets // 2, 0, 0, 0, 0, 0, 0),
            copies,
        )


def _float(target: Target, arena: Arena, kind: WeightKind, num_outputs: int, num_inputs: int) -> Iterator[Case]:
    spec = LinearSpec(kind, num_outputs, num_inputs, num_outputs)
    weights, size = arena.floats[kind.codes], packed_shape(kind, num_outputs, num_inputs).codes
    for num_rows in (n for n in ROWS if n <= arena.most_rows):
        yield Case(
            f"linear {kind.label} {num_outputs}x{num_inputs}",
            lambda: float_linear(spec, target, num_inputs),
            f"{num_rows} rows",
            (weights, None, arena.rows(num_rows, num_inputs), arena.rows(num_rows, num_outputs), num_rows),
            Work(
                size + 4 * num_rows * (num_inputs + num_outputs),
                float_operations=2.0 * num_rows * num_outputs * num_inputs,
            ),
            (size // weights.itemsize, 0, 0, 0, 0),
            weights.nbytes // size,
        )

"""Find the largest logits of each row with their ids, and whether all of the row are finite, for the sampler.

Knows rows of numbers, not how they are sampled. Nothing is rounded, so the result does not depend on the division of
work.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from ...codegen.builder import SIZE, Kernel, Memory, either, for_each_row, parallel, registers, serial, when
from ...codegen.vector import LANES, Expr, const, lanes, reduce_max, reduce_sum_i32, splat
from ...weights.layout import round_up

BLOCK = 4 * LANES  # number of logits per block; the maxima of blocks are found first
_INFINITY, _MAGNITUDE, _SIGN = 0x7F800000, 0x7FFFFFFF, 0x80000000  # bits of a float32; a NaN has more than infinity


def num_maxima(vocab_size: int) -> int:
    """Return the number of float32 of scratch that `top_k` needs for each row."""
    return round_up(-(-vocab_size // BLOCK), LANES)


def top_k(count: int) -> Any:
    """Return the PrimFunc `(logits, maxima, values, token_ids, is_finite, stride, vocab_size, num_rows) -> 0`.

    `logits` is `[num_rows, stride]`; the first `vocab_size` of a row count. `values` and `token_ids` are `[num_rows,
    count]`, largest first, the lower id first on ties; missing ones are -inf. `is_finite` `[num_rows]` is 1 or 0; the
    other results of a row with 0 are undefined. `maxima` is scratch, see `num_maxima`.

    The largest logit of each block is found first. The `count`-th largest of these is a lower bound of the `count`-th
    logit. Only blocks that reach it are read again: about `count` of them.
    """
    assert count % LANES == 0
    with Kernel() as k:
        logits, maxima, values, token_ids, is_finite, stride, vocab_size, num_rows = k.arguments(
            logits="float32",
            maxima="float32",
            values="float32",
            token_ids="int32",
            is_finite="int32",
            stride=SIZE,
            vocab_size=SIZE,
            num_rows=SIZE,
        )
        num_vectors = (vocab_size + (BLOCK * LANES - 1)) // (BLOCK * LANES)  # number of vectors of maxima in a row
        num_blocks = num_vectors * LANES
        with parallel(num_rows * num_blocks) as item:
            row, start = item // num_blocks, item % num_blocks * BLOCK
            _find_largest(logits, row * stride + start, vocab_size - start, maxima, item)

        def row(m: Expr) -> None:
            found = registers(2, "float32")  # the bound, and the largest
            _find_bound(maxima, m * num_blocks, num_vectors, count, found)
            is_finite[m] = T.Cast("int32", found[1] < T.infinity("float32"))
            top = _LargestNumbers(values, token_ids, m * count, count)
            top.clear()
            with (
                serial(num_blocks) as b,
                when(maxima[m * num_blocks + b] >= found[0]),
                serial(T.min(T.int64(BLOCK), vocab_size - b * BLOCK)) as i,
            ):
                value = logits[m * stride + b * BLOCK + i]
                with when(value >= found[0]):
                    top.offer(value, b * BLOCK + i)

        for_each_row(num_rows, row, serial_up_to=1)
    return k.function


def _find_largest(logits: Memory, start: Expr, num_left: Expr, maxima: Memory, block: Expr) -> None:
    """Store the largest of the next `BLOCK` of `num_left` logits: infinity if one is not finite, -inf without any."""
    with either(num_left >= BLOCK) as (then, otherwise):
        with then:
            parts = [logits[lanes(start + i)] for i in range(0, BLOCK, LANES)]
            largest, magnitude = parts[0], _magnitude(parts[0], LANES)
            for part in parts[1:]:
                largest, magnitude = T.max(largest, part), T.max(magnitude, _magnitude(part, LANES))
            num_wrong = _count(magnitude >= splat(T.int32(_INFINITY)))
            maxima[block] = T.Select(num_wrong > 0, T.infinity("float32"), reduce_max(largest))
        with otherwise:
            maxima[block] = T.float32(float("-inf"))
            with serial(T.max(T.int64(0), num_left)) as i:
                value = logits[start + i]
                is_wrong = _magnitude(value, 1) >= T.int32(_INFINITY)
                maxima[block] = T.Select(is_wrong, T.infinity("float32"), T.max(maxima[block], value))


def _find_bound(maxima: Memory, start: Expr, num_vectors: Expr, count: int, found: Memory) -> None:
    """Set `found` to the `count`-th largest of the maxima (-inf if there are fewer), and the largest.

    The bound grows bit by bit, as an unsigned integer in the order of the floats. That takes 32 passes over numbers in
    the L1 cache, a third of the time of sorting them.
    """
    bits, sums = registers(1, "uint32"), registers(LANES, "int32")
    bits[0] = T.uint32(0)
    with serial(32) as step:
        wanted = registers(2, "uint32")
        wanted[0] = T.bitwise_or(bits[0], T.shift_right(T.uint32(_SIGN), T.Cast("uint32", step)))
        at_least = registers(1, "float32")
        at_least[0] = _float_of(wanted[0])
        sums[lanes(0)] = splat(T.int32(0))
        with serial(num_vectors) as v:
            reached = maxima[lanes(start + v * LANES)] >= splat(at_least[0])
            sums[lanes(0)] = sums[lanes(0)] + T.Select(reached, splat(T.int32(1)), splat(T.int32(0)))
        with when(reduce_sum_i32(sums[lanes(0)]) >= count):
            bits[0] = wanted[0]
    found[0] = T.Select(bits[0] == T.uint32(0), T.float32(float("-inf")), _float_of(bits[0]))
    largest = registers(LANES, "float32")
    largest[lanes(0)] = const(float("-inf"))
    with serial(num_vectors) as v:
        largest[lanes(0)] = T.max(largest[lanes(0)], maxima[lanes(start + v * LANES)])
    found[1] = reduce_max(largest[lanes(0)])


def _float_of(bits: Expr) -> Expr:
    """Return the float32 of an unsigned integer, in the same order; the first and the last integers are NaN."""
    is_positive = bits >= T.uint32(_SIGN)
    return T.reinterpret("float32", T.Select(is_positive, T.bitwise_xor(bits, T.uint32(_SIGN)), T.bitwise_not(bits)))


def _magnitude(value: Expr, n: int) -> Expr:
    """Return the bits of `n` float32 without their signs: as integers they are in the order of the magnitudes."""
    dtype = "int32" if n == 1 else f"int32x{n}"
    mask: Expr = T.int32(_MAGNITUDE) if n == 1 else splat(T.int32(_MAGNITUDE), n)
    return T.bitwise_and(T.reinterpret(dtype, value), mask)


def _count(condition: Expr) -> Expr:
    """Return the number of the 16 lanes in which the condition holds."""
    return reduce_sum_i32(T.Select(condition, splat(T.int32(1)), splat(T.int32(0))))


class _LargestNumbers:
    """The `count` largest of the offered numbers, largest first, and the first offered first on ties."""

    def __init__(self, values: Memory, token_ids: Memory, start: Expr, count: int) -> None:
        self._values, self._token_ids, self._start, self._count = values, token_ids, start, count

    def clear(self) -> None:
        """Set all values to -inf."""
        with serial(self._count) as i:
            self._values[self._start + i] = T.float32(float("-inf"))
            self._token_ids[self._start + i] = T.int32(0)

    def offer(self, value: Expr, token_id: Expr) -> None:
        """Insert a number if it is among the largest."""
        last = self._start + (self._count - 1)
        with when(value > self._values[last]):
            rank = registers(1, "int64")
            rank[0] = T.int64(0)
            for i in range(0, self._count, LANES):
                rank[0] = rank[0] + T.Cast("int64", _count(self._values[lanes(self._start + i)] >= splat(value)))
            with serial(self._count - 1 - rank[0]) as i:
                self._values[last - i] = self._values[last - i - 1]
                self._token_ids[last - i] = self._token_ids[last - i - 1]
            self._values[self._start + rank[0]] = value
            self._token_ids[self._start + rank[0]] = T.Cast("int32", token_id)

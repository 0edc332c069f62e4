"""Rotary position embedding of halves (Su et al., 2021), and other changes of heads before attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from radixlm.runtime.artifact.manifest import PAGE_SIZE, LayerLayout
from tvm.script.ir_builder import tirx as T

from ..codegen.builder import SIZE, Kernel, Memory, bound, for_each_row, registers, serial
from ..codegen.float64 import cosines_and_sines, logarithm
from ..codegen.lane_reductions import sum_of_lanes
from ..codegen.vector import LANES, Expr, const, lanes, splat
from .kv_pool import KV_DTYPES, KVRow, PagedPool

_SUMS = 4


@dataclass(frozen=True)
class HeadNorm:
    """A norm of queries and keys (as Henry et al., 2020), times a gain if there is one.

    The root mean square is `over` a "head", with one gain for all heads, or over "each_head", with a gain for each. It
    can also be over the "width" of all heads. The norm comes before rotation, or for single heads after it. With `kind`
    "layer", the mean of a single head is subtracted first.
    """

    eps: float
    over: Literal["head", "each_head", "width"] = "head"
    has_gain: bool = True
    after_rope: bool = False
    kind: Literal["rms", "layer"] = "rms"

    def __post_init__(self) -> None:
        whole = self.kind == "layer" or self.after_rope
        assert not (self.over == "width" and whole), "heads together have no mean taken away, and no norm when rotated"


@dataclass(frozen=True)
class HeadSpec:
    """Changes of a token's heads before attention.

    The first `rotary_dim` elements of queries and keys are rotated; all if None. `value_eps`: values are divided by the
    root mean square of their head. `has_temperatures`: a token's queries are multiplied by a number of its own. Without
    `writes_kv` there are only queries, and the layer reads another layer's KV.
    """

    rotary_dim: int | None = None
    qk_norm: HeadNorm | None = None
    value_eps: float | None = None
    has_temperatures: bool = False
    writes_kv: bool = True


def rope_angles(rotary_dim: int, attention_factor: float = 1.0) -> Any:
    """Return the PrimFunc `(positions, inverse_frequencies, angles, num_rows) -> 0`.

    `angles` float32 `[num_rows, rotary_dim]`: cosines of `position * inverse_frequency` (float32, as Transformers
    rounds it), then sines, both times `attention_factor`.
    """
    half = rotary_dim // 2
    n = _vector_size(half)

    def scaled(x: Expr) -> Expr:
        return x if attention_factor == 1 else x * const(attention_factor, n)

    with Kernel() as k:
        positions, frequencies, angles, num_rows = k.arguments(
            positions="int32", frequencies="float32", angles="float32", num_rows=SIZE
        )

        def row(m: Expr) -> None:
            position = bound(T.Cast("float32", positions[m]))
            with serial(half // n) as i:
                start = m * rotary_dim + i * n
                cosines, sines = cosines_and_sines(splat(position, n) * frequencies[lanes(i * n, n)], n)
                angles[lanes(start, n)], angles[lanes(start + half, n)] = scaled(cosines), scaled(sines)

        for_each_row(num_rows, row)
    return k.function


def query_temperatures(beta: float, original: int, offset: int = 0) -> Any:
    """Return the PrimFunc `(positions, temperatures, num_rows) -> 0`, which computes factors of queries.

    A temperature is float32 `1 + beta * ln(1 + floor((position + offset) / original))`. It applies to queries beyond
    the context length of the model's first training (Llama 4, 2025).
    """
    with Kernel() as k:
        positions, temperatures, num_rows = k.arguments(positions="int32", temperatures="float32", num_rows=SIZE)
        with serial(num_rows) as m:
            beyond = (positions[m] + T.int32(offset)) // T.int32(original)
            temperatures[m] = T.float32(1) + T.float32(beta) * logarithm(T.int32(1) + beyond)
    return k.function


def rope_append(
    layout: LayerLayout,
    num_heads: int,
    q_column: int,
    k_column: int,
    v_column: int,
    stride: int,
    spec: HeadSpec | None = None,
) -> Any:
    """Return the PrimFunc that rotates queries and keys and stores the KV rows; it returns 0.

    `(qkv[, angles][, q_gain[, k_gain]][, temperatures][, slots], q[, pool, first_item, num_pages], num_rows)`

    Reads rows of `qkv` float32 `[num_rows, stride]`. Writes rotated queries to `q` float32 `[num_rows, num_heads *
    head_dim]`, and rotated keys and the values to row `slots[m]` of the pool. The layer's rows begin after `first_item`
    items of a page. Keys and values may be the same columns. A gain has the length that is normalized together, or that
    of all heads if each has its own. `spec` decides which arguments there are: `angles` `[num_rows, rotary_dim]` unless
    `rotary_dim` is 0; `temperatures` `[num_rows]`; no `k_gain`, `slots` or pool without `writes_kv`.
    """
    spec = spec or HeadSpec()
    has_gain = spec.qk_norm is not None and spec.qk_norm.has_gain
    pool_types = {"pool": KV_DTYPES[layout.dtype], "first_item": SIZE, "num_pages": SIZE}
    with Kernel() as k:
        types = {
            "qkv": "float32",
            **({} if spec.rotary_dim == 0 else {"angles": "float32"}),
            **({"q_gain": "float32"} if has_gain else {}),
            **({"k_gain": "float32"} if has_gain and spec.writes_kv else {}),
            **({"temperatures": "float32"} if spec.has_temperatures else {}),
            **({"slots": "int32"} if spec.writes_kv else {}),
            "q": "float32",
            **(pool_types if spec.writes_kv else {}),
            "num_rows": SIZE,
        }
        given = dict(zip(types, k.arguments(**types), strict=True))
        heads = _Heads(spec, layout.head_dim, stride, given["qkv"], given.get("angles"))
        q, temperatures = given["q"], given.get("temperatures")

        def queries(m: Expr) -> None:
            of_row = heads.of_row(m, q_column, num_heads, given.get("q_gain"))
            with serial(num_heads) as h:
                start = (m * num_heads + h) * layout.head_dim
                for i, n, value in of_row(h):
                    q[lanes(start + i, n)] = value if temperatures is None else value * splat(temperatures[m], n)

        def row(m: Expr) -> None:
            queries(m)
            if spec.writes_kv:
                keys_and_values(m)

        def keys_and_values(m: Expr) -> None:
            page = T.Cast("int64", given["slots"][m]) // PAGE_SIZE
            token = T.Cast("int64", given["slots"][m]) % PAGE_SIZE
            paged = PagedPool(layout, given["pool"], given["first_item"], given["num_pages"])
            of_row = heads.of_row(m, k_column, layout.num_kv_heads, given.get("k_gain"))
            with serial(layout.num_kv_heads) as h:
                key = KVRow.of_key(paged, paged.keys(page, h), token)
                for i, n, element in of_row(h):
                    key.put(i, element, n)
                key.finish()
                value = KVRow.of_value(paged, paged.values(page, h), token)
                for i, n, element in heads.values(m, v_column + h * layout.head_dim):
                    value.put(i, element, n)
                value.finish()

        for_each_row(given["num_rows"], row)
    return k.function


Elements = Iterator[tuple[int, int, Expr]]  # elements `[i, i + n)` of a head, as `i`, `n` and a vector


@dataclass(frozen=True)
class _Heads:
    """The heads of rows of `qkv`, normalized and rotated; the order of a head's sums depends on the head alone."""

    spec: HeadSpec
    head_dim: int
    stride: int
    qkv: Memory
    angles: Memory | None

    def of_row(self, m: Expr, column: int, num_heads: int, gain: Memory | None) -> Callable[[Expr], Elements]:
        """Return a function of the head for the queries or keys of row `m`, which begin at `column`."""
        norm = self.spec.qk_norm
        if norm is not None and norm.over == "width":
            total = _VectorSum()
            with serial(num_heads) as h:
                total.add(_squares(self._plain(m, column + h * self.head_dim)))
            inverse = total.inverse_root(num_heads * self.head_dim, norm.eps)
            return lambda h: self._rotated(m, column + h * self.head_dim, _Scale(inverse, gain, h * self.head_dim))

        def head(h: Expr) -> Elements:
            start = column + h * self.head_dim
            if norm is None:
                return self._rotated(m, start, None)
            first = h * self.head_dim if norm.over == "each_head" else 0
            if norm.after_rope:
                scale = self._scale(lambda: self._rotated(m, start, None), norm, gain, first)
                return ((i, n, scale.apply(i, n, x)) for i, n, x in self._rotated(m, start, None))
            return self._rotated(m, start, self._scale(lambda: self._plain(m, start), norm, gain, first))

        return head

    def values(self, m: Expr, column: Expr) -> Elements:
        """Yield a head's values, which begin at `column`."""
        if self.spec.value_eps is None:
            return self._plain(m, column)
        scale = self._scale(lambda: self._plain(m, column), HeadNorm(self.spec.value_eps), None, 0)
        return ((i, n, scale.apply(i, n, x)) for i, n, x in self._plain(m, column))

    def _scale(self, elements: Callable[[], Elements], norm: HeadNorm, gain: Memory | None, first: Expr) -> _Scale:
        """Return the normalization of a head, whose gains begin at `gain[first]`."""
        mean = None
        if norm.kind == "layer":
            sum_ = _VectorSum()
            sum_.add(elements())
            mean = sum_.mean(self.head_dim)
        total = _VectorSum()
        total.add(_squares(elements(), mean))
        return _Scale(total.inverse_root(self.head_dim, norm.eps), gain, first, mean)

    def _plain(self, m: Expr, column: Expr) -> Elements:
        """Yield the elements of a head, unchanged."""
        n = _vector_size(self.head_dim)
        return ((i, n, self._stored(m, column, i, n)) for i in range(0, self.head_dim, n))

    def _rotated(self, m: Expr, column: Expr, scale: _Scale | None) -> Elements:
        """Yield the rotated elements, in pairs of a first and a second half; then the others."""
        dim = self.head_dim if self.spec.rotary_dim is None else self.spec.rotary_dim

        def stored(i: int, n: int) -> Expr:
            x = self._stored(m, column, i, n)
            return x if scale is None else scale.apply(i, n, x)

        half = dim // 2
        n = _vector_size(half)
        for i in range(0, half, n):
            assert self.angles is not None
            first, second = stored(i, n), stored(half + i, n)
            cos, sin = self.angles[lanes(m * dim + i, n)], self.angles[lanes(m * dim + half + i, n)]
            yield i, n, first * cos - second * sin
            yield half + i, n, second * cos + first * sin
        n = _vector_size(self.head_dim - dim)
        for i in range(dim, self.head_dim, n):
            yield i, n, stored(i, n)

    def _stored(self, m: Expr, column: Expr, i: int, n: int) -> Expr:
        return self.qkv[lanes(m * self.stride + column + i, n)]


@dataclass(frozen=True)
class _Scale:
    """A factor of a head's elements, minus their mean if there is one, and their gain from `gain[start]` on."""

    factor: Expr
    gain: Memory | None
    start: Expr
    mean: Expr | None = None

    def apply(self, i: int, n: int, x: Expr) -> Expr:
        """Return elements from `i` on, normalized, times their gain."""
        scaled = (x if self.mean is None else x - splat(self.mean, n)) * splat(self.factor, n)
        return scaled if self.gain is None else scaled * self.gain[lanes(self.start + i, n)]


class _VectorSum:
    """A sum of vectors, added in turn to four sums, because each addition waits for the one before it."""

    def __init__(self) -> None:
        self._sums = registers(_SUMS * LANES, "float32")
        for i in range(_SUMS):
            self._sums[lanes(i * LANES)] = const(0)

    def add(self, elements: Elements) -> None:
        """Add vectors to the sums."""
        for number, (_, n, vector) in enumerate(elements):
            where = lanes(number % _SUMS * LANES, n)
            self._sums[where] = self._sums[where] + vector

    def mean(self, count: int) -> Expr:
        """Return the sum of all lanes over `count`."""
        a, b, c, d = (self._sums[lanes(i * LANES)] for i in range(_SUMS))
        return bound(sum_of_lanes((a + b) + (c + d)) / T.float32(count))

    def inverse_root(self, count: int, eps: float) -> Expr:
        """Return 1 / sqrt(mean + eps): for squares, one over the root mean square (Zhang and Sennrich, 2019)."""
        return bound(T.float32(1) / T.sqrt(self.mean(count) + T.float32(eps)))


def _squares(elements: Elements, mean: Expr | None = None) -> Elements:
    """Yield the squares of elements, minus `mean` if there is one."""
    for i, n, vector in elements:
        x = bound(vector if mean is None else vector - splat(mean, n))
        yield i, n, x * x


def _vector_size(count: int) -> int:
    """Return the number of lanes of a vector: the largest that divides `count`."""
    return next(n for n in (LANES, 8, 4, 2, 1) if count % n == 0)

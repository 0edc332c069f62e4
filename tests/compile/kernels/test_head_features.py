"""Partial rotation, norms and temperatures of heads, against NumPy in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.rope import HeadNorm, HeadSpec, query_temperatures, rope_angles, rope_append
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType

from .harness import built, every_target, runnable
from .pool import KEYS, PARTS, VALUES, Pool, layout_of

NATIVE = runnable()[-1]
NUM_PAGES, LAYER = 5, 1
SPECS = {
    "no rotation": HeadSpec(rotary_dim=0),
    "half rotated": HeadSpec(rotary_dim=24),
    "odd share rotated": HeadSpec(rotary_dim=10),
    "head norm": HeadSpec(qk_norm=HeadNorm(1e-6)),
    "head norm, partial": HeadSpec(rotary_dim=24, qk_norm=HeadNorm(1e-2)),
    "head norm after rotation": HeadSpec(qk_norm=HeadNorm(1e-3, after_rope=True)),
    "weightless norm after rotation": HeadSpec(qk_norm=HeadNorm(1e-5, has_gain=False, after_rope=True)),
    "weightless norm": HeadSpec(rotary_dim=0, qk_norm=HeadNorm(1e-5, has_gain=False)),
    "layer norm": HeadSpec(qk_norm=HeadNorm(1e-3, kind="layer")),
    "layer norm of each head": HeadSpec(rotary_dim=10, qk_norm=HeadNorm(1e-3, over="each_head", kind="layer")),
    "norm of each head after rotation": HeadSpec(qk_norm=HeadNorm(1e-3, over="each_head", after_rope=True)),
    "norm over the width": HeadSpec(qk_norm=HeadNorm(1e-5, over="width")),
    "value norm": HeadSpec(qk_norm=HeadNorm(1e-6), value_eps=1e-4),
    "temperatures": HeadSpec(has_temperatures=True),
    "queries alone": HeadSpec(qk_norm=HeadNorm(1e-6), has_temperatures=True, writes_kv=False),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


class HeadCase:
    """Rows of q, k and v, and all that kernels of a spec take."""

    def __init__(
        self, spec: HeadSpec, dtype: KVDType, heads: tuple[int, int], head_dim: int, *, shared: bool = False
    ) -> None:
        self.spec, self.heads, self.head_dim = spec, heads, head_dim
        self.layout = layout_of(dtype, 2, heads[1], head_dim)
        self.rotary_dim = head_dim if spec.rotary_dim is None else spec.rotary_dim
        widths = [count * head_dim for count in (*heads, heads[1])]
        self.columns = (16, 32 + widths[0], 32 + widths[0] + (0 if shared else widths[1] + 16))
        self.stride = self.columns[2] + widths[2] + 16
        rng = np.random.default_rng(head_dim)
        self.qkv = 3 * rng.standard_normal((20, self.stride)).astype(np.float32)
        turn = rng.uniform(-3, 3, (20, self.rotary_dim // 2))
        self.angles = 1.1 * np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
        width = spec.qk_norm is not None and spec.qk_norm.over != "head"
        self.gains = [rng.uniform(0.5, 2, n if width else head_dim).astype(np.float32) for n in widths[:2]]
        self.temperatures = rng.uniform(1, 2, 20).astype(np.float32)
        self.slots = rng.permutation(NUM_PAGES * PAGE_SIZE)[:20].astype(np.int32)

    def run(self, target: Target, rows: slice) -> tuple[np.ndarray, Pool]:
        """Queries `[rows, heads, head_dim]`, and the pool with those rows alone."""
        spec, pool = self.spec, Pool(self.layout, NUM_PAGES)
        qkv = self.qkv[rows]
        q = np.full((len(qkv), self.heads[0], self.head_dim), np.nan, np.float32)
        has_gain = spec.qk_norm is not None and spec.qk_norm.has_gain
        arguments = [
            qkv,
            *([self.angles[rows]] if self.rotary_dim else []),
            *(self.gains[: 1 + spec.writes_kv] if has_gain else []),
            *([self.temperatures[rows]] if spec.has_temperatures else []),
            *([self.slots[rows]] if spec.writes_kv else []),
            q,
            *([pool.array, self.layout.items_before(LAYER), NUM_PAGES] if spec.writes_kv else []),
            len(qkv),
        ]
        layout = self.layout.of_layer(LAYER)
        built(target, rope_append, layout, self.heads[0], *self.columns, self.stride, spec)(*arguments)
        return q, pool

    def expected(self, which: int) -> np.ndarray:
        """All queries, keys or values, `[rows, heads, head_dim]`."""
        count, dim, norm = (*self.heads, self.heads[1])[which], self.head_dim, self.spec.qk_norm
        columns = slice(self.columns[which], self.columns[which] + count * dim)
        x = self.qkv[:, columns].astype(np.float64).reshape(20, count, dim)
        if which == 2:
            return x if self.spec.value_eps is None else over_rms(x, self.spec.value_eps)
        gain = self.gains[which] if norm is not None and norm.has_gain else np.ones(1)
        if norm is not None and norm.over == "each_head":
            gain = gain.reshape(count, dim)
        if norm is not None and norm.over == "width":
            x = (over_rms(x.reshape(20, -1), norm.eps) * gain).reshape(x.shape)
        elif norm is not None and not norm.after_rope:
            x = normalized(x, norm) * gain
        half = self.rotary_dim // 2
        cos, sin = (part[:, None].astype(np.float64) for part in (self.angles[:, :half], self.angles[:, half:]))
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        x = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
        if norm is not None and norm.after_rope:
            x = normalized(x, norm) * gain
        return x * self.temperatures[:, None, None] if which == 0 and self.spec.has_temperatures else x


def normalized(x: np.ndarray, norm: HeadNorm) -> np.ndarray:
    return over_rms(x - x.mean(axis=-1, keepdims=True) if norm.kind == "layer" else x, norm.eps)


def over_rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def check(target: Target, case: HeadCase) -> None:
    q, pool = case.run(target, slice(None))
    np.testing.assert_allclose(q, case.expected(0), 1e-5, 1e-5)
    expected = Pool(case.layout, NUM_PAGES)
    if case.spec.writes_kv:
        for part, which in ((KEYS, 1), (VALUES, 2)):
            for slot, rows in zip(case.slots, case.expected(which), strict=True):
                expected.write(part, slot // PAGE_SIZE, LAYER, slot % PAGE_SIZE, rows)
    tolerance = {"f32": 1e-5, "f16": 1e-2, "k12v8": 0.1}[case.layout.dtype]
    for page, part in itertools.product(range(NUM_PAGES), PARTS):
        stored, wanted = pool.rows(part, page, LAYER), expected.rows(part, page, LAYER)
        np.testing.assert_allclose(stored, wanted, 1e-5, tolerance)
    for m in (0, 7, 19):
        one, alone = case.run(target, slice(m, m + 1))
        assert (one[0] == q[m]).all()
        page, token = divmod(case.slots[m], PAGE_SIZE)
        for part in PARTS if case.spec.writes_kv else ():
            assert (alone.items(part, page, LAYER)[:, token] == pool.items(part, page, LAYER)[:, token]).all()


@every_target
@every_spec
def test_heads_are_what_numpy_makes_of_them_in_every_batch(target: Target, spec: HeadSpec) -> None:
    check(target, HeadCase(spec, "f32", (4, 2), 48))


@pytest.mark.parametrize(("dtype", "head_dim"), [("f16", 80), ("k12v8", 30)])
@every_spec
def test_heads_are_what_numpy_makes_of_them_for_every_shape(spec: HeadSpec, dtype: KVDType, head_dim: int) -> None:
    check(NATIVE, HeadCase(spec, dtype, (3, 1), head_dim))


def test_heads_as_wide_as_gemma_4s_are_what_numpy_makes_of_them() -> None:
    check(NATIVE, HeadCase(SPECS["value norm"], "f16", (8, 1), 512))


def test_keys_and_values_may_be_the_same_columns() -> None:
    spec = HeadSpec(rotary_dim=16, qk_norm=HeadNorm(1e-6), value_eps=1e-6)
    case = HeadCase(spec, "f32", (4, 2), 32, shared=True)
    assert case.columns[1] == case.columns[2]
    check(NATIVE, case)


@pytest.mark.parametrize("offset", [0, 1])
def test_temperatures_grow_with_the_logarithm_of_the_context(offset: int) -> None:
    positions = np.array([0, 98, 99, 100, 101, 199, 200, 5000, (1 << 30) - 1], np.int32)
    temperatures = np.zeros(len(positions), np.float32)
    built(NATIVE, query_temperatures, 0.1, 100, offset)(positions, temperatures, len(positions))
    expected = 1 + 0.1 * np.log(1 + (positions.astype(np.int64) + offset) // 100)
    np.testing.assert_allclose(temperatures, expected, 1e-6)


def test_the_attention_factor_multiplies_cosines_and_sines() -> None:
    frequencies, positions = np.array([1, 0.1, 0], np.float32), np.array([3, 70], np.int32)
    plain, scaled = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32)
    built(NATIVE, rope_angles, 6)(positions, frequencies, plain, 2)
    built(NATIVE, rope_angles, 6, 1.25)(positions, frequencies, scaled, 2)
    np.testing.assert_allclose(scaled, plain * 1.25, 1e-6)
    assert (plain[:, [2, 5]] == [1, 0]).all()  # a pair of frequency 0 stays as it is

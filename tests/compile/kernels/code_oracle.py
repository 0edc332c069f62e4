"""Attention in integers as NumPy computes it: the same codes, weights and roundings, one query head at a time.

What is exact in the kernels is exact here. Weights are the float32 numbers of the kernels, fused or not as the target
does it, so that they round to the same codes; what is added up afterwards is float64.
"""

from __future__ import annotations

import math

import numpy as np
from radixlm.compile.codegen.powers import ROUGH_POWERS
from radixlm.compile.codegen.targets import Target
from radixlm.compile.ops.reference_mixers import SPAN, query_limit
from radixlm.runtime.artifact.manifest import PAGE_SIZE

from .attention_case import LAYER, AttentionCase, Tokens
from .pool import KEYS, VALUES, Part

Kept = tuple[np.ndarray, np.ndarray]
F32 = np.float32
ROUNDING = F32(1.5 * 2**23)


def expected_of_codes(case: AttentionCase, tokens: Tokens, target: Target) -> np.ndarray:
    """What `case.run` must return, `[M, heads, value_dim]`."""
    kept = {row: [_kept(case, part, row) for part in (KEYS, VALUES)] for row in set(tokens.rows.tolist())}
    return np.array([_token(case, tokens, m, kept[int(tokens.rows[m])], target) for m in range(len(tokens))])


def _token(case: AttentionCase, tokens: Tokens, m: int, kept: list[Kept], target: Target) -> list[np.ndarray]:
    features, length = case.features, int(tokens.lengths[m])
    start = features.start(length)
    group = case.num_heads // case.layout.num_kv_heads
    outputs = []
    for head in range(case.num_heads):
        keys, values = ([of[head // group, start:length] for of in part] for part in kept)
        sink = float(case.sinks[head]) / math.log(2) if features.has_sinks else None
        scores, factor = _scores(case, tokens.q[m, head], *keys, target)
        outputs.append(_gathered(scores, factor, *values, start, sink, target))
    return outputs


def _scores(
    case: AttentionCase, query: np.ndarray, keys: np.ndarray, scales: np.ndarray, target: Target
) -> tuple[np.ndarray, F32]:
    """Of powers of two: numbers, and what they are still to be multiplied by."""
    features, limit = case.features, query_limit(case.key_dim)
    scale = case.key_dim**-0.5 if features.scale is None else features.scale
    factor = scale / (math.log(2) if features.soft_cap is None else features.soft_cap)
    largest = np.maximum(np.abs(query).max(), F32(1e-30))
    query_scale = largest * F32(factor / limit)
    codes = _fma(query, F32(limit) / largest, ROUNDING, target) - ROUNDING
    sums = keys.astype(np.int64) @ codes.astype(np.int64)
    assert np.abs(sums).max(initial=0) < 1 << 31
    scores = sums.astype(F32) * scales
    if features.soft_cap is None:
        return scores, query_scale
    capped = np.tanh((scores * query_scale).astype(np.float64))
    return (features.soft_cap / math.log(2) * capped).astype(F32), F32(1)


def _gathered(
    scores: np.ndarray,
    factor: F32,
    values: np.ndarray,
    scales: np.ndarray,
    start: int,
    sink: float | None,
    target: Target,
) -> np.ndarray:
    largest = max(float(scores.max() * factor), -np.inf if sink is None else sink)
    total = 0.0 if sink is None else 2.0 ** (sink - largest)
    output, stop = np.zeros(values.shape[-1]), start + len(scores)
    for first in range(start // SPAN * SPAN, stop, SPAN):
        rows = slice(max(first, start) - start, min(first + SPAN, stop) - start)
        top_score = scores[rows].max() * factor
        weights = _power(_fma(scores[rows], factor, -top_score, target), target)
        scaled = weights * scales[rows]
        top = scaled.max()
        codes = _fma(scaled, F32(255) / top, ROUNDING, target) - ROUNDING
        part = 2.0 ** (float(top_score) - largest)
        total += part * weights.sum(dtype=np.float64)
        output += part * float(top * F32(1 / 255)) * (codes.astype(np.int64) @ values[rows].astype(np.int64))
    return output / total


def _power(x: np.ndarray, target: Target) -> np.ndarray:
    """2 ** x, by the kernels' polynomial."""
    x = np.maximum(x, F32(-126))
    whole = (x + ROUNDING) - ROUNDING
    r = x - whole
    p = np.full_like(x, ROUGH_POWERS[-1])
    for c in (*ROUGH_POWERS[-2::-1], 1.0):
        p = _fma(p, r, F32(c), target)
    return np.ldexp(p, whole.astype(np.int32))


def _fma(a: np.ndarray, b: np.ndarray | F32, c: np.ndarray | F32, target: Target) -> np.ndarray:
    if not target.has_fma:
        return (a * b + c).astype(F32)
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(F32)


def _kept(case: AttentionCase, part: Part, row: int) -> Kept:
    """Codes `[kv_heads, rows, n]` and scales `[kv_heads, rows]` of a sequence."""
    pages = case.pages[row]
    codes = np.concatenate([case.pool.items(part, page, LAYER)[:] for page in pages], axis=1)
    scales = np.concatenate([case.pool.scales(part, page, LAYER) for page in pages], axis=1)
    assert codes.shape[1] == len(pages) * PAGE_SIZE
    return codes, scales

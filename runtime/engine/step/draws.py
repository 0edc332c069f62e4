"""Sample a token from logits: find the tokens that can be sampled, and the one that a random number selects.

A row is as long as the vocabulary, and sampling must not pass over it in Python: the largest logits decide if they
can; else running sums from the compiled module say which few logits to read. Results are the same as if all weights
were computed and added in float64. Knows numbers, not requests or grammars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...artifact.manifest import WEIGHT_BLOCK
from ...model.batch import NEVER_DRAFTED, Float64Array
from ..sampling_params import SamplingParams
from .dry import IntArray
from .sampler_state import ChangedLogits, LogitsArray, relative_weights

ROUNDING = 1e-9  # far more than the rounding error of a float64 sum over a vocabulary
_MANY = 2048  # from this many numbers on, adding blocks first, and counting instead of comparing, pay
_MOST_SIGMAS = 1e6  # standard deviations; no two logits of a vocabulary are so far apart
_LEAST_LEFT = 0.01  # share of a row's weights left when some are subtracted from its sums, so that errors stay small
_COLDEST = 1e-6  # the lowest temperature for which sums are requested from the module
_GROUP = 64  # logits, of which only the largest is compared at first
FIRST_CANDIDATES = 256  # top-p sorts this many tokens first: nearly always they hold enough mass


@dataclass(frozen=True)
class Row:
    """A row of logits, of which one token is sampled.

    Attributes:
        logits: all logits.
        largest: the largest logit.
        top_ids: the ids of the largest ones, in the order of `top_of`; can be empty.
        running_sums: `TopLogits.running_sums` of this row; None if unavailable.
    """

    logits: LogitsArray
    largest: float
    top_ids: IntArray | None = None
    running_sums: Callable[[float], Float64Array] | None = None

    def weights(self, which: IntArray | slice, temperature: float) -> Float64Array:
        """Return the weights of some logits, relative to the largest one's."""
        return relative_weights(self.logits[which], temperature, self.largest)

    def sums(self, temperature: float) -> Float64Array | None:
        """Return the running sums of blocks of weights, if the module has them."""
        return None if self.running_sums is None or temperature < _COLDEST else self.running_sums(temperature)


def draw(row: Row, params: SamplingParams, number: float) -> int:
    """Sample from `softmax(logits / temperature)` of the logits that top-n-sigma leaves, cut to top-k, then top-p, then
    min-p. `number` is random, at least 0 and below 1.
    """
    if params.top_n_sigma > 0.0:
        near_ids = _near_best(row.logits.astype(np.float64), params.top_n_sigma)
        return int(near_ids[_draw_of_near(Row(row.logits[near_ids], row.largest), params, number)])
    return _draw_of_near(row, params, number)


def draw_uncut(row: Row, changed: ChangedLogits, params: SamplingParams, number: float) -> int | None:
    """Sample like `draw` from a row with a few changed logits, without any cut.

    None if the sums of the original row cannot decide.
    """
    sums = None if number < params.xtc_probability else row.sums(params.temperature)
    if sums is None:
        return None
    old = row.weights(changed.ids, params.temperature)
    new = relative_weights(changed.values, params.temperature, row.largest)
    running = sums + np.cumsum(np.bincount(changed.ids // WEIGHT_BLOCK, new - old, len(sums)))
    if not _LEAST_LEFT * sums[-1] <= running[-1] < math.inf:
        return None

    def weights(block: slice) -> Float64Array:
        found = row.weights(block, params.temperature)
        is_here = changed.ids // WEIGHT_BLOCK == block.start // WEIGHT_BLOCK
        found[changed.ids[is_here] - block.start] = new[is_here]
        return found

    return _found(running, weights, _rest_of(number, params))


def _near_best(logits: Float64Array, num_sigmas: float) -> IntArray:
    """Return the ids of the logits at most this many standard deviations below the largest one (Tang et al. 2024,
    arXiv:2411.07641). Logits that a draft did not compute are not counted.
    """
    is_computed = logits > NEVER_DRAFTED / 2
    deviation = logits[is_computed].std() if is_computed.any() else 0.0
    return np.flatnonzero(logits >= logits.max() - min(num_sigmas, _MOST_SIGMAS) * deviation)


def _draw_of_near(row: Row, params: SamplingParams, number: float) -> int:
    """Sample like `draw`, without top-n-sigma."""
    token_ids = _candidates(row, params)
    if token_ids is not None:
        return int(token_ids[pick(row.weights(token_ids, params.temperature), params, number)])
    if number >= params.xtc_probability and (sums := row.sums(params.temperature)) is not None:
        found = _found(sums, lambda block: row.weights(block, params.temperature), _rest_of(number, params))
        if found is not None:
            return found
    return pick(row.weights(slice(None), params.temperature), params, number)


def pick(weights: Float64Array, params: SamplingParams, number: float) -> int:
    """Return the index of a weight, sampled in proportion to it."""
    if params.xtc_probability > 0.0:
        weights, number = _without_top_choices(weights, params, number)
    if len(weights) > _MANY:
        sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), WEIGHT_BLOCK)))
        if (found := _found(sums, weights.__getitem__, number)) is not None:
            return found
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(weights) - 1)  # rounding can place the product on the total itself


def _without_top_choices(weights: Float64Array, params: SamplingParams, number: float) -> tuple[Float64Array, float]:
    """Remove all likely weights but the least likely one, with the requested probability (XTC, as in llama.cpp).

    Return the weights, and what is left of the random number, which is uniform again: a token takes one number,
    whatever it is used for.
    """
    if number >= params.xtc_probability:
        return weights, _rest_of(number, params)
    likely = np.flatnonzero(weights >= params.xtc_threshold * weights.sum())
    if len(likely) > 1:
        least = likely[len(likely) - 1 - int(np.argmin(weights[likely][::-1]))]  # of equal ones the last
        weights, kept = weights.copy(), weights[least]
        weights[likely], weights[least] = 0.0, kept
    return weights, number / params.xtc_probability


def _rest_of(number: float, params: SamplingParams) -> float:
    """Return what is left of a random number for which XTC removes nothing."""
    return (number - params.xtc_probability) / (1.0 - params.xtc_probability)


def _found(sums: Float64Array, weights_of: Callable[[slice], Float64Array], number: float) -> int | None:
    """Return the index at which a share `number` of all weights is reached, reading the weights of one block only.

    None if it is so near to the next weight that a running sum over all could round to that one.
    """
    wanted, nearest = number * sums[-1], ROUNDING * sums[-1]
    block = min(int(np.searchsorted(sums, wanted, side="right")), len(sums) - 1)
    before = sums[block - 1] if block else 0.0
    inside = before + np.cumsum(weights_of(slice(block * WEIGHT_BLOCK, (block + 1) * WEIGHT_BLOCK)))
    index = int(np.searchsorted(inside, wanted, side="right"))
    start = inside[index - 1] if index else before
    if index == len(inside) or min(wanted - start, inside[index] - wanted) <= nearest:
        return None
    return block * WEIGHT_BLOCK + index


def _candidates(row: Row, params: SamplingParams) -> IntArray | None:
    """Return the ids that can be sampled, most likely first; None for all."""
    temperature = params.temperature
    if 0 < params.top_k < len(row.logits):
        token_ids = top_of(row.logits, params.top_k)
        if params.top_p < 1.0:
            kept = row.weights(token_ids, temperature)
            token_ids = token_ids[: nucleus(np.cumsum(kept), params.top_p * kept.sum())]
    elif params.top_p < 1.0:
        token_ids = _top_p(row, params)
    elif params.min_p > 0.0:
        return _at_least(row, params.min_p, temperature)
    else:
        return None
    if params.min_p > 0.0:
        token_ids = token_ids[row.weights(token_ids, temperature) >= params.min_p]
    return token_ids


def _top_p(row: Row, params: SamplingParams) -> IntArray:
    """Return the fewest most likely ids that hold `top_p` of the mass; sorts no more than it must."""
    temperature, top_p = params.temperature, params.top_p
    sums = row.sums(temperature)
    total = row.weights(slice(None), temperature).sum() if sums is None else sums[-1]
    for token_ids in _likeliest(row, (1.0 - top_p) * total / len(row.logits), temperature):
        cumulative = np.cumsum(row.weights(token_ids, temperature))
        if cumulative[-1] >= top_p * total * (1.0 + ROUNDING):
            break
    counts = {nucleus(cumulative, top_p * total * (1.0 + error)) for error in (-ROUNDING, ROUNDING)}
    if sums is not None and len(counts) > 1:  # too near for a sum in another order
        total = row.weights(slice(None), temperature).sum()
    return token_ids[: nucleus(cumulative, top_p * total)]


def _likeliest(row: Row, share: float, temperature: float) -> Iterator[IntArray]:
    """Yield ever more of the most likely ids: the given ones, some, all with weights of at least `share`, and all."""
    if row.top_ids is not None:
        yield row.top_ids
    for count in (FIRST_CANDIDATES, 8 * FIRST_CANDIDATES):
        yield top_of(row.logits, count)
    token_ids = _at_least(row, share, temperature)
    yield token_ids[_largest_first(row.logits[token_ids])]
    yield top_of(row.logits, len(row.logits))


def _at_least(row: Row, share: float, temperature: float) -> IntArray:
    """Return the ids whose weights are at least `share` of the largest one's, in order."""
    if share <= 0.0:
        return np.arange(len(row.logits))
    bound = row.largest + temperature * math.log(share)
    bound -= 1e-6 * (abs(bound) + abs(row.largest))  # float32 numbers are compared first, with room for rounding
    with np.errstate(over="ignore"):
        token_ids = np.flatnonzero(row.logits >= row.logits.dtype.type(bound))
    return token_ids[row.weights(token_ids, temperature) >= share]


def nucleus(cumulative: Float64Array, wanted: float) -> int:
    """Return how many of the sorted weights reach the mass `wanted`; at least one."""
    return int(np.searchsorted(cumulative, wanted, side="left")) + 1


def top_of(values: LogitsArray, count: int) -> IntArray:
    """Return the ids of the `count` largest values, largest first, lower ids first on ties."""
    if count >= len(values):
        return _largest_first(values)
    bounds = values
    if count <= len(values) // _GROUP:  # this many groups have a value not below the bound
        bounds = values[: len(values) // _GROUP * _GROUP].reshape(_GROUP, -1).max(axis=0)
    smallest = np.partition(bounds, len(bounds) - count)[len(bounds) - count]
    token_ids = np.flatnonzero(values >= smallest)
    return token_ids[_largest_first(values[token_ids])[:count]]


def _largest_first(values: LogitsArray) -> IntArray:
    """Return the indices of all values, largest first, lower indices first on ties."""
    if values.dtype != np.float32 or len(values) < _MANY:
        return np.argsort(-values, kind="stable")
    bits = (values + np.float32(0.0)).view(np.uint32)  # -0.0 gets the bits of 0.0
    keys = np.where(bits >> 31, bits, bits ^ 0x7FFFFFFF)  # rise as the values fall
    order = np.argsort(keys.astype(np.uint16), kind="stable")  # of 16 bits NumPy counts instead of comparing
    return order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]

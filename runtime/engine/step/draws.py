"""Draw a token from logits: which tokens may be drawn, and on which of them a random number falls.

A row is as long as the vocabulary, and a draw must not cost a pass over it in Python: the largest logits decide if they
can, and else running sums of the compiled module say which few logits to read. Results are those of weights that are
all computed and added in float64. Knows numbers, not requests or grammars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ...artifact.manifest import WEIGHT_BLOCK
from ...model.batch import Float64Array
from ..sampling_params import SamplingParams
from .dry import IntArray
from .sampler_state import ChangedLogits, LogitsArray, relative_weights

ROUNDING = 1e-9  # far more than what a float64 sum of a vocabulary is off
_MANY = 2048  # numbers from which on adding blocks first, and counting instead of comparing, pay
_MOST_SIGMAS = 1e6  # standard deviations; no two logits of a vocabulary are so far apart
_LEAST_LEFT = 0.01  # of the weights of a row, where some are taken off its sums: rounding stays below `ROUNDING`
_COLDEST = 1e-6  # the lowest temperature whose sums the module is asked for
_GROUP = 64  # logits of which the largest is looked at before any other
FIRST_CANDIDATES = 256  # top-p sorts this many tokens first: nearly always they hold the mass that it wants


@dataclass(frozen=True)
class Row:
    """Logits of which one token is drawn.

    Attributes:
        logits: all of them.
        largest: the largest.
        top_ids: the ids of the largest ones, as `top_of` gives them; perhaps none.
        running_sums: `TopLogits.running_sums` of this row; None: they are not to be had.
    """

    logits: LogitsArray
    largest: float
    top_ids: IntArray | None = None
    running_sums: Callable[[float], Float64Array] | None = None

    def weights(self, which: IntArray | slice, temperature: float) -> Float64Array:
        """Of some logits, relative to the largest one's."""
        return relative_weights(self.logits[which], temperature, self.largest)

    def sums(self, temperature: float) -> Float64Array | None:
        """The running sums of blocks of weights, if the module gives them."""
        return None if self.running_sums is None or temperature < _COLDEST else self.running_sums(temperature)


def draw(row: Row, params: SamplingParams, number: float) -> int:
    """Draw from the logits that top-n-sigma leaves: from their `softmax(logits / temperature)`, cut to top-k, then
    top-p, then min-p. `number` is random, from 0 to below 1.
    """
    if params.top_n_sigma > 0.0:
        near_ids = _near_best(row.logits.astype(np.float64), params.top_n_sigma)
        return int(near_ids[_draw_of_near(Row(row.logits[near_ids], row.largest), params, number)])
    return _draw_of_near(row, params, number)


def draw_uncut(row: Row, changed: ChangedLogits, params: SamplingParams, number: float) -> int | None:
    """As `draw` of a row of which a few logits are others, without any cut.

    None: that must be computed, because the sums of the row as it was do not tell.
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
    """The ids of the logits that are so many standard deviations below the largest one or fewer (Tang et al. 2024,
    arXiv:2411.07641).
    """
    return np.flatnonzero(logits >= logits.max() - min(num_sigmas, _MOST_SIGMAS) * logits.std())


def _draw_of_near(row: Row, params: SamplingParams, number: float) -> int:
    """As `draw`, where top-n-sigma has nothing more to drop."""
    token_ids = _candidates(row, params)
    if token_ids is not None:
        return int(token_ids[pick(row.weights(token_ids, params.temperature), params, number)])
    if number >= params.xtc_probability and (sums := row.sums(params.temperature)) is not None:
        found = _found(sums, lambda block: row.weights(block, params.temperature), _rest_of(number, params))
        if found is not None:
            return found
    return pick(row.weights(slice(None), params.temperature), params, number)


def pick(weights: Float64Array, params: SamplingParams, number: float) -> int:
    """The index of a weight, drawn with a probability in proportion to it."""
    if params.xtc_probability > 0.0:
        weights, number = _without_top_choices(weights, params, number)
    if len(weights) > _MANY:
        sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), WEIGHT_BLOCK)))
        if (found := _found(sums, weights.__getitem__, number)) is not None:
            return found
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(weights) - 1)  # rounding may place the product on the total itself


def _without_top_choices(weights: Float64Array, params: SamplingParams, number: float) -> tuple[Float64Array, float]:
    """Leave out all likely weights but the least likely one, so often as is asked for (XTC, llama.cpp's), and return
    what is left of a random number, which is uniform again: a token takes one number, whatever it is used for.
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
    """What is left of a random number that says that XTC leaves out nothing."""
    return (number - params.xtc_probability) / (1.0 - params.xtc_probability)


def _found(sums: Float64Array, weights_of: Callable[[slice], Float64Array], number: float) -> int | None:
    """Return the index where a share `number` of all weights is reached, having read those of one block only.

    None: so near to the next weight that a running sum over all may round to that one.
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
    """The ids that may be drawn, most likely first, or None for all."""
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
    """The fewest most likely ids that hold `top_p` of the mass; sorts no more than it must."""
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
    """Ever more of the most likely ids: those at hand, some, all whose weights are at least `share`, and all."""
    if row.top_ids is not None:
        yield row.top_ids
    for count in (FIRST_CANDIDATES, 8 * FIRST_CANDIDATES):
        yield top_of(row.logits, count)
    token_ids = _at_least(row, share, temperature)
    yield token_ids[_largest_first(row.logits[token_ids])]
    yield top_of(row.logits, len(row.logits))


def _at_least(row: Row, share: float, temperature: float) -> IntArray:
    """The ids whose weights are at least `share` of the largest one's, in order."""
    if share <= 0.0:
        return np.arange(len(row.logits))
    bound = row.largest + temperature * math.log(share)
    bound -= 1e-6 * (abs(bound) + abs(row.largest))  # float32 numbers are compared first, with room for rounding
    with np.errstate(over="ignore"):
        token_ids = np.flatnonzero(row.logits >= row.logits.dtype.type(bound))
    return token_ids[row.weights(token_ids, temperature) >= share]


def nucleus(cumulative: Float64Array, wanted: float) -> int:
    """How many of the sorted weights it takes to reach the mass `wanted`; at least one."""
    return int(np.searchsorted(cumulative, wanted, side="left")) + 1


def top_of(values: LogitsArray, count: int) -> IntArray:
    """The ids of the `count` largest values, largest first, lower ids first on ties."""
    if count >= len(values):
        return _largest_first(values)
    bounds = values
    if count <= len(values) // _GROUP:  # so many groups have a value that is no less than the bound
        bounds = values[: len(values) // _GROUP * _GROUP].reshape(_GROUP, -1).max(axis=0)
    smallest = np.partition(bounds, len(bounds) - count)[len(bounds) - count]
    token_ids = np.flatnonzero(values >= smallest)
    return token_ids[_largest_first(values[token_ids])[:count]]


def _largest_first(values: LogitsArray) -> IntArray:
    """The places of all values, largest first, lower places first on ties."""
    if values.dtype != np.float32 or len(values) < _MANY:
        return np.argsort(-values, kind="stable")
    bits = (values + np.float32(0.0)).view(np.uint32)  # of -0.0 those of 0.0
    keys = np.where(bits >> 31, bits, bits ^ 0x7FFFFFFF)  # rise as the values fall
    order = np.argsort(keys.astype(np.uint16), kind="stable")  # of 16 bits NumPy counts instead of comparing
    return order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]

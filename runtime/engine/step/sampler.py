"""Choose one token per row of logits, as each request's `SamplingParams` wish.

Rows are independent: what a request draws depends on its own logits, parameters, generator and constraint, never on
the rows beside it. Knows numbers and bits, not text, grammars or pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...chat.token_constraint import BoolArray, allowed_of
from ...errors import ConstraintFailed
from ...model.batch import Float32Array, Int32Array, TopLogits
from ..completion import TokenLogprob
from ..sampling_params import SamplingParams
from .dry import Float64Array, IntArray
from .sampler_state import SamplerState, relative_weights

_ROUNDING = 1e-9  # far more than what a float64 sum of a vocabulary is off
_ONLY_BANNED = "that may come here leads to a banned string; ban fewer strings"
_BLOCK = 256  # weights that are added at once, to find where a draw falls
_MANY = 2048  # weights for which that pays
_MOST_SIGMAS = 1e6  # standard deviations; no two logits of a vocabulary are so far apart
FIRST_CANDIDATES = 256  # top-p sorts this many tokens first: nearly always they hold the mass that it wants


class StepLogits:
    """The logits of one step, `[R, vocab]`, with the largest of each row.

    Attributes:
        values: the logits.
        top: the largest of each row.
        most_likely: the id of the largest of each row.
        is_finite: of each row, whether all of it are finite.
        now: when they were computed, in seconds on the engine's clock.
    """

    __slots__ = ("is_finite", "most_likely", "now", "top", "values")

    def __init__(self, values: Float32Array, top: TopLogits, now: float = 0.0) -> None:
        assert len(values) == len(top.values)
        self.values, self.top, self.now = values, top, now
        self.most_likely: list[int] = top.token_ids[:, 0].tolist()
        self.is_finite: list[int] = top.is_finite.tolist()


class SampledToken(NamedTuple):
    """The token chosen for one row, with its logprob if the request asks for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class Refusal(NamedTuple):
    """No token can be chosen for one row: its constraint failed."""

    error: ConstraintFailed


Sampled = SampledToken | Refusal | None


def sample(logits: Float32Array, top: TopLogits, states: Sequence[SamplerState]) -> list[Sampled]:
    """Return a token for each row of `logits` `[R, vocab]`, of which `top` are the largest; see `sample_row`."""
    step = StepLogits(logits, top)
    return [sample_row(step, row, state) for row, state in zip(range(len(logits)), states, strict=True)]


def sample_row(step: StepLogits, row: int, state: SamplerState) -> Sampled:
    """Return a token for a row of a step; None if the row has a number that is not finite, and a refusal if the
    state's constraint lets no token be chosen.

    The row itself is read only where its largest logits do not decide, and the result is the same as if it always were.
    Draws from the state's generator, but records nothing: the caller does when it accepts the token.
    """
    if not step.is_finite[row]:
        return None
    if state.takes_best:
        return SampledToken(step.most_likely[row])
    return _chosen(step.values[row], step.top.values[row], step.top.token_ids[row], state)


def _chosen(
    logits: Float32Array, top_values: Float32Array, top_ids: Int32Array, state: SamplerState
) -> SampledToken | Refusal:
    params = state.params
    try:
        mask = None if state.constraint is None else state.constraint.mask()
    except ConstraintFailed as error:
        return Refusal(error)
    if mask is not None or len(state.banned_ids):
        is_allowed = np.ones(len(logits), np.bool_) if mask is None else allowed_of(mask, len(logits)).copy()
        is_allowed[state.banned_ids] = False
        if not is_allowed.any():
            return Refusal(ConstraintFailed(f"each of the {len(state.banned_ids)} tokens {_ONLY_BANNED}"))
        token_id = _allowed(logits, top_values, top_ids, state, is_allowed)
    elif params.changes_logits:
        adjusted = logits.astype(np.float64)
        state.penalize(adjusted)
        token_id = int(np.argmax(adjusted)) if params.greedy else _draw(adjusted, state)
    elif params.greedy:
        token_id = int(top_ids[0])
    else:
        token_id = _draw_of_top(logits, top_values, top_ids, state)
    if params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, logprob_of(logits, top_values, top_ids, token_id, params.logprobs))


def _allowed(
    logits: Float32Array, top_values: Float32Array, top_ids: Int32Array, state: SamplerState, is_allowed: BoolArray
) -> int:
    """As if the tokens that are not allowed did not exist; the others keep their logits."""
    params = state.params
    if not params.changes_logits:
        is_kept = is_allowed[top_ids]
        ids, values = top_ids[is_kept], top_values[is_kept]
        if len(ids) and params.greedy:
            return int(ids[0])
        if len(ids):
            weights = relative_weights(values.astype(np.float64), params.temperature)
            kept = _kept(weights, ids, int(np.count_nonzero(is_allowed)) - len(ids), params)
            if kept is not None:
                return int(ids[kept[_pick(weights[kept], state)]])
    adjusted = logits.astype(np.float64)
    state.penalize(adjusted)
    allowed_ids = np.flatnonzero(is_allowed)
    values_left = adjusted[allowed_ids]
    return int(allowed_ids[int(np.argmax(values_left)) if params.greedy else _draw(values_left, state)])


def _draw_of_top(logits: Float32Array, top_values: Float32Array, top_ids: Int32Array, state: SamplerState) -> int:
    """As `_draw` of the whole row, which is read only if more than the top may be drawn."""
    weights = relative_weights(top_values.astype(np.float64), state.params.temperature)
    kept = _kept(weights, top_ids, len(logits) - len(weights), state.params)
    if kept is None:
        return _draw(logits.astype(np.float64), state)
    return int(top_ids[kept[_pick(weights[kept], state)]])


def _kept(weights: Float64Array, ids: Int32Array, num_others: int, params: SamplingParams) -> IntArray | None:
    """Return which of the largest weights can be drawn, in the order of `_candidates`.

    None if the whole row must be read: other weights can be drawn as well, or all logits decide (top-n-sigma).
    """
    if params.top_n_sigma > 0.0:
        return None
    is_min_p_alone = params.top_p == 1.0 and not 0 < params.top_k < len(weights) + num_others and params.min_p > 0.0
    if is_min_p_alone and weights[-1] < params.min_p * weights[0]:  # the others weigh no more than the last one
        is_kept = weights >= params.min_p * weights[0]
        return np.argsort(ids[is_kept])
    num_kept = _num_kept(weights, num_others, params)
    return None if num_kept is None else np.arange(num_kept)


def _num_kept(weights: Float64Array, num_others: int, params: SamplingParams) -> int | None:
    """How many of the largest weights may be drawn; None if others may be, which weigh no more than the last one."""
    if 0 < params.top_k <= len(weights) and params.top_k < len(weights) + num_others:
        num_kept = params.top_k
        if params.top_p < 1.0:
            num_kept = _nucleus(np.cumsum(weights[:num_kept]), params.top_p * weights[:num_kept].sum())
    elif params.top_p < 1.0:
        cumulative = np.cumsum(weights)
        least, most = cumulative[-1], cumulative[-1] + num_others * weights[-1]
        # the sum of a row in another order is another one in the last digits
        num_kept = _nucleus(cumulative, params.top_p * least * (1 - _ROUNDING))
        if num_kept != _nucleus(cumulative, params.top_p * most * (1 + _ROUNDING)) or num_kept > len(weights):
            return None
    else:
        return None
    return int((weights[:num_kept] >= params.min_p * weights[0]).sum()) if params.min_p > 0.0 else num_kept


def _draw(logits: Float64Array, state: SamplerState) -> int:
    """Draw from the logits that top-n-sigma leaves: from their `softmax(logits / temperature)`, cut to top-k, then
    top-p, then min-p.
    """
    if state.params.top_n_sigma > 0.0:
        near_ids = _near_best(logits, state.params.top_n_sigma)
        return int(near_ids[_draw_of_near(logits[near_ids], state)])
    return _draw_of_near(logits, state)


def _near_best(logits: Float64Array, num_sigmas: float) -> IntArray:
    """The ids of the logits that are so many standard deviations below the largest one or fewer (Tang et al. 2024,
    arXiv:2411.07641).
    """
    return np.flatnonzero(logits >= logits.max() - min(num_sigmas, _MOST_SIGMAS) * logits.std())


def _draw_of_near(logits: Float64Array, state: SamplerState) -> int:
    """As `_draw`, where top-n-sigma has nothing more to drop."""
    weights = relative_weights(logits, state.params.temperature)
    token_ids = _candidates(weights, state.params)
    if token_ids is None:
        return _pick(weights, state)
    return int(token_ids[_pick(weights[token_ids], state)])


def _pick(weights: Float64Array, state: SamplerState) -> int:
    """The index of a weight, drawn with a probability in proportion to it."""
    number = state.uniform()
    if state.params.xtc_probability > 0.0:
        weights, number = _without_top_choices(weights, state.params, number)
    if len(weights) > _MANY and (found := _pick_in_block(weights, number)) is not None:
        return found
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(weights) - 1)  # rounding may place the product on the total itself


def _without_top_choices(weights: Float64Array, params: SamplingParams, number: float) -> tuple[Float64Array, float]:
    """Leave out all likely weights but the least likely one, so often as is asked for (XTC, llama.cpp's), and return
    what is left of a random number, which is uniform again: a token takes one number, whatever it is used for.
    """
    share = params.xtc_probability
    if number >= share:
        return weights, (number - share) / (1.0 - share)
    likely = np.flatnonzero(weights >= params.xtc_threshold * weights.sum())
    if len(likely) > 1:
        least = likely[len(likely) - 1 - int(np.argmin(weights[likely][::-1]))]  # of equal ones the last
        weights, kept = weights.copy(), weights[least]
        weights[likely], weights[least] = 0.0, kept
    return weights, number / share


def _pick_in_block(weights: Float64Array, number: float) -> int | None:
    """Return the index where a share `number` of all weights is reached, in a third of the time that their running sum
    takes. None: so near to the next weight that the running sum may round to that one.
    """
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    wanted, nearest = number * ends[-1], _ROUNDING * ends[-1]
    block = min(int(np.searchsorted(ends, wanted, side="right")), len(ends) - 1)
    before = ends[block - 1] if block else 0.0
    inside = before + np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK])
    index = int(np.searchsorted(inside, wanted, side="right"))
    start = inside[index - 1] if index else before
    if index == len(inside) or min(wanted - start, inside[index] - wanted) <= nearest:
        return None
    return block * _BLOCK + index


def _candidates(weights: Float64Array, params: SamplingParams) -> IntArray | None:
    """The ids that may be drawn, most likely first, or None for all; `weights` are probabilities times a
    constant.
    """
    if 0 < params.top_k < len(weights):
        token_ids = _top(weights, params.top_k)
        if params.top_p < 1.0:
            kept = weights[token_ids]
            token_ids = token_ids[: _nucleus(np.cumsum(kept), params.top_p * kept.sum())]
    elif params.top_p < 1.0:
        token_ids = _top_p(weights, params.top_p)
    elif params.min_p > 0.0:
        return np.flatnonzero(weights >= params.min_p * weights.max())
    else:
        return None
    if params.min_p > 0.0:
        token_ids = token_ids[weights[token_ids] >= params.min_p * weights.max()]
    return token_ids


def _top_p(weights: Float64Array, top_p: float) -> IntArray:
    """The fewest most likely ids that hold `top_p` of the mass; sorts no more than it must."""
    wanted = top_p * weights.sum()
    num_candidates = FIRST_CANDIDATES
    while True:
        token_ids = _top(weights, num_candidates)
        cumulative = np.cumsum(weights[token_ids])
        if cumulative[-1] >= wanted or num_candidates >= len(weights):
            return token_ids[: _nucleus(cumulative, wanted)]
        num_candidates *= 8


def _nucleus(cumulative: Float64Array, wanted: float) -> int:
    """How many of the sorted weights it takes to reach the mass `wanted`; at least one."""
    return int(np.searchsorted(cumulative, wanted, side="left")) + 1


def _top(values: Float64Array, count: int) -> IntArray:
    """The ids of the `count` largest values, largest first, lower ids first on ties."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    smallest = np.partition(values, len(values) - count)[len(values) - count]
    token_ids = np.flatnonzero(values >= smallest)
    return token_ids[np.argsort(-values[token_ids], kind="stable")[:count]]


def logprob_of(
    logits: Float32Array, top_values: Float32Array, top_ids: Int32Array, token_id: int, num_top: int
) -> TokenLogprob:
    """What the model itself says of a token, before anything that a request wishes, and of the `num_top` most likely.

    Args:
        logits: `[vocab]`, all finite.
        top_values, top_ids: the largest of these; the rest is read if they are fewer than `num_top`.
    """
    weights = logits.astype(np.float64)
    if len(top_ids) < min(num_top, len(logits)):
        top_ids = _top(weights, num_top).astype(np.int32)
        top_values = logits[top_ids]
    largest = weights.max()
    weights -= largest
    total = np.log(np.exp(weights, out=weights).sum())
    own, values = logits[token_id], top_values[:num_top].astype(np.float64) - largest - total
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token_id] == own))
    top = tuple(zip(top_ids[:num_top].tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(np.float64(own) - largest - total), top, rank)

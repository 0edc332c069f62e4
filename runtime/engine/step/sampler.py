"""Choose one token per row of logits, by each request's `SamplingParams`.

Rows are independent: the token depends on the request's own logits, parameters, generator and constraint, never on
other rows. Knows numbers and bits, not text, grammars or pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ...chat.token_constraint import BoolArray, allowed_of
from ...errors import ConstraintFailed
from ...model.batch import Float32Array, Float64Array, TopLogits
from ..completion import TokenLogprob
from ..sampling_params import SamplingParams
from .draws import ROUNDING, Row, draw, draw_uncut, nucleus, pick, top_of
from .dry import IntArray
from .sampler_state import ChangedLogits, SamplerState, logarithm, relative_weights

_FEW = 8192  # changed logits of a row that its sums are corrected for; with more, all weights are computed
_ONLY_BANNED = "that may come here leads to a banned string; ban fewer strings"


class StepLogits:
    """The logits of one step, `[R, vocab]`, with the largest of each row.

    Attributes:
        values: the logits.
        top: the largest of each row.
        most_likely: the id of the largest of each row.
        is_finite: for each row, whether all its logits are finite.
        now: time at which they were computed, in seconds on the engine's clock.
    """

    __slots__ = ("_sums", "is_finite", "most_likely", "now", "top", "values")

    def __init__(self, values: Float32Array, top: TopLogits, now: float = 0.0) -> None:
        assert len(values) == len(top.values)
        self.values, self.top, self.now = values, top, now
        self.most_likely: list[int] = top.token_ids[:, 0].tolist()
        self.is_finite: list[int] = top.is_finite.tolist()
        self._sums: dict[tuple[int, float], Float64Array] = {}

    def running_sums(self, row: int, temperature: float) -> Float64Array:
        """Return `TopLogits.running_sums`, computed once; there must be some."""
        key = row, temperature
        if (found := self._sums.get(key)) is None:
            assert self.top.running_sums is not None
            found = self._sums[key] = self.top.running_sums(row, temperature)
        return found

    def row(self, row: int) -> Row:
        """Return all logits of a row, to sample from."""
        sums = None if self.top.running_sums is None else partial(self.running_sums, row)
        top = self.top
        return Row(self.values[row], float(top.values[row, 0]), top.token_ids[row].astype(np.intp), sums)

    def total_weight(self, row: int) -> float:
        """Return the sum of a row's weights at temperature 1, relative to the weight of its largest logit."""
        if self.top.running_sums is not None:
            return float(self.running_sums(row, 1.0)[-1])
        return float(relative_weights(self.values[row], 1.0).sum())


class SampledToken(NamedTuple):
    """The token chosen for one row, with its logprob if the request asks for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class Refusal(NamedTuple):
    """The failure of a constraint, so that no token can be chosen for a row."""

    error: ConstraintFailed


Sampled = SampledToken | Refusal | None


def sample(logits: Float32Array, top: TopLogits, states: Sequence[SamplerState]) -> list[Sampled]:
    """Return a token for each row of `logits` `[R, vocab]` with the largest logits `top`; see `sample_row`."""
    step = StepLogits(logits, top)
    return [sample_row(step, row, state) for row, state in zip(range(len(logits)), states, strict=True)]


def sample_row(step: StepLogits, row: int, state: SamplerState) -> Sampled:
    """Return a token for a row of a step; None if the row is not finite, a refusal if the constraint allows no token.

    The row itself is read only if its largest logits do not decide; the result is the same as if it always were.
    Draws from the state's generator, but records nothing: the caller does when it accepts the token.
    """
    if not step.is_finite[row]:
        return None
    if state.takes_best:
        return SampledToken(step.most_likely[row])
    return _chosen(step, row, state)


def _chosen(step: StepLogits, row: int, state: SamplerState) -> SampledToken | Refusal:
    """Return the token sampled from one row, with its log probability if requested; a refusal if none is allowed.

    Reads the whole row only if its largest logits do not decide.
    """
    params, logits = state.params, step.values[row]
    try:
        mask = None if state.constraint is None else state.constraint.mask()
    except ConstraintFailed as error:
        return Refusal(error)
    head, is_allowed = _Head.of(step, row), None
    changed = state.penalized(logits) if params.changes_logits else None
    if changed is not None:
        head = head.with_changed(changed)
    if mask is not None or len(state.banned_ids):
        is_allowed = np.ones(len(logits), np.bool_) if mask is None else allowed_of(mask, len(logits)).copy()
        is_allowed[state.banned_ids] = False
        num_allowed = int(np.count_nonzero(is_allowed))
        if not num_allowed:
            return Refusal(ConstraintFailed(f"each of the {len(state.banned_ids)} tokens {_ONLY_BANNED}"))
        head = head.with_allowed(is_allowed, num_allowed)
    number = 0.0 if params.greedy else state.uniform()
    token_id = head.choose(params, number)
    if token_id is None and changed is None and is_allowed is None:
        token_id = draw(step.row(row), params, number)
    elif token_id is None:
        token_id = _choose_of_all(step.row(row), changed, is_allowed, params, number)
    if params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, logprob_of(step, row, token_id, params.logprobs))


def _choose_of_all(
    row: Row, changed: ChangedLogits | None, is_allowed: BoolArray | None, params: SamplingParams, number: float
) -> int:
    """Choose from a row as if the forbidden tokens did not exist; the others keep their logits, after penalties."""
    if not params.greedy and not params.cuts:
        every = changed if is_allowed is None else _without_forbidden(changed, is_allowed)
        if every is not None and len(every.ids) <= _FEW:
            token_id = draw_uncut(row, every, params, number)
            if token_id is not None:
                return token_id
    values = row.logits.astype(np.float64)
    if changed is not None:
        values[changed.ids] = changed.values
    allowed_ids = None if is_allowed is None else np.flatnonzero(is_allowed)
    if allowed_ids is not None:
        values = values[allowed_ids]
    best = int(values.argmax())
    index = best if params.greedy else draw(Row(values, float(values[best])), params, number)
    return index if allowed_ids is None else int(allowed_ids[index])


def _without_forbidden(changed: ChangedLogits | None, is_allowed: BoolArray) -> ChangedLogits:
    """Return the changes, with logits of -inf for tokens that are not allowed."""
    is_forbidden = ~is_allowed
    if changed is None:
        ids = np.flatnonzero(is_forbidden)
        return ChangedLogits(ids, np.full(len(ids), -math.inf))
    values = np.where(is_allowed[changed.ids], changed.values, -math.inf)
    is_forbidden[changed.ids] = False
    ids = np.flatnonzero(is_forbidden)
    return ChangedLogits(np.concatenate([changed.ids, ids]), np.concatenate([values, np.full(len(ids), -math.inf)]))


@dataclass(frozen=True)
class _Head:
    """The largest logits of a row as one request sees them, which often decide the token.

    Attributes:
        values, token_ids: largest first, the lower id first on ties.
        limit: no other logit is larger.
        num_others: number of other logits.
    """

    values: Float64Array
    token_ids: IntArray
    limit: float
    num_others: int

    @classmethod
    def of(cls, step: StepLogits, row: int) -> _Head:
        """Return the largest logits as the model computed them."""
        values, token_ids = step.top.values[row].astype(np.float64), step.top.token_ids[row].astype(np.intp)
        return cls(values, token_ids, float(values[-1]), step.values.shape[1] - len(values))

    def with_changed(self, changed: ChangedLogits) -> _Head:
        """Return a copy with changed values of some ids: only those above the limit, because others may equal it."""
        size = len(self.token_ids) + self.num_others
        limit = self.limit if self.num_others else -math.inf
        places = np.searchsorted(changed.ids, self.token_ids)
        is_unchanged = np.append(changed.ids, -1)[places] != self.token_ids
        kept, added = is_unchanged & (self.values > limit), changed.values > limit
        values = np.concatenate([self.values[kept], changed.values[added]])
        token_ids = np.concatenate([self.token_ids[kept], changed.ids[added]])
        order = np.lexsort((token_ids, -values))
        return _Head(values[order], token_ids[order], self.limit, size - len(values))

    def with_allowed(self, is_allowed: BoolArray, num_allowed: int) -> _Head:
        """Return a copy without tokens that are not allowed."""
        is_kept = is_allowed[self.token_ids]
        values, token_ids = self.values[is_kept], self.token_ids[is_kept]
        return _Head(values, token_ids, self.limit, num_allowed - len(values))

    def choose(self, params: SamplingParams, number: float) -> int | None:
        """Return the token that the whole row would choose; None if other logits matter."""
        if not len(self.values):
            return None
        if params.greedy:
            return int(self.token_ids[0])
        if not params.cuts:
            return None
        weights = relative_weights(np.append(self.values, self.limit), params.temperature, self.values[0])
        kept = self._kept(weights[:-1], weights[-1], params)
        return None if kept is None else int(self.token_ids[kept[pick(weights[kept], params, number)]])

    def _kept(self, weights: Float64Array, limit: float, params: SamplingParams) -> IntArray | None:
        """Return the indices of the largest weights that can be sampled, in the order of `draw`.

        None if other weights can be sampled as well, or if all logits decide (top-n-sigma).
        """
        if params.top_n_sigma > 0.0:
            return None
        is_min_p_alone = params.top_p == 1.0 and not 0 < params.top_k < len(weights) + self.num_others
        if is_min_p_alone and params.min_p > 0.0 and limit < params.min_p:
            return np.argsort(self.token_ids[weights >= params.min_p])
        num_kept = self._count_kept(weights, limit, params)
        if num_kept is None:
            return None
        return np.arange(int((weights[:num_kept] >= params.min_p).sum()))

    def _count_kept(self, weights: Float64Array, limit: float, params: SamplingParams) -> int | None:
        """Return how many of the head's tokens top-k and top-p keep; None if they may keep tokens outside of it.

        Args:
            weights: of the head's tokens, largest first.
            limit: the most that a token outside of the head can weigh.
        """
        if 0 < params.top_k <= len(weights) and params.top_k < len(weights) + self.num_others:
            num_kept = params.top_k
            if params.top_p < 1.0:
                num_kept = nucleus(np.cumsum(weights[:num_kept]), params.top_p * weights[:num_kept].sum())
        elif params.top_p < 1.0:
            cumulative = np.cumsum(weights)
            least, most = cumulative[-1], cumulative[-1] + self.num_others * limit
            # the sum of a row in another order differs in the last digits
            num_kept = nucleus(cumulative, params.top_p * least * (1 - ROUNDING))
            if num_kept != nucleus(cumulative, params.top_p * most * (1 + ROUNDING)) or num_kept > len(weights):
                return None
        else:
            return None
        return num_kept


def logprob_of(step: StepLogits, row: int, token_id: int, num_top: int) -> TokenLogprob:
    """Return the model's own log probability of a token, before a request's parameters, and the `num_top` most likely.

    All logits of the row must be finite.
    """
    logits, top_ids, top_values = step.values[row], step.top.token_ids[row], step.top.values[row]
    if len(top_ids) < min(num_top, len(logits)):
        top_ids = top_of(logits, num_top)
        top_values = logits[top_ids]
    largest, own = float(top_values[0]), logits[token_id]
    total = logarithm(step.total_weight(row))
    values = top_values[:num_top].astype(np.float64) - largest - total
    found = np.flatnonzero(top_ids == token_id)
    if len(found):
        rank = int(found[0]) + 1
    else:
        rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token_id] == own))
    top = tuple(zip(top_ids[:num_top].tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(np.float64(own) - largest - total), top, rank)

"""The state of sampling for one request: random numbers, counts for penalties, and the reply's constraint.

Knows one request's parameters, not rows of logits of others, text or pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...chat.token_constraint import Foresight, TokenConstraint
from ...model.batch import Float32Array, Float64Array, TopLogits
from ..sampling_params import SamplingParams
from .dry import Dry, IntArray

LogitsArray = Float32Array | Float64Array
_SQRT_HALF = 0.7071067811865476
_ATANH = tuple(2 / (2 * k + 1) for k in reversed(range(12)))  # over a square of at most 0.03, to 1e-18
_LOG_2 = (0.6931471803691238, 1.9082149292705877e-10)
NO_IDS: IntArray = np.empty(0, np.intp)


class ChangedLogits(NamedTuple):
    """The logits of a row that differ for one request, each of another id."""

    ids: IntArray
    values: Float64Array


class SamplerState:
    """The state of sampling for one request: its random generator, its constraint and, if a penalty needs them, counts.

    It belongs to the request and survives preemption unchanged.

    Attributes:
        banned_ids: tokens that must not come next, whatever the constraint allows.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int],
        vocab_size: int,
        constraint: TokenConstraint | None = None,
        breaker_ids: IntArray = NO_IDS,
    ) -> None:
        self.params = params
        self._dry: Dry | None = None
        if params.dry_multiplier:
            prompt_ids = list(prompt_ids)
            self._dry = Dry(params, prompt_ids, breaker_ids, vocab_size)
        self.constraint = constraint
        self._generator: np.random.Generator | None = None
        if not params.greedy:
            seed = None if params.seed is None else params.seed % 2**64
            self._generator = np.random.Generator(np.random.PCG64(seed))
        self._counts: npt.NDArray[np.int32] | None = None  # [vocab], in the reply
        self._is_seen: npt.NDArray[np.bool_] | None = None  # [vocab], in prompt or reply
        if params.presence_penalty or params.frequency_penalty:
            self._counts = np.zeros(vocab_size, np.int32)
        self._times_seen: npt.NDArray[np.int32] | None = None  # the same as counts, if tokens can be taken back
        if params.repetition_penalty != 1.0:
            self._is_seen = np.zeros(vocab_size, np.bool_)
            self._is_seen[list(prompt_ids)] = True
            if params.banned_strings:
                self._times_seen = self._is_seen.astype(np.int32)
        is_plain = params.greedy and not params.changes_logits and params.logprobs is None
        self._is_free = is_plain and constraint is None
        self.banned_ids = NO_IDS
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))

    def ahead(self) -> SamplerState:
        """Return an independent copy, to draft with: it draws and counts on its own.

        The copy has no constraint if that cannot be forked.
        """
        other = copy(self)
        if self._generator is not None:
            bits = np.random.PCG64(0)
            bits.state = self._generator.bit_generator.state  # type: ignore[assignment]  # a PCG64's
            other._generator = np.random.Generator(bits)
        other._counts = None if self._counts is None else self._counts.copy()
        other._is_seen = None if self._is_seen is None else self._is_seen.copy()
        other._times_seen = None if self._times_seen is None else self._times_seen.copy()
        other._dry = None if self._dry is None else self._dry.copy()
        other.constraint = self.constraint.fork() if isinstance(self.constraint, Foresight) else None
        return other

    def likelihood(self, token_id: int, top: TopLogits) -> float:
        """Return a token's share of the total probability of the row's largest logits.

        At the temperature of the reply, 1 if greedy.
        """
        temperature = 1.0 if self.params.greedy else self.params.temperature
        weights = relative_weights(top.values[0], temperature)
        return float(weights[top.token_ids[0] == token_id].sum() / weights.sum())

    @property
    def takes_best(self) -> bool:
        """Return whether the largest logit alone decides."""
        return self._is_free and not len(self.banned_ids)

    def record(self, token_id: int) -> None:
        """Count a token of the reply, and advance the constraint.

        Raises:
            ConstraintFailed: the constraint forbids it.
        """
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._is_seen is not None:
            self._is_seen[token_id] = True
        if self._times_seen is not None:
            self._times_seen[token_id] += 1
        if self._dry is not None:
            self._dry.record(token_id)

    def take_back(self, token_ids: Sequence[int]) -> None:
        """Forget the newest tokens, and draw their random numbers again; the owner of the constraint rewinds that."""
        for token_id in token_ids:
            if self._counts is not None:
                self._counts[token_id] -= 1
            if self._times_seen is not None and self._is_seen is not None:
                self._times_seen[token_id] -= 1
                self._is_seen[token_id] = self._times_seen[token_id] > 0
        if self._dry is not None:
            self._dry.take_back(len(token_ids))
        if self._generator is not None:
            bits = self._generator.bit_generator
            assert isinstance(bits, np.random.PCG64)
            bits.advance(-len(token_ids))

    def penalized(self, logits: Float32Array) -> ChangedLogits:
        """Apply penalties and bias to one row: return the few logits that change, with ascending ids.

        The repetition penalty is that of CTRL (Keskar et al. 2019, arXiv:1909.05858). Presence and frequency penalties
        are those of OpenAI's API.
        """
        by_dry = {} if self._dry is None else self._dry.penalties()
        dry_ids = np.fromiter(by_dry, np.intp, len(by_dry))
        is_changed = np.zeros(len(logits), np.bool_) if self._is_seen is None else self._is_seen.copy()
        if self._counts is not None:
            is_changed |= self._counts > 0
        is_changed[dry_ids] = is_changed[self._bias_ids] = True
        ids = np.flatnonzero(is_changed)
        values = logits[ids].astype(np.float64)
        if self._is_seen is not None:
            is_seen, penalty = self._is_seen[ids], self.params.repetition_penalty
            values = np.where(is_seen, np.where(values > 0.0, values / penalty, values * penalty), values)
        if self._counts is not None:
            counts = self._counts[ids]
            values -= self.params.presence_penalty * (counts > 0)
            values -= self.params.frequency_penalty * counts
        values[np.searchsorted(ids, dry_ids)] -= np.fromiter(by_dry.values(), np.float64, len(by_dry))
        values[np.searchsorted(ids, self._bias_ids)] += self._bias
        return ChangedLogits(ids, values)

    def uniform(self) -> float:
        """Return the next random number in `[0, 1)`; each token takes one."""
        assert self._generator is not None, "greedy requests draw nothing"
        return float(self._generator.random())


def relative_weights(logits: LogitsArray, temperature: float, largest: float | None = None) -> Float64Array:
    """Return probabilities times a constant: no weight is above 1, the best one's is 1.

    Args:
        largest: the best one's logit, if it may not be among `logits`.
    """
    # subtract the maximum first: a tiny temperature would overflow otherwise
    weights = logits.astype(np.float64)
    weights -= weights.max() if largest is None else largest
    with np.errstate(over="ignore", under="ignore"):
        weights /= temperature
        np.exp(weights, out=weights)
    return weights


def logarithm(x: float) -> float:
    """Return the natural logarithm of a finite number above 0, the same bits on every machine, to 1e-16 absolute.

    A libm's or NumPy's differs in the last bit between machines. This is 2 atanh((m - 1) / (m + 1)) of a number m from
    0.7 to 1.4 and a multiple of log 2, whose first part has 32 bits, so that the product is exact.
    """
    m, exponent = math.frexp(x)
    if m < _SQRT_HALF:
        m, exponent = 2 * m, exponent - 1
    s = (m - 1) / (m + 1)
    square, series = s * s, 0.0
    for coefficient in _ATANH:
        series = series * square + coefficient
    return exponent * _LOG_2[0] + (exponent * _LOG_2[1] + s * series)

"""Functions of single rows in plain NumPy: norms, activation functions, and expert selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.model_config import Experts, Router

Array = npt.NDArray[np.floating[Any]]

_CLAMP, _SLOPE = 7.0, 1.702  # of gpt-oss
_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])


def normalized(x: Array, eps: float, kind: str) -> Array:
    """Return rows divided by their root mean square; for kind `layer`, after subtracting their mean."""
    if kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    mean_square = np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)
    result: Array = x / np.sqrt(mean_square)
    return result


def sigmoid(x: Array) -> Array:
    """Return `1 / (1 + exp(-x))`."""
    with np.errstate(over="ignore"):  # exp(-x) can become inf; 1 / inf is the right 0
        result: Array = 1 / (1 + np.exp(-x))
    return result


def silu(x: Array) -> Array:
    """Return `x * sigmoid(x)`."""
    with np.errstate(over="ignore"):
        result: Array = x / (1 + np.exp(-x))
    return result


def gelu(x: Array) -> Array:
    """Return `x` times the normal distribution function."""
    result: Array = x * (0.5 * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype)
    return result


def gelu_tanh(x: Array) -> Array:
    """Return `gelu` computed by tanh (Hendrycks and Gimpel, 2016)."""
    inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    result: Array = x.dtype.type(0.5) * x * (1 + np.tanh(inner))
    return result


def relu2(x: Array) -> Array:
    """Return the square of `max(x, 0)`."""
    result: Array = np.square(np.maximum(x, 0))
    return result


def softplus(x: Array) -> Array:
    """Return `ln(1 + exp(x))`."""
    result: Array = np.logaddexp(x, x.dtype.type(0))
    return result


def swiglu_clamped(gate: Array, up: Array) -> Array:
    """Return `(up + 1) * gate * sigmoid(1.702 gate)`, with gate <= 7 and `up` within 7 of 0 (gpt-oss)."""
    gate, up = np.minimum(gate, gate.dtype.type(_CLAMP)), np.clip(up, -_CLAMP, _CLAMP)
    return (up + 1) * gate * sigmoid(gate * gate.dtype.type(_SLOPE))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
    "tanh": np.tanh,
    "softplus": softplus,
}
GATED_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "silu_mul": lambda gate, up: silu(gate) * up,
    "gelu_mul": lambda gate, up: gelu(gate) * up,
    "gelu_tanh_mul": lambda gate, up: gelu_tanh(gate) * up,
    "relu2_mul": lambda gate, up: relu2(gate) * up,
    "swiglu_clamped": swiglu_clamped,
}


Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def expert_weights(
    logits: Array, experts: Experts, selection_bias: Array | None, expert_scale: Array | None
) -> tuple[Int64Array, Array]:
    """Return the experts of each row and their weights, both `[rows, num_active]`, best first; ties to the lower id."""
    router, num_active = experts.router, experts.num_active
    of_chosen = router.scores in ("softmax_of_chosen", "sigmoid_of_chosen")
    scores = _scores(logits, router)
    ranking = scores if selection_bias is None else scores + selection_bias
    chosen = _best(_in_best_groups(ranking, router), num_active)
    weights = np.take_along_axis(scores, chosen, -1)
    if of_chosen:
        weights = _softmax(weights) if router.scores == "softmax_of_chosen" else sigmoid(weights)
    elif router.renormalise:
        total = np.maximum(weights.sum(axis=-1, keepdims=True), weights.dtype.type(router.least_sum))
        weights = weights / total
    weights = weights * weights.dtype.type(router.scale)
    return chosen, weights if expert_scale is None else weights * expert_scale[chosen]


def changes_experts(logits: Array, experts: Experts, selection_bias: Array | None, margin: float) -> BoolArray:
    """Return, for each row, whether its experts change if logits change by `margin` of their deviation.

    Only changes of two logits are considered: the last selected one falls, and any other one rises.
    """
    router, rows = experts.router, np.arange(len(logits))
    change = (margin * logits.std(axis=-1, keepdims=True)).astype(logits.dtype)

    def chosen(logits: Array) -> Int64Array:
        scores = _scores(logits, router)
        ranking = scores if selection_bias is None else scores + selection_bias
        return _best(_in_best_groups(ranking, router), experts.num_active)

    before = chosen(logits)
    pushed = logits + change
    np.put_along_axis(pushed, before, np.take_along_axis(logits, before, -1), -1)
    pushed[rows, before[:, -1]] -= change[:, 0]
    result: BoolArray = (np.sort(chosen(pushed)) != np.sort(before)).any(axis=-1)
    return result


def _scores(logits: Array, router: Router) -> Array:
    """Return the scores that rank experts, without a bias that only selects."""
    if router.scores in ("softmax_of_chosen", "sigmoid_of_chosen"):
        return logits
    return sigmoid(logits) if router.scores == "sigmoid" else _softmax(logits)


def _in_best_groups(ranking: Array, router: Router) -> Array:
    """Return the ranking with -inf outside of the best groups."""
    if router.num_groups == 1:
        return ranking
    groups = ranking.reshape(len(ranking), router.num_groups, -1)
    best = -np.sort(-groups, axis=-1)[..., : 2 if router.group_score == "sum_of_two" else 1].sum(axis=-1)
    allowed = np.zeros(best.shape, bool)
    np.put_along_axis(allowed, _best(best, router.num_active_groups), True, axis=-1)
    result: Array = np.where(allowed[..., None], groups, -np.inf).reshape(ranking.shape)
    return result


def _best(scores: Array, count: int) -> Int64Array:
    """Return the columns of the largest scores of each row, largest first; ties to the first column."""
    order: Int64Array = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    return order


def _softmax(logits: Array) -> Array:
    """Return the softmax of each row."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = weights / weights.sum(axis=-1, keepdims=True)
    return result

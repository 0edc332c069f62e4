"""Which experts a row is routed to, and with which weights, in plain NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.model_config import Experts, Router

from .functions import Array, sigmoid

Int64Array = npt.NDArray[np.int64]


def expert_weights(
    logits: Array, experts: Experts, selection_bias: Array | None, expert_scale: Array | None
) -> tuple[Int64Array, Array]:
    """The experts of each row and their weights, both `[rows, num_active]`, best first; of ties the lower id first."""
    router, num_active = experts.router, experts.num_active
    of_chosen = router.scores in ("softmax_of_chosen", "sigmoid_of_chosen")
    scores = logits if of_chosen else sigmoid(logits) if router.scores == "sigmoid" else _softmax(logits)
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


def _in_best_groups(ranking: Array, router: Router) -> Array:
    """The same with -inf outside of the groups that may be chosen from."""
    if router.num_groups == 1:
        return ranking
    groups = ranking.reshape(len(ranking), router.num_groups, -1)
    best = -np.sort(-groups, axis=-1)[..., : 2 if router.group_score == "sum_of_two" else 1].sum(axis=-1)
    allowed = np.zeros(best.shape, bool)
    np.put_along_axis(allowed, _best(best, router.num_active_groups), True, axis=-1)
    result: Array = np.where(allowed[..., None], groups, -np.inf).reshape(ranking.shape)
    return result


def _best(scores: Array, count: int) -> Int64Array:
    """The columns of the largest scores of each row, largest first; of ties the first column."""
    order: Int64Array = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    return order


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = weights / weights.sum(axis=-1, keepdims=True)
    return result

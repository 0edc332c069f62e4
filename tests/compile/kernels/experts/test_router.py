"""Which experts a token goes to, against an obvious router in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.experts.router import RouterSpec, route

from ..harness import built, every_target, runnable

SPECS = {
    "Qwen3": RouterSpec(128, 8, 144, renormalize=True),
    "OLMoE": RouterSpec(40, 8, 48),
    "gpt-oss": RouterSpec(32, 4, 32, "softmax_of_chosen"),
    "DeepSeek-V2": RouterSpec(32, 4, 32, num_groups=4, top_groups=2, scale=16.0),
    "DeepSeek-V3": RouterSpec(32, 6, 32, "sigmoid", True, 8, 3, "top2", True, 1e-20, 2.5),
    "ERNIE": RouterSpec(40, 6, 48, has_bias=True, renormalize=True, least_sum=0.5),
    "Gemma 4": RouterSpec(16, 3, 16, renormalize=True, has_expert_scale=True),
    "Laguna": RouterSpec(24, 3, 32, "sqrt_softplus", has_bias=True, renormalize=True),
    "MiniMax M2": RouterSpec(16, 2, 16, "sigmoid", renormalize=True),
    "Llama 4": RouterSpec(16, 1, 16, "sigmoid_of_chosen"),
    "as many as there are": RouterSpec(3, 3, 16, "softmax_of_chosen"),
}


def obvious(spec: RouterSpec, row: np.ndarray, bias: np.ndarray, scale: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Experts and weights of one row of logits, float64."""
    logits = row[: spec.num_experts].astype(np.float64)
    powers = np.exp(logits - logits.max())
    scores = {
        "softmax": powers / powers.sum(),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "sqrt_softplus": np.sqrt(np.logaddexp(0, logits)),
        "softmax_of_chosen": logits,
        "sigmoid_of_chosen": logits,
    }[spec.scores]
    choice = scores + bias if spec.has_bias else scores.copy()
    groups = np.sort(choice.reshape(spec.num_groups, -1), axis=1)[:, ::-1]
    of_group = groups[:, 0] if spec.group_score == "max" else groups[:, :2].sum(axis=1)
    kept = sorted(range(spec.num_groups), key=lambda g: (-of_group[g], g))[: spec.top_groups]
    ids = [e for e in range(spec.num_experts) if e // spec.group_size in kept]
    chosen = sorted(ids, key=lambda e: (-choice[e], e))[: spec.top_k]
    weights = scores[chosen]
    if spec.scores == "softmax_of_chosen":
        weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
    if spec.scores == "sigmoid_of_chosen":
        weights = 1 / (1 + np.exp(-weights))
    if spec.renormalize:
        weights = weights / max(weights.sum(), spec.least_sum)
    return chosen, weights * spec.scale * (scale[chosen] if spec.has_expert_scale else 1)


def run(target: Target, spec: RouterSpec, logits: np.ndarray, bias: np.ndarray, scale: np.ndarray) -> tuple:
    shape = (len(logits), spec.top_k)
    experts, weights = np.full(shape, -1, np.int32), np.full(shape, np.nan, np.float32)
    built(target, route, spec, target)(logits, bias, scale, experts, weights, len(logits))
    return experts, weights


@every_target
@pytest.mark.parametrize("name", SPECS)
def test_experts_and_weights_are_those_of_the_obvious_router(target: Target, name: str) -> None:
    spec, rng = SPECS[name], np.random.default_rng(len(name))
    logits = np.full((40, spec.logits_stride), np.nan, np.float32)
    logits[:, : spec.num_experts] = rng.standard_normal((40, spec.num_experts)) * 2
    logits[1, : spec.num_experts] = 0.5  # all are equal
    logits[2, : spec.num_experts : 2] = logits[2, 1]  # many are
    bias, scale = (rng.random((2, spec.num_experts)) * 0.3).astype(np.float32)
    experts, weights = run(target, spec, logits, bias, scale)
    for m, row in enumerate(logits):
        if m == 2 and (spec.has_bias or spec.num_groups > 1):
            continue  # sums that are equal in float32 need not be in float64
        chosen, expected = obvious(spec, row, bias, scale)
        assert experts[m].tolist() == chosen
        np.testing.assert_allclose(weights[m], expected, rtol=3e-6)
        alone = run(target, spec, logits[m : m + 1], bias, scale)
        assert (alone[0][0] == experts[m]).all() and (alone[1][0] == weights[m]).all()


def test_scores_that_are_equal_in_float32_do_not_hide_the_larger_logit() -> None:
    spec = SPECS["Llama 4"]
    logits = np.full((1, spec.logits_stride), 20.0, np.float32)
    logits[0, 11] = 30.0
    experts, weights = run(runnable()[0], spec, logits, *np.zeros((2, spec.num_experts), np.float32))
    assert (experts.tolist(), weights.tolist()) == ([[11]], [[1.0]])


@pytest.mark.parametrize("name", SPECS)
def test_a_damaged_row_still_names_experts_that_exist(name: str) -> None:
    spec = SPECS[name]
    logits = np.full((3, spec.logits_stride), np.nan, np.float32)
    logits[1] = np.inf
    logits[2] = -np.inf
    bias = np.zeros(spec.num_experts, np.float32)
    experts, _ = run(runnable()[0], spec, logits, bias, bias)
    assert ((experts >= 0) & (experts < spec.num_experts)).all()


def test_a_router_that_cannot_choose_so_many_is_refused() -> None:
    with pytest.raises(AssertionError, match="4 experts are chosen of 2"):
        replace(SPECS["gpt-oss"], num_groups=16, top_groups=1)
    with pytest.raises(AssertionError, match="32 experts in 5 groups"):
        replace(SPECS["gpt-oss"], num_groups=5)

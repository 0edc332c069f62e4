"""Feed-forward layers: dense, of experts, or both; `kind` says which.

Knows no layer around them.
"""

from __future__ import annotations

from typing import Literal

from .ranges import Count, Dimension, NotNegative, Positive, Strict

GatedFunction = Literal["silu_mul", "gelu_mul", "gelu_tanh_mul", "relu2_mul", "swiglu_clamped"]
UngatedFunction = Literal["silu", "gelu", "gelu_tanh", "relu2"]
Function = GatedFunction | UngatedFunction


class Dense(Strict, frozen=True, kw_only=True, tag_field="kind", tag="dense"):
    """A feed-forward layer; functions that end in `_mul` have a gate.

    Attributes:
        gate_factor: what gates are multiplied with before the function.
    """

    intermediate_size: Dimension
    function: Function = "silu_mul"
    bias: bool = False
    gate_factor: Positive = 1.0

    @property
    def is_gated(self) -> bool:
        """Whether the function has two arguments."""
        return is_gated(self.function)


class Router(Strict, frozen=True, kw_only=True):
    """Which experts get a token, and with which weights.

    Attributes:
        scores: softmax or sigmoid of all logits, or of those that were chosen, by their logits.
        bias: the linear has one; `selection_bias`: one is added to scores to choose, and not to weigh.
        num_groups: experts are chosen from the best `num_active_groups` groups of so many, by the sum of a group's two
            best scores, or by its best.
        renormalise: weights are divided by their sum, which counts as `least_sum` at least.
        scale: weights are multiplied with it; `expert_scale`: and with a number of each expert.
        input_norm: logits are of the layer's input, normalised without gain, times a vector, over the root of its size.
    """

    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"] = "softmax"
    bias: bool = False
    selection_bias: bool = False
    num_groups: Count = 1
    num_active_groups: Count = 1
    group_score: Literal["sum_of_two", "best"] = "sum_of_two"
    renormalise: bool = True
    least_sum: NotNegative = 0.0
    scale: Positive = 1.0
    expert_scale: bool = False
    input_norm: bool = False


class SharedExpert(Strict, frozen=True, kw_only=True):
    """A feed-forward layer that gets every token; with a `gate`, times the sigmoid of a linear of one output."""

    intermediate_size: Dimension
    gate: bool = False


class Experts(Strict, frozen=True, kw_only=True, tag_field="kind", tag="experts"):
    """Feed-forward layers of which a token gets `num_active`; `input_scaled` weighs their input, not their output."""

    num_experts: Count
    num_active: Count
    intermediate_size: Dimension
    function: Function = "silu_mul"
    router: Router = Router()
    shared: SharedExpert | None = None
    bias: bool = False
    input_scaled: bool = False


class DenseAndExperts(Strict, frozen=True, kw_only=True, tag_field="kind", tag="dense_and_experts"):
    """A dense layer and experts beside each other; both outputs are normalized and added, and experts have a norm of
    their own before them (Gemma 4)."""

    dense: Dense
    experts: Experts

    @property
    def intermediate_size(self) -> int:
        """Numbers between the matrices that every token passes."""
        return self.dense.intermediate_size


def is_gated(function: Function) -> bool:
    """Whether a function multiplies what a gate lets through."""
    return function.endswith("_mul") or function == "swiglu_clamped"

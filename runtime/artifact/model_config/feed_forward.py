"""Configuration of feed-forward layers: dense, with experts, or both; `kind` is the tag.

Knows no layer around them.
"""

from __future__ import annotations

from typing import Literal

from .ranges import Count, Dimension, NotNegative, Positive, Strict

GatedFunction = Literal["silu_mul", "gelu_mul", "gelu_tanh_mul", "relu2_mul", "swiglu_clamped"]
UngatedFunction = Literal["silu", "gelu", "gelu_tanh", "relu2", "tanh"]
Function = GatedFunction | UngatedFunction


class Dense(Strict, frozen=True, kw_only=True, tag_field="kind", tag="dense"):
    """A feed-forward layer; functions that end in `_mul` have a gate.

    Attributes:
        gate_factor: multiplies gates before the function.
    """

    intermediate_size: Dimension
    function: Function = "silu_mul"
    bias: bool = False
    gate_factor: Positive = 1.0

    @property
    def is_gated(self) -> bool:
        """Return whether the function has a gate."""
        return is_gated(self.function)


class Router(Strict, frozen=True, kw_only=True):
    """The choice of experts for each token, and their weights.

    Attributes:
        scores: softmax or sigmoid of all logits, or only of the chosen ones, which are chosen by their logits.
        bias: the linear has one; `selection_bias`: one is added to scores for the choice, but not for the weights.
        num_groups: experts are chosen from the best `num_active_groups` of this many groups. A group's score is the sum
            of its two best scores, or its best score.
        renormalise: weights are divided by their sum, which is at least `least_sum`.
        scale: multiplies weights; `expert_scale`: so does a number of each expert.
        input_norm: logits are computed from the layer's input, normalised without gain, times a vector, over the root
            of its size.
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
    """A feed-forward layer for every token; with a `gate`, times the sigmoid of a linear with one output."""

    intermediate_size: Dimension
    gate: bool = False


class Experts(Strict, frozen=True, kw_only=True, tag_field="kind", tag="experts"):
    """Feed-forward layers of which a token uses `num_active`; `input_scaled` weights their input, not their output."""

    num_experts: Count
    num_active: Count
    intermediate_size: Dimension
    function: Function = "silu_mul"
    router: Router = Router()
    shared: SharedExpert | None = None
    bias: bool = False
    input_scaled: bool = False


class DenseAndExperts(Strict, frozen=True, kw_only=True, tag_field="kind", tag="dense_and_experts"):
    """A dense layer and experts in parallel (Gemma 4).

    Both outputs are normalized and added, and the experts have an input norm of their own.
    """

    dense: Dense
    experts: Experts

    @property
    def intermediate_size(self) -> int:
        """Intermediate size of the part that every token passes."""
        return self.dense.intermediate_size


def is_gated(function: Function) -> bool:
    """Return whether a function multiplies by a gate."""
    return function.endswith("_mul") or function == "swiglu_clamped"

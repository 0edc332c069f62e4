"""Choose each token's experts and their weights, from the token's own scores alone.

Options are those of the families: scores by softmax or sigmoid, a bias for selection only, groups of experts, and
normalized weights. On ties the lower id comes first. Knows neither matrices nor lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tvm.script.ir_builder import tirx as T

from ...codegen.builder import SIZE, Kernel, Memory, for_each_row, registers, serial, when
from ...codegen.elementwise import sigmoid, softplus
from ...codegen.lane_reductions import max_of_lanes, sum_of_lanes
from ...codegen.targets import Target
from ...codegen.vector import LANES, Expr, const, exp, lanes, splat
from ...weights.layout import round_up

Scores = Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen", "sigmoid_of_chosen"]
GroupScore = Literal["max", "top2"]
_NONE = float("-inf")


@dataclass(frozen=True)
class RouterSpec:
    """Rules by which scores select `top_k` experts and their weights.

    Attributes:
        scores: a function of all logits, or of the selected ones (selected by their logits).
        has_bias: true if numbers are added to scores for the selection only, not to weights (DeepSeek-V3).
        num_groups: number of groups of neighbouring experts; experts are selected from the best `top_groups` groups.
        group_score: score of a group: that of its best expert, or the sum of its best two.
        renormalize: true to divide weights by their sum, or by `least_sum` if that is more.
        has_expert_scale: true to multiply weights by a number of their expert (Gemma 4).
    """

    num_experts: int
    top_k: int
    logits_stride: int
    scores: Scores = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    renormalize: bool = False
    least_sum: float = 0.0
    scale: float = 1.0
    has_expert_scale: bool = False

    def __post_init__(self) -> None:
        assert self.num_experts % self.num_groups == 0, f"{self.num_experts} experts in {self.num_groups} groups"
        reach = self.group_size * self.top_groups
        assert self.top_k <= reach, f"{self.top_k} experts are chosen of {reach}"

    @property
    def group_size(self) -> int:
        """Number of experts in a group."""
        return self.num_experts // self.num_groups


def route(spec: RouterSpec, target: Target) -> Any:
    """Return the PrimFunc `(logits, bias, expert_scale, experts, weights, num_rows) -> 0`.

    Reads float32 `logits` `[num_rows, logits_stride]`, and `bias` and `expert_scale` `[num_experts]` if the spec has
    them. Writes `experts`, int32 `[num_rows, top_k]`, best first, and their `weights`, float32.
    """
    with Kernel() as k:
        logits, bias, expert_scale, experts, weights, num_rows = k.arguments(
            logits="float32", bias="float32", expert_scale="float32", experts="int32", weights="float32", num_rows=SIZE
        )

        def row(m: Expr) -> None:
            _Row(spec, target, logits, m).route(bias, expert_scale, experts, weights)

        for_each_row(num_rows, row, serial_up_to=32)
    return k.function


class _Row:
    """An emitter of one token's selection of experts."""

    def __init__(self, spec: RouterSpec, target: Target, logits: Memory, m: Expr) -> None:
        self.spec, self.has_fma, self.logits, self.m = spec, target.has_fma, logits, m
        padded = round_up(spec.num_experts, LANES)
        # selected experts are removed
        self.scores, self.choice = registers(padded, "float32"), registers(padded, "float32")
        self.vectors = padded // LANES

    def route(self, bias: Memory, expert_scale: Memory, experts: Memory, weights: Memory) -> None:
        """Select the experts of the token, and write their ids and weights."""
        spec, first = self.spec, self.m * self.spec.top_k
        self._score()
        with serial(spec.num_experts) as e:
            self.choice[e] = self.scores[e] + bias[e] if spec.has_bias else self.scores[e]
        if spec.num_groups > spec.top_groups:
            self._keep_groups()
        total, best = registers(1, "float32"), registers(1, "int32")
        total[0] = T.float32(0)
        with serial(spec.top_k) as rank:
            _best_of(self.choice, self.vectors, best)
            experts[first + rank] = best[0]
            self.choice[T.Cast("int64", best[0])] = T.float32(_NONE)
            weights[first + rank] = self.scores[T.Cast("int64", best[0])]
            total[0] = total[0] + weights[first + rank]
        if spec.scores == "softmax_of_chosen":
            self._softmax_of_chosen(weights, total)
        elif spec.scores == "sigmoid_of_chosen":
            self._sigmoid_of_chosen(weights)
        with serial(spec.top_k) as rank:
            weight = weights[first + rank]
            if spec.renormalize or spec.scores == "softmax_of_chosen":
                least = T.float32(spec.least_sum)
                weight = weight / T.Select(total[0] < least, least, total[0])
            weight = weight * T.float32(spec.scale) if spec.scale != 1 else weight
            if spec.has_expert_scale:
                weight = weight * expert_scale[T.Cast("int64", experts[first + rank])]
            weights[first + rank] = weight

    def _score(self) -> None:
        """Set `scores` to the spec's function of the logits: softmax, sigmoid or the root of softplus.

        Functions of the selected experts alone are left for later: scores are the logits then. The padding of the last
        vector is -inf.
        """
        spec, count = self.spec, self.spec.num_experts
        start = self.m * spec.logits_stride
        for memory in (self.scores, self.choice):
            memory[lanes((self.vectors - 1) * LANES)] = const(_NONE)
        with serial(count) as e:
            self.scores[e] = self.logits[start + e]
        if spec.scores == "softmax":
            self._softmax()
        elif spec.scores in ("sigmoid", "sqrt_softplus"):
            function = sigmoid if spec.scores == "sigmoid" else softplus
            with serial(self.vectors) as v:
                value = function(self.scores[lanes(v * LANES)], self.has_fma)
                self.scores[lanes(v * LANES)] = T.sqrt(value) if spec.scores == "sqrt_softplus" else value

    def _softmax(self) -> None:
        """Replace the scores of all experts by their softmax."""
        sums, largest = registers(LANES, "float32"), registers(1, "float32")
        sums[lanes(0)] = const(_NONE)
        with serial(self.vectors) as v:
            sums[lanes(0)] = T.max(sums[lanes(0)], self.scores[lanes(v * LANES)])
        largest[0] = max_of_lanes(sums[lanes(0)])
        sums[lanes(0)] = const(0)
        with serial(self.vectors) as v:
            where = lanes(v * LANES)
            off = self.scores[where] - splat(largest[0])
            # the power of -inf is not exactly 0
            self.scores[where] = T.Select(off < const(-87), const(0), exp(off, self.has_fma))
            sums[lanes(0)] = sums[lanes(0)] + self.scores[where]
        largest[0] = sum_of_lanes(sums[lanes(0)])
        with serial(self.vectors) as v:
            self.scores[lanes(v * LANES)] = self.scores[lanes(v * LANES)] / splat(largest[0])

    def _softmax_of_chosen(self, weights: Memory, total: Memory) -> None:
        """Replace the logits of the selected experts by the numerators of their softmax, and set `total[0]` to the sum.

        The logit of the first expert is the largest.
        """
        first, largest = self.m * self.spec.top_k, registers(1, "float32")
        largest[0] = weights[first]
        total[0] = T.float32(0)
        with serial(self.spec.top_k) as rank:
            power = registers(LANES, "float32")
            power[lanes(0)] = exp(splat(weights[first + rank] - largest[0]), self.has_fma)
            weights[first + rank] = power[0]
            total[0] = total[0] + power[0]

    def _sigmoid_of_chosen(self, weights: Memory) -> None:
        """Replace the logits of the selected experts by sigmoids.

        Selection is by logits, because sigmoids near 1 would be equal.
        """
        first = self.m * self.spec.top_k
        with serial(self.spec.top_k) as rank:
            score = registers(LANES, "float32")
            score[lanes(0)] = sigmoid(splat(weights[first + rank]), self.has_fma)
            weights[first + rank] = score[0]

    def _keep_groups(self) -> None:
        """Set `choice` to -inf for the experts of all groups but the best `top_groups`."""
        spec = self.spec
        padded = round_up(spec.num_groups, LANES)
        groups, kept, best = registers(padded, "float32"), registers(padded, "int32"), registers(1, "int32")
        with serial(padded) as g:
            groups[g], kept[g] = T.float32(_NONE), T.int32(0)
        with serial(spec.num_groups) as g:
            two = registers(2, "float32")  # the best and the second best
            two[0], two[1] = T.float32(_NONE), T.float32(_NONE)
            with serial(spec.group_size) as e:
                value = registers(1, "float32")
                value[0] = self.choice[g * spec.group_size + e]
                two[1] = T.max(two[1], T.min(two[0], value[0]))
                two[0] = T.max(two[0], value[0])
            groups[g] = two[0] if spec.group_score == "max" or spec.group_size == 1 else two[0] + two[1]
        with serial(spec.top_groups):
            _best_of(groups, padded // LANES, best)
            kept[T.Cast("int64", best[0])] = T.int32(1)
            groups[T.Cast("int64", best[0])] = T.float32(_NONE)
        with serial(spec.num_experts) as e, when(kept[e // spec.group_size] == 0):
            self.choice[e] = T.float32(_NONE)


def _best_of(values: Memory, num_vectors: int, best: Memory) -> None:
    """Set `best[0]` to the index of the largest value, the lowest on ties; 0 if all are NaN or -inf."""
    largest, where = registers(LANES, "float32"), registers(LANES, "int32")
    largest[lanes(0)], where[lanes(0)] = const(_NONE), T.broadcast(T.int32(0), LANES)
    with serial(num_vectors) as v:
        some = values[lanes(v * LANES)]
        is_larger = some > largest[lanes(0)]
        index = T.ramp(T.Cast("int32", v * LANES), T.int32(1), LANES)
        where[lanes(0)] = T.Select(is_larger, index, where[lanes(0)])
        largest[lanes(0)] = T.Select(is_larger, some, largest[lanes(0)])
    top = registers(1, "float32")
    top[0] = max_of_lanes(largest[lanes(0)])
    # lanes without the largest value count as an id larger than any
    ids = T.Select(largest[lanes(0)] == splat(top[0]), where[lanes(0)], splat(T.int32(1 << 30)))
    best[0] = T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.smin.v16i32", ids)

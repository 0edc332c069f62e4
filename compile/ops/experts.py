"""Append the kernels of a mixture of experts: the router, its lists, the experts' matrices, and the sum.

Knows rows of tokens and of entries (a token and a rank); not which layers have experts.
"""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import Experts

from ..codegen.targets import Target
from ..kernels.experts.entries import CombineSpec, ExpertLimits, ExpertRows, combine, find_slabs
from ..kernels.experts.router import RouterSpec, route
from ..kernels.row_norms import scale_rows
from ..weights.layout import ROW_BLOCK, round_up
from ..weights.plan import WeightPlan
from .layers import Vector
from .linear import LinearOps
from .operations import ExpertsSpec
from .program import Activation, Argument, Limits, Place, Program, Rows, Size, Stored


class ExpertOps:
    """Appends to `program`, and vectors to `plan`."""

    def __init__(self, program: Program, plan: WeightPlan, limits: Limits, target: Target, linear: LinearOps) -> None:
        self._program, self._plan, self._limits = program, plan, limits
        self._target, self._linear = target, linear

    def experts(self, x: Activation, unnormed: Rows, spec: ExpertsSpec) -> Rows:
        """The weighted sum of the experts that each row is routed to."""
        experts = spec.experts
        limits = ExpertLimits(experts.num_experts, experts.num_active, self._limits.num_tokens)
        chosen, weights = self._route(self._logits(x, unnormed, spec), spec)
        lists = self._program.place(("lists", limits), limits.num_ints * 4)
        self._program.call(("find_slabs", limits), lambda: find_slabs(limits), chosen, lists, Size("num_tokens"))
        inner = round_up(experts.intermediate_size, ROW_BLOCK)
        stacks = [stack for stack in (spec.gate, spec.up) if stack is not None]
        entering = self._entries("entering", len(stacks) * inner, tuple(range(0, len(stacks) * inner, inner)), experts)
        for stack, column in zip(stacks, entering.columns, strict=True):
            part = Rows(entering.memory, entering.stride, (column,), entering.num_rows, entering.max_rows)
            self._linear.multiply_experts(x, stack, part, lists, ExpertRows(limits, are_tokens=True))
        if experts.input_scaled:
            assert not experts.bias, "a bias would be weighed, too"
            self._program.call(
                ("scale_entries", entering.stride),
                lambda: scale_rows(entering.stride, entering.stride, by_row=True),
                entering.memory,
                weights,
                entering.num_rows,
            )
        gated = Activation(experts.function, entering, experts.intermediate_size, 0, 0.0, role="experts")
        leaving = self._entries("leaving", spec.down.num_outputs, (0,), experts)
        self._linear.multiply_experts(gated, spec.down, leaving, lists, ExpertRows(limits, are_tokens=False))
        return self._combined(leaving, weights, experts, spec.down.num_outputs)

    def _logits(self, x: Activation, unnormed: Rows, spec: ExpertsSpec) -> Rows:
        rows = Rows.of_tokens(self._program, self._limits, "router", spec.router.num_outputs)
        factor = 1.0
        if spec.router_norm is not None:
            norm = spec.router_norm
            x = Activation("rms_norm", unnormed, norm.size, self._stored(spec.router_scale), norm.eps, role="router")
            if spec.router_scale is not None:
                factor = norm.size**-0.5
        assert factor == 1.0 or not spec.router.has_bias, "a bias would be scaled, too"
        self._linear.multiply(x, (spec.router,), rows, factor=factor)
        return rows

    def _route(self, logits: Rows, spec: ExpertsSpec) -> tuple[Place, Place]:
        """Where the experts of each token are written, and their weights."""
        experts, router = spec.experts, spec.experts.router
        of_chosen = router.scores in ("softmax_of_chosen", "sigmoid_of_chosen")
        kernel_spec = RouterSpec(
            experts.num_experts,
            experts.num_active,
            logits.stride,
            router.scores,
            router.selection_bias,
            router.num_groups,
            router.num_active_groups,
            "top2" if router.group_score == "sum_of_two" else "max",
            router.renormalise and not of_chosen,
            0.0 if of_chosen else router.least_sum,
            router.scale,
            router.expert_scale,
        )
        size = self._limits.num_tokens * experts.num_active * 4
        chosen, weights = (self._program.place((role, size), size) for role in ("chosen experts", "expert weights"))
        self._program.call(
            kernel_spec,
            lambda: route(kernel_spec, self._target),
            logits.memory,
            self._stored(spec.selection_bias),
            self._stored(spec.expert_scale),
            chosen,
            weights,
            logits.num_rows,
        )
        return chosen, weights

    def _combined(self, y: Rows, weights: Place, experts: Experts, width: int) -> Rows:
        x = Rows.of_tokens(self._program, self._limits, "experts", width)
        spec = CombineSpec(width, experts.num_active, x.stride, y.stride, not experts.input_scaled)
        self._program.call(spec, lambda: combine(spec, self._target), y.memory, weights, x.memory, x.num_rows)
        return x

    def _entries(self, role: str, width: int, columns: tuple[int, ...], experts: Experts) -> Rows:
        """A row for each entry of the step."""
        stride, most = round_up(width, ROW_BLOCK), self._limits.num_tokens * experts.num_active
        place = self._program.place((role, stride, most), most * stride * 4)
        return Rows(place, stride, columns, Size("num_tokens", experts.num_active), most)

    def _stored(self, vector: Vector | None) -> Argument:
        return 0 if vector is None else Stored(self._plan.vector(((vector.name, vector.size),)).name)

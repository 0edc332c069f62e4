"""Append the kernels of a mixture of experts: the router, its lists, the experts' matrices, and the sum.

Knows rows of tokens and of entries (a token and a rank); not which layers have experts.
"""

from __future__ import annotations

from dataclasses import replace

from ..codegen.targets import Target
from ..kernels.experts.entries import CombineSpec, ExpertLimits, combine, find_slabs, spread_rows, weigh_rows
from ..kernels.experts.router import RouterSpec, route
from ..weights.layout import GROUP, ROW_BLOCK, round_up
from ..weights.plan import WeightPlan
from .layers import Vector
from .linear import LinearOps
from .operations import ExpertsSpec
from .program import Activation, Argument, EntryPlaces, Limits, Program, RowBuffer, Scratch, Size, WeightTensor


class ExpertOps:
    """The expert operations of `program`; `plan` gets the vectors that they read."""

    def __init__(self, program: Program, plan: WeightPlan, limits: Limits, target: Target, linear: LinearOps) -> None:
        self._program, self._plan, self._limits = program, plan, limits
        self._target, self._linear = target, linear

    def experts(self, x: Activation, unnormed: RowBuffer, spec: ExpertsSpec) -> RowBuffer:
        """Return the weighted sum of the experts to which each row is routed."""
        experts = spec.experts
        limits = ExpertLimits(experts.num_experts, experts.num_active, self._limits.num_tokens)
        chosen, weights = self._route(self._logits(x, unnormed, spec), spec)
        places = EntryPlaces(self._program.scratch(("lists", limits), limits.num_ints * 4), limits)
        self._program.call(
            ("find_slabs", limits), lambda: find_slabs(limits), chosen, places.memory, Size("num_tokens")
        )
        inner = round_up(experts.intermediate_size, ROW_BLOCK)
        stacks = [stack for stack in (spec.gate, spec.up) if stack is not None]
        entering = self._entries("entering", len(stacks) * inner, tuple(range(0, len(stacks) * inner, inner)), places)
        spread: Activation | None = None
        for stack, column in zip(stacks, entering.columns, strict=True):
            is_quantized = self._plan.kinds[stack.name].is_quantized
            if is_quantized and spread is None:
                spread = self._spread(x, places)
            given = spread if is_quantized and spread is not None else x
            self._linear.multiply_experts(given, stack, replace(entering, columns=(column,)), places)
        if experts.input_scaled:
            assert not experts.bias, "a bias would be weighed, too"
            self._program.call(
                ("weigh_rows", entering.stride, limits),
                lambda: weigh_rows(entering.stride, entering.stride, limits),
                entering.memory,
                weights,
                places.memory,
                entering.num_rows,
            )
        gated = Activation(experts.function, entering, experts.intermediate_size, 0, 0.0, role="experts")
        leaving = self._entries("leaving", spec.down.num_outputs, (0,), places)
        self._linear.multiply_experts(gated, spec.down, leaving, places)
        return self._combined(leaving, weights, spec.down.num_outputs, is_weighted=not experts.input_scaled)

    def _spread(self, x: Activation, places: EntryPlaces) -> Activation:
        """Copy the codes of tokens' rows for each of their experts, because tiles read adjacent rows."""
        limits = places.limits
        rows = replace(x.rows, num_rows=Size("num_tokens", limits.top_k), max_rows=limits.num_places, places=places)
        spread = replace(x, rows=rows, role=(x.role, "spread"), floats=None, codes={})
        spread.codes[False] = self._linear.place_codes(spread, False)
        num_groups = round_up(x.width, GROUP) // GROUP
        self._program.call(
            ("spread_rows", num_groups, limits),
            lambda: spread_rows(num_groups, limits),
            *self._linear.quantized(x, False),
            places.memory,
            *spread.codes[False],
            rows.num_rows,
        )
        return spread

    def _logits(self, x: Activation, unnormed: RowBuffer, spec: ExpertsSpec) -> RowBuffer:
        """Return the router's logits."""
        rows = RowBuffer.of_tokens(self._program, self._limits, "router", spec.router.num_outputs)
        factor = 1.0
        if spec.router_norm is not None:
            norm = spec.router_norm
            x = Activation("rms_norm", unnormed, norm.size, self._stored(spec.router_scale), norm.eps, role="router")
            if spec.router_scale is not None:
                factor = norm.size**-0.5
        assert factor == 1.0 or not spec.router.has_bias, "a bias would be scaled, too"
        self._linear.multiply(x, (spec.router,), rows, factor=factor)
        return rows

    def _route(self, logits: RowBuffer, spec: ExpertsSpec) -> tuple[Scratch, Scratch]:
        """Append the router. Returns the memory of each token's experts, and of their weights."""
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
        chosen, weights = (self._program.scratch((role, size), size) for role in ("chosen experts", "expert weights"))
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

    def _combined(self, y: RowBuffer, weights: Scratch, width: int, *, is_weighted: bool) -> RowBuffer:
        """Return the weighted sum of the entries' outputs for each token."""
        assert y.places is not None
        x = RowBuffer.of_tokens(self._program, self._limits, "experts", width)
        spec = CombineSpec(y.places.limits, width, x.stride, y.stride, is_weighted)
        self._program.call(
            spec, lambda: combine(spec, self._target), y.memory, weights, y.places.memory, x.memory, x.num_rows
        )
        return x

    def _entries(self, role: str, width: int, columns: tuple[int, ...], places: EntryPlaces) -> RowBuffer:
        """Return a row for each entry of the step, at its place."""
        stride, most = round_up(width, ROW_BLOCK), places.limits.num_places
        memory = self._program.scratch((role, stride, most), most * stride * 4)
        return RowBuffer(memory, stride, columns, Size("num_tokens", places.limits.top_k), most, places)

    def _stored(self, vector: Vector | None) -> Argument:
        """Return a vector as an argument, 0 for None."""
        return 0 if vector is None else WeightTensor(self._plan.vector(((vector.name, vector.size),)).name)

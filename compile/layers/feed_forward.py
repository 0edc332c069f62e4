"""Feed-forward layers with the checkpoint's names of tensors: dense ones with and without a gate, and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import Dense, DenseAndExperts, Experts, ModelConfig, is_gated

from ..ops.layers import ExpertLinear, Linear, Norm, Part, Vector
from ..ops.operations import ExpertsSpec, Operations
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class DenseFeedForward:
    """A dense feed-forward layer: up, a function, and down; `roles` are those of the gate, up and down."""

    def __init__(
        self,
        config: ModelConfig,
        dense: Dense,
        index: int,
        names: PartNames,
        roles: tuple[str, str, str] = ("gate", "up", "down"),
    ) -> None:
        hidden, inner, bias = config.hidden_size, dense.intermediate_size, dense.bias
        gate, up, down = (names.layer(index, role) for role in roles)
        self.dense = dense
        self.gate_proj = Linear(gate, inner, hidden, bias, factor=dense.gate_factor) if dense.is_gated else None
        self.up_proj = Linear(up, inner, hidden, bias)
        self.down_proj = Linear(down, hidden, inner, bias)

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        yield from self.inputs
        yield self.down_proj

    @property
    def inputs(self) -> list[Linear]:
        """The matrices that take the layer's input, side by side."""
        return [self.up_proj] if self.gate_proj is None else [self.gate_proj, self.up_proj]

    def forward(self, op: Operations[R, A], x: A, unnormed: R) -> A:
        """Return the gated activation, before `down_proj`."""
        return op.activate(op.linear(x, *self.inputs), self.dense.function, self.dense.intermediate_size)

    def add(self, op: Operations[R, A], x: R, gated: A, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add_linear(x, gated, self.down_proj, factor=factor)

    def finish(self, op: Operations[R, A], gated: A) -> R:
        """Return the branch's output."""
        return op.linear(gated, self.down_proj)


class ExpertsFeedForward:
    """Routed experts, and shared ones that every token passes."""

    def __init__(self, config: ModelConfig, experts: Experts, index: int, names: PartNames) -> None:
        hidden, inner, count = config.hidden_size, experts.intermediate_size, experts.num_experts
        router = experts.router

        def matrix(role: str, num_outputs: int, num_inputs: int) -> ExpertLinear:
            return ExpertLinear(names.layer(index, role), count, num_outputs, num_inputs, experts.bias)

        def vector(role: str, size: int, wanted: bool) -> Vector | None:
            return Vector(names.layer(index, role), size) if wanted else None

        self.spec = ExpertsSpec(
            experts,
            Linear(names.layer(index, "router"), count, hidden, router.bias, sensitive=True, exact=True),
            matrix("expert_gate", inner, hidden) if is_gated(experts.function) else None,
            matrix("expert_up", inner, hidden),
            matrix("expert_down", hidden, inner),
            vector("selection_bias", count, router.selection_bias),
            vector("expert_scale", count, router.expert_scale),
            Norm("", hidden, config.norm_eps, has_gain=False) if router.input_norm else None,
            vector("router_scale", hidden, router.input_norm),
        )
        self.shared = self.shared_gate = None
        if experts.shared is not None:
            dense = Dense(intermediate_size=experts.shared.intermediate_size, function=experts.function)
            self.shared = DenseFeedForward(config, dense, index, names, ("shared_gate", "shared_up", "shared_down"))
            if experts.shared.gate:
                self.shared_gate = Linear(names.layer(index, "shared_weight"), 1, hidden)

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        spec = self.spec
        vectors = (spec.selection_bias, spec.expert_scale, spec.router_scale)
        parts = (spec.router, spec.gate, spec.up, spec.down, *vectors, self.shared_gate)
        yield from (part for part in parts if part is not None)
        if self.shared is not None:
            yield from self.shared.parts()

    def forward(self, op: Operations[R, A], x: A, unnormed: R) -> R:
        """Return the sum of the chosen experts and of the shared one, without x.

        `unnormed` is x before the norm, which some routers read.
        """
        y = op.experts(x, unnormed, self.spec)
        if self.shared is None:
            return y
        through = self.shared.forward(op, x, unnormed)
        if self.shared_gate is not None:
            return op.add_gated(y, through, self.shared.down_proj, self.shared_gate, x)
        return self.shared.add(op, y, through, 1.0)

    def add(self, op: Operations[R, A], x: R, y: R, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add(x, y, factor=factor)

    def finish(self, op: Operations[R, A], y: R) -> R:
        """Return the branch's output."""
        return y


class DenseAndExpertsFeedForward:
    """A dense layer and experts, which read the same row after norms of their own."""

    def __init__(self, config: ModelConfig, both: DenseAndExperts, index: int, names: PartNames) -> None:
        def norm(role: str) -> Norm:
            return Norm(names.layer(index, role), config.hidden_size, config.norm_eps)

        self.dense = DenseFeedForward(config, both.dense, index, names)
        self.experts = ExpertsFeedForward(config, both.experts, index, names)
        self.dense_post_norm, self.experts_norm = norm("dense_post_norm"), norm("experts_norm")
        self.experts_post_norm = norm("experts_post_norm")

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        yield from (self.dense_post_norm, self.experts_norm, self.experts_post_norm)
        yield from self.dense.parts()
        yield from self.experts.parts()

    def forward(self, op: Operations[R, A], x: A, unnormed: R) -> R:
        """Return the sum of both outputs, each normalized; `x` is the dense layer's input."""
        y = op.normalize(self.dense.finish(op, self.dense.forward(op, x, unnormed)), self.dense_post_norm)
        of_experts = self.experts.forward(op, op.norm(unnormed, self.experts_norm), unnormed)
        return op.add_norm(y, of_experts, self.experts_post_norm)

    def add(self, op: Operations[R, A], x: R, y: R, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add(x, y, factor=factor)

    def finish(self, op: Operations[R, A], y: R) -> R:
        """Return the branch's output."""
        return y

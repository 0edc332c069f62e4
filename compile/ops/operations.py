"""The operations that a model file is written in, and what they are told. Knows neither kernels nor numbers.

`Ops` appends kernels for them, `ReferenceOps` computes them in NumPy: a model file is evaluated by both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from radixlm.runtime.artifact.model_config import (
    Attention,
    Experts,
    Function,
    GatedDelta,
    LatentAttention,
    Mamba2,
    ShortConvolution,
)

from .layers import Embedding, ExpertLinear, HeadLinear, Linear, Norm, Vector


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: its numbers, its part of the KV pool, and its vectors.

    Attributes:
        kv_layer: counts the layers that keep keys and values; of a layer that shares them, the other's.
        value_norm: has no gain.
    """

    attention: Attention
    kv_layer: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    value_norm: Norm | None = None
    sinks: Vector | None = None


@dataclass(frozen=True)
class LatentSpec:
    """One layer's latent attention: its numbers, its part of the KV pool, its norm and the matrices of its heads.

    Attributes:
        latent_norm: of the latent vectors.
        keys: make of a head's query, but for what rotates, one that meets latent vectors; `values`: of what it
            gathers of these, its output.
    """

    attention: LatentAttention
    kv_layer: int
    latent_norm: Norm
    keys: HeadLinear
    values: HeadLinear


@dataclass(frozen=True)
class ConvolutionSpec:
    """One layer's convolution: its numbers, its part of a state, and its vectors.

    Attributes:
        width: numbers of a row, each with a convolution of its own.
        first: numbers of a state before the layer's.
        taps: `[width, kernel_size]`, that of the oldest token first.
    """

    convolution: ShortConvolution
    width: int
    first: int
    taps: Vector
    bias: Vector | None = None


@dataclass(frozen=True)
class DeltaSpec:
    """One layer's gated delta rule: its numbers, its part of a state, and its vectors.

    Attributes:
        first: numbers of a state before the layer's.
        taps: `[convolved_width, kernel_size]`, that of the oldest token first.
        rate: of each value head, negative: it fades by `exp(rate * softplus(a + dt_bias))`.
        norm: of what each value head gives.
    """

    delta: GatedDelta
    first: int
    taps: Vector
    rate: Vector
    dt_bias: Vector
    norm: Norm


@dataclass(frozen=True)
class MambaSpec:
    """One layer's Mamba-2: its numbers, its part of a state, and its vectors.

    Attributes:
        first: numbers of a state before the layer's.
        taps: `[convolved_width, kernel_size]`, that of the oldest token first.
        rate: of each head, negative: it fades by `exp(rate * step)`, with `step = softplus(dt + dt_bias)`.
        skip: of each head, by which its value is added to what it gives.
        norm: of what all heads give, in groups, if there is one.
    """

    mamba: Mamba2
    first: int
    taps: Vector
    bias: Vector | None
    rate: Vector
    dt_bias: Vector
    skip: Vector
    norm: Norm | None


@dataclass(frozen=True)
class ExpertsSpec:
    """One layer's experts: their numbers, their matrices, and those of the router.

    Attributes:
        scale: what the router's input is multiplied with, after a norm without gain of `router_norm`.
    """

    experts: Experts
    router: Linear
    gate: ExpertLinear | None
    up: ExpertLinear
    down: ExpertLinear
    selection_bias: Vector | None = None
    expert_scale: Vector | None = None
    router_norm: Norm | None = None
    router_scale: Vector | None = None


R = TypeVar("R")  # rows of numbers, one for each token
A = TypeVar("A")  # a function of rows, ready to enter a matrix


class Operations(Protocol[R, A]):
    """What a model file calls. Rows that it passes to `add...`, `normalize` and `scale` are changed in place."""

    def embed(self, embedding: Embedding, *, factor: float = 1.0) -> R:
        """Rows of the step's tokens, times `factor`."""

    def normalize(self, x: R, norm: Norm) -> R:
        """`x` normalized, in place."""

    def norm(self, x: R, norm: Norm) -> A:
        """`x` normalized."""

    def plain(self, x: R, width: int) -> A:
        """`x` as it is, rows of `width`."""

    def linear(self, x: A, *layers: Linear) -> R:
        """The outputs of all layers, side by side."""

    def attention(self, qkv: R, spec: AttentionSpec) -> A:
        """Attention over the pool, which first gets the step's keys and values.

        `qkv` has queries, then keys and values as far as the layer has its own, then gates.
        """

    def latent_attention(self, queries: R, latent: R, spec: LatentSpec) -> A:
        """Attention over the pool, which first gets the step's latent vectors and rotated keys.

        These are the last output in `latent`; `queries` are all of their rows.
        """

    def keep(self, qkv: R, spec: AttentionSpec) -> None:
        """Have the pool get the step's keys and values, without attention."""

    def keep_latent(self, queries: R, latent: R, spec: LatentSpec) -> None:
        """The same of latent vectors and rotated keys."""

    def keep_hidden(self, x: R, kv_layer: int) -> None:
        """Have the pool get the step's rows of the model's width."""

    def beside_previous(self, x: R, width: int, kv_layer: int) -> A:
        """`x`, rows of `width`, and beside each what the pool keeps by `keep_hidden` of the token before its own.

        The first token of a sequence has zeros there.
        """

    def short_convolution(self, gates: R, spec: ConvolutionSpec) -> A:
        """`c * convolution(b * x)` over the last tokens, with the state of those before the step.

        `gates` has b, c and x side by side.
        """

    def gated_delta(self, joined: R, spec: DeltaSpec) -> A:
        """What value heads give, normalized and gated, with the state of the tokens before the step.

        `joined` has queries, keys and values, then gates, then b and a of each value head.
        """

    def mamba2(self, joined: R, spec: MambaSpec) -> A:
        """What heads give, gated and perhaps normalized, with the state of the tokens before the step.

        `joined` has values, keys and queries, as one or as three, then gates, then dt of each head.
        """

    def activate(self, x: R, function: Function, width: int, *, by: R | None = None, column: int = 0) -> A:
        """`function` of rows, or of gates and what they let through, side by side.

        Then times the `width` numbers of `by` from `column` on, if it is given.
        """

    def experts(self, x: A, unnormed: R, spec: ExpertsSpec) -> R:
        """The weighted sum of the experts that each row is routed to; `unnormed` is the row before its norm."""

    def add_linear(self, x: R, y: A, layer: Linear, *, factor: float = 1.0) -> R:
        """`x + factor * W y`."""

    def add(self, x: R, y: R, *, factor: float = 1.0) -> R:
        """`x + factor * y`."""

    def add_gated(self, x: R, y: A, layer: Linear, gate: Linear, of: A) -> R:
        """`x + sigmoid(gate of) * W y`; the gate has one output."""

    def add_norm(self, x: R, y: R, norm: Norm, *, factor: float = 1.0, parts: int = 1) -> R:
        """`x + factor * normalized y`; rows of several `parts` of `norm.size` have each part normalized by itself."""

    def scale(self, x: R, by: Vector) -> R:
        """`x` times a stored number."""

    def logits(self, x: R, norm: Norm, head: Linear, *, factor: float = 1.0, soft_cap: float | None = None) -> R:
        """The last norm and the output matrix, for the rows whose logits are wanted."""

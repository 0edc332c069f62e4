"""The operations that model files are written in, and their specs. Knows neither kernels nor numbers.

`Ops` appends kernels for them, and `ReferenceOps` computes them in NumPy: both evaluate a model file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from radixlm.runtime.artifact.model_config import (
    Attention,
    Experts,
    Function,
    GatedDelta,
    LatentAttention,
    Mamba2,
    ShortConvolution,
    UngatedFunction,
)

from .layers import Embedding, ExpertLinear, HeadLinear, Linear, Norm, Vector


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: its configuration, its part of the KV pool, and its vectors.

    Attributes:
        kv_layer: index among the layers that store KV; of a layer that shares KV, that of the other layer.
        value_norm: a norm without gain.
    """

    attention: Attention
    kv_layer: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    value_norm: Norm | None = None
    sinks: Vector | None = None


@dataclass(frozen=True)
class LatentSpec:
    """One layer's latent attention: its configuration, its part of the KV pool, its norm and its heads' matrices.

    Attributes:
        latent_norm: norm of the latent vectors.
        keys: matrices that map the unrotated part of a head's query to one for latent vectors.
        values: matrices that map a head's weighted sum of latent vectors to its output.
    """

    attention: LatentAttention
    kv_layer: int
    latent_norm: Norm
    keys: HeadLinear
    values: HeadLinear


@dataclass(frozen=True)
class ConvolutionSpec:
    """One layer's convolution: its configuration, its part of a state, and its vectors.

    Attributes:
        width: number of columns of a row, each with a convolution of its own.
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
    """One layer's gated delta rule: its configuration, its part of a state, and its vectors.

    Attributes:
        first: numbers of a state before the layer's.
        taps: `[convolved_width, kernel_size]`, that of the oldest token first.
        rate: of each value head, negative; its decay is `exp(rate * softplus(a + dt_bias))`.
        norm: norm of each value head's output.
    """

    delta: GatedDelta
    first: int
    taps: Vector
    rate: Vector
    dt_bias: Vector
    norm: Norm


@dataclass(frozen=True)
class MambaSpec:
    """One layer's Mamba-2: its configuration, its part of a state, and its vectors.

    Attributes:
        first: numbers of a state before the layer's.
        taps: `[convolved_width, kernel_size]`, that of the oldest token first.
        rate: of each head, negative; its decay is `exp(rate * step)`, with `step = softplus(dt + dt_bias)`.
        skip: factor of each head's value that is added to its output.
        norm: norm of all heads' output, in groups; None if there is none.
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
    """One layer's experts: their configuration, their matrices, and those of the router.

    Attributes:
        router_scale: factors of the router's input, after its norm `router_norm` without gain.
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


@dataclass(frozen=True)
class ScoreSpec:
    """A reranker's head: how a text's rows are pooled, and what makes one number of them.

    Attributes:
        last_norm: the model's last norm, of each row; None if the last layer's own norm is the last one.
        dense: a linear layer, followed by `function` and then by `norm`, if there is one.
        out: a linear layer with one output.
    """

    pooling: Literal["cls", "mean"]
    last_norm: Norm | None
    dense: Linear
    function: UngatedFunction
    norm: Norm | None
    out: Linear


R = TypeVar("R")  # rows of numbers, one for each token
A = TypeVar("A")  # a function of rows that can enter a matrix


class Operations(Protocol[R, A]):
    """The operations that a model file calls. `add...`, `normalize` and `scale` change their rows in place."""

    def embed(self, embedding: Embedding, *, factor: float = 1.0) -> R:
        """Return the embedding rows of the step's tokens, times `factor`."""

    def normalize(self, x: R, norm: Norm) -> R:
        """Normalize `x` in place, and return it."""

    def norm(self, x: R, norm: Norm) -> A:
        """Return `x` normalized."""

    def plain(self, x: R, width: int) -> A:
        """Return `x` unchanged, with rows of `width`."""

    def linear(self, x: A, *layers: Linear) -> R:
        """Return the outputs of all layers, side by side."""

    def attention(self, qkv: R, spec: AttentionSpec) -> A:
        """Append the step's KV to the pool, and attend to it.

        `qkv` has queries, then keys and values if the layer has its own, then gates.
        """

    def latent_attention(self, queries: R, latent: R, spec: LatentSpec) -> A:
        """Append the step's latent vectors and rotated keys to the pool, and attend to it.

        These are the last output in `latent`; `queries` has all of its rows.
        """

    def keep(self, qkv: R, spec: AttentionSpec) -> None:
        """Append the step's KV to the pool, without attention."""

    def keep_latent(self, queries: R, latent: R, spec: LatentSpec) -> None:
        """Append the step's latent vectors and rotated keys to the pool, without attention."""

    def keep_hidden(self, x: R, kv_layer: int) -> None:
        """Append the step's hidden states to the pool."""

    def concat_previous(self, x: R, width: int, kv_layer: int) -> A:
        """Concatenate `x`, rows of `width`, with the hidden state stored for the token before.

        `keep_hidden` stored these. The first token of a sequence has zeros.
        """

    def short_convolution(self, gates: R, spec: ConvolutionSpec) -> A:
        """Return `c * convolution(b * x)` over the last tokens, with the state of those before the step.

        `gates` has b, c and x side by side.
        """

    def gated_delta(self, joined: R, spec: DeltaSpec) -> A:
        """Return the output of value heads, normalized and gated, with the state of the tokens before the step.

        `joined` has queries, keys and values, then gates, then b and a of each value head.
        """

    def mamba2(self, joined: R, spec: MambaSpec) -> A:
        """Return the output of heads, gated and perhaps normalized, with the state of the tokens before the step.

        `joined` has values, keys and queries, as one or as three, then gates, then dt of each head.
        """

    def activate(self, x: R, function: Function, width: int, *, by: R | None = None, column: int = 0) -> A:
        """Return `function` of rows, or of pairs of gate and factor, side by side.

        The result is multiplied by the `width` numbers of `by` from `column` on, if given.
        """

    def experts(self, x: A, unnormed: R, spec: ExpertsSpec) -> R:
        """Return the weighted sum of the experts to which each row is routed; `unnormed` is the row before its norm."""

    def add_linear(self, x: R, y: A, layer: Linear, *, factor: float = 1.0) -> R:
        """Return `x + factor * W y`."""

    def add(self, x: R, y: R, *, factor: float = 1.0) -> R:
        """Return `x + factor * y`."""

    def add_gated(self, x: R, y: A, layer: Linear, gate: Linear, of: A) -> R:
        """Return `x + sigmoid(gate of) * W y`; the gate has one output."""

    def add_norm(self, x: R, y: R, norm: Norm, *, factor: float = 1.0, parts: int = 1) -> R:
        """Return `x + factor * normalized y`.

        If rows have several `parts` of `norm.size`, each part is normalized by itself.
        """

    def add_vector(self, x: R, y: Vector) -> R:
        """Return `x` plus the same stored numbers in each row."""

    def add_positions(self, x: R, positions: Vector, width: int, *, first: int) -> R:
        """Return `x` plus the stored row `first + position` of `width` numbers for each token."""

    def add_token_types(self, x: R, types: Vector, width: int, *, separator_id: int) -> R:
        """Return `x` plus a stored row of `width` numbers for each token, by its type.

        Tokens up to a text's first separator have the first row, later ones the second.
        """

    def scale(self, x: R, by: Vector) -> R:
        """Return `x` times a stored number."""

    def logits(self, x: R, norm: Norm, head: Linear, *, factor: float = 1.0, soft_cap: float | None = None) -> R:
        """Apply the last norm and the output matrix to the rows whose logits are requested."""
        ...

    def hidden(self, x: R, norm: Norm | None, *dense: Linear) -> R:
        """Apply the last norm and then linear layers, if there are any, likewise."""
        ...

    def score(self, x: R, spec: ScoreSpec) -> R:
        """Return one number for each requested row; means are of the rows from there to the end of its text."""

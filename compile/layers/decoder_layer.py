"""A layer of a decoder: a mixer and a feed-forward layer with residuals, their norms, and an optional last term.

Tensors have the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from radixlm.runtime.artifact.model_config import (
    Dense,
    DenseAndExperts,
    Experts,
    GatedDelta,
    LatentAttention,
    LayerInputs,
    Mamba2,
    Mixer,
    ModelConfig,
    ShortConvolution,
)

from ..ops.layers import Linear, Norm, Part, Vector
from ..ops.operations import Operations
from .attention import LatentSelfAttention, SelfAttention
from .feed_forward import DenseAndExpertsFeedForward, DenseFeedForward, ExpertsFeedForward
from .part_names import PartNames
from .recurrent import GatedDeltaMixer, Mamba2Mixer, ShortConvolutionMixer

R = TypeVar("R")
A = TypeVar("A")


class DecoderLayer:
    """Layer `index`: a mixer, called `self_attn`, and feed-forward, with the norms that its configuration asks for."""

    def __init__(self, config: ModelConfig, index: int, names: PartNames) -> None:
        self.layer = layer = config.all_layers[index]
        self.factor, self.hidden_size = config.residual_factor, config.hidden_size

        def norm(role: str, wanted: bool, eps: float = config.norm_eps) -> Norm | None:
            return model_norm(config, names.layer(index, role), eps) if wanted else None

        has_post, has_ffn = layer.norms in ("post", "sandwich", "sum"), layer.ffn is not None
        post_eps = layer.post_norm_eps or config.norm_eps
        assert layer.beside is None or layer.norms == "pre"
        self.self_attn = _mixer(config, layer.mixer, index, names)
        self.beside = None if layer.beside is None else _mixer(config, layer.beside, index, names)
        self.mlp = _feed_forward(config, index, names)
        self.attention_norm = norm("attention_norm", layer.norms not in ("post", "sum", "pre_ffn"))
        self.attention_post_norm = norm("attention_post_norm", has_post, post_eps)
        self.ffn_norm = norm("ffn_norm", has_ffn and layer.norms not in ("post", "sum", "parallel"))
        self.ffn_post_norm = norm("ffn_post_norm", has_ffn and has_post, post_eps)
        inputs = config.layer_inputs
        self.input = None if inputs is None else OneLayerInput(config, inputs, index, names)
        self.scalar = Vector(names.layer(index, "layer_scalar"), 1) if layer.layer_scalar else None

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        norms = (self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm)
        yield from (part for part in (*norms, self.scalar) if part is not None)
        yield from self.self_attn.parts()
        if self.beside is not None:
            yield from self.beside.parts()
        if self.mlp is not None:
            yield from self.mlp.parts()
        if self.input is not None:
            yield from self.input.parts()

    def forward(self, op: Operations[R, A], x: R, inputs: R | None) -> R:
        """Return `x` after this layer; `inputs` are the per-layer inputs of all layers."""
        if self.layer.norms in ("parallel", "parallel_two"):
            x = self._parallel(op, x)
        else:
            x = self._mix(op, x)
            if self.mlp is not None:
                x = self._branch(op, x, self.mlp, self._feed(op, x), self.ffn_post_norm, self.layer.ffn_factor)
        if self.input is not None and inputs is not None:
            x = self.input.forward(op, x, inputs)
        return x if self.scalar is None else op.scale(x, self.scalar)

    def keep(self, op: Operations[R, A], x: R) -> None:
        """Append the KV of the layer's attention for `x` to the pool, and compute nothing else."""
        assert isinstance(self.self_attn, SelfAttention | LatentSelfAttention)
        self.self_attn.keep(op, self._entering(op, x, self.attention_norm))

    def _mix(self, op: Operations[R, A], x: R) -> R:
        """Return `x` plus the attention or recurrent mixer, and plus the mixer `beside` it, if the layer has two.

        Both read the same normed x. The feed-forward comes after; see `_parallel` for layers where it is beside, too.
        """
        entering = self._entering(op, x, self.attention_norm)
        mixed = self.self_attn.forward(op, entering)
        beside = None if self.beside is None else self.beside.forward(op, entering)
        x = self._branch(op, x, self.self_attn, mixed, self.attention_post_norm, self.layer.mixer_factor)
        return x if beside is None else self._branch(op, x, self.beside, beside, None, self.layer.beside_factor)

    def _feed(self, op: Operations[R, A], x: R) -> Any:
        """Return the output of the feed-forward layer before its last matrix."""
        assert self.mlp is not None
        return self.mlp.forward(op, self._entering(op, x, self.ffn_norm), x)

    def _entering(self, op: Operations[R, A], x: R, norm: Norm | None) -> A:
        """Return `x` as the input of a branch, normalized if there is a norm."""
        return op.plain(x, self.hidden_size) if norm is None else op.norm(x, norm)

    def _branch(self, op: Operations[R, A], x: R, branch: Any, value: Any, post_norm: Norm | None, factor: float) -> R:
        """Return `x` plus the branch's output, after its norm if there is one, or with the norm of the sum."""
        factor *= self.factor
        if post_norm is None or self.layer.norms == "sum":
            added: R = branch.add(op, x, value, factor)
            return added if post_norm is None else op.normalize(added, post_norm)
        return op.add_norm(x, branch.finish(op, value), post_norm, factor=factor)

    def _parallel(self, op: Operations[R, A], x: R) -> R:
        """Return `x` plus attention plus the feed-forward, which both read the same x, as in GPT-J.

        Neither is added before both have read it.
        """
        assert self.mlp is not None and self.attention_norm is not None
        normed = op.norm(x, self.attention_norm)
        gathered = self.self_attn.forward(op, normed)
        entering = normed if self.ffn_norm is None else op.norm(x, self.ffn_norm)
        fed: Any = self.mlp.forward(op, entering, x)
        x = self._branch(op, x, self.self_attn, gathered, None, self.layer.mixer_factor)
        return self._branch(op, x, self.mlp, fed, None, self.layer.ffn_factor)


def model_norm(config: ModelConfig, name: str, eps: float) -> Norm:
    """Return a norm over the model's width, of the model's kind."""
    return Norm(
        name, config.hidden_size, eps, "rms" if config.norm == "rms" else "layer", has_bias=config.norm == "layer_bias"
    )


TokenMixer = SelfAttention | LatentSelfAttention | ShortConvolutionMixer | GatedDeltaMixer | Mamba2Mixer


def _mixer(config: ModelConfig, mixer: Mixer, index: int, names: PartNames) -> TokenMixer:
    """Return the mixer of layer `index`."""
    match mixer:
        case Mamba2() as mamba:
            return Mamba2Mixer(config, mamba, index, names)
        case GatedDelta() as delta:
            return GatedDeltaMixer(config, delta, index, names)
        case ShortConvolution() as convolution:
            return ShortConvolutionMixer(config, convolution, index, names)
        case LatentAttention() as latent:
            return LatentSelfAttention(config, latent, index, names)
        case attention:
            return SelfAttention(config, attention, index, names)


FeedForward = DenseFeedForward | ExpertsFeedForward | DenseAndExpertsFeedForward


def _feed_forward(config: ModelConfig, index: int, names: PartNames) -> FeedForward | None:
    """Return the feed-forward layer of layer `index`; None if it has none."""
    match config.all_layers[index].ffn:
        case Dense() as dense:
            return DenseFeedForward(config, dense, index, names)
        case Experts() as experts:
            return ExpertsFeedForward(config, experts, index, names)
        case DenseAndExperts() as both:
            return DenseAndExpertsFeedForward(config, both, index, names)
    return None


class OneLayerInput:
    """The last term of layer `index`: `x + normalized projection of (function(gate x) * the layer's inputs)`."""

    def __init__(self, config: ModelConfig, inputs: LayerInputs, index: int, names: PartNames) -> None:
        size, hidden = inputs.size, config.hidden_size
        self.function, self.size, self.column, self.hidden_size = inputs.function, size, index * size, hidden
        self.gate = Linear(names.layer(index, "input_gate"), size, hidden)
        self.projection = Linear(names.layer(index, "input_projection"), hidden, size)
        self.norm = Norm(names.layer(index, "input_post_norm"), hidden, config.norm_eps)

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        yield from (self.gate, self.projection, self.norm)

    def forward(self, op: Operations[R, A], x: R, inputs: R) -> R:
        """Return `x` plus this term; `inputs` are those of all layers."""
        gate = op.linear(op.plain(x, self.hidden_size), self.gate)
        through = op.activate(gate, self.function, self.size, by=inputs, column=self.column)
        return op.add_norm(x, op.linear(through, self.projection), self.norm)

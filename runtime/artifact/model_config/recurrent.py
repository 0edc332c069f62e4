"""Configuration of recurrent layers, which keep one state instead of a KV row per token; `kind` is the tag.

Knows no layer around it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from .ranges import HeadDim, Heads, Positive, Strict

KernelSize = Annotated[int, msgspec.Meta(ge=2, le=64)]


class ShortConvolution(Strict, frozen=True, kw_only=True, tag_field="kind", tag="short_convolution"):
    """A gated convolution over the last tokens (LFM2, 2025): `c * convolution(b * x)`, each as wide as the model.

    The state is `b * x` of the last `kernel_size - 1` tokens, oldest first.

    Attributes:
        bias: both matrices and the convolution have one.
    """

    kernel_size: KernelSize
    bias: bool = False

    def state_size(self, hidden_size: int) -> int:
        """Return the numbers in a sequence's state."""
        return (self.kernel_size - 1) * hidden_size


class GatedDelta(Strict, frozen=True, kw_only=True, tag_field="kind", tag="gated_delta"):
    """The gated delta rule (Yang et al., 2024) with heads, after a short convolution of queries, keys and values.

    A value head has a matrix `[key_dim, value_dim]`. It decays, and each token corrects the matrix's value for the
    token's key. The state is the convolution's input of the last `kernel_size - 1` tokens, followed by these matrices.

    Attributes:
        tiled: value head `h` has the query and key of head `h % num_key_heads`; otherwise adjacent value heads share
            them.
    """

    num_key_heads: Heads
    num_value_heads: Heads
    key_dim: HeadDim
    value_dim: HeadDim
    kernel_size: KernelSize
    tiled: bool = False

    @property
    def keys_width(self) -> int:
        """Numbers in all keys, or in all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """Numbers in all values."""
        return self.num_value_heads * self.value_dim

    @property
    def convolved_width(self) -> int:
        """Numbers in queries, keys and values."""
        return 2 * self.keys_width + self.values_width

    @property
    def convolution_size(self) -> int:
        """Numbers of the state that the convolution needs."""
        return (self.kernel_size - 1) * self.convolved_width

    def state_size(self, hidden_size: int) -> int:
        """Return the numbers in a sequence's state."""
        return self.convolution_size + self.num_value_heads * self.key_dim * self.value_dim


class Mamba2(Strict, frozen=True, kw_only=True, tag_field="kind", tag="mamba2"):
    """Mamba-2 (Dao and Gu, 2024) with heads, after a short convolution of values, keys (B) and queries (C).

    A head has a matrix `[state_dim, head_dim]`. It decays, and each token adds the product of its key and its value.
    The state is the convolution's input of the last `kernel_size - 1` tokens, followed by these matrices.

    Attributes:
        num_groups: adjacent heads share a key, a query and a norm, in this many groups.
        bias: the matrices before and after have one; `convolution_bias`: the convolution has one.
        norm: the heads' outputs are normalized after their gates.
        gate_factor, value_factor, key_factor, query_factor, step_factor: multiply each of these at the output of its
            matrix, a step before its bias.
    """

    num_heads: Heads
    head_dim: HeadDim
    num_groups: Heads
    state_dim: HeadDim
    kernel_size: KernelSize
    bias: bool = False
    convolution_bias: bool = True
    norm: bool = True
    gate_factor: Positive = 1.0
    value_factor: Positive = 1.0
    key_factor: Positive = 1.0
    query_factor: Positive = 1.0
    step_factor: Positive = 1.0

    @property
    def values_width(self) -> int:
        """Numbers in all values."""
        return self.num_heads * self.head_dim

    @property
    def keys_width(self) -> int:
        """Numbers in all keys, or in all queries."""
        return self.num_groups * self.state_dim

    @property
    def convolved_width(self) -> int:
        """Numbers in values, keys and queries."""
        return self.values_width + 2 * self.keys_width

    @property
    def is_convolved_alike(self) -> bool:
        """Return whether values, keys and queries have the same factor."""
        return self.value_factor == self.key_factor == self.query_factor

    @property
    def convolution_size(self) -> int:
        """Numbers of the state that the convolution needs."""
        return (self.kernel_size - 1) * self.convolved_width

    def state_size(self, hidden_size: int) -> int:
        """Return the numbers in a sequence's state."""
        return self.convolution_size + self.num_heads * self.state_dim * self.head_dim


Recurrent = ShortConvolution | GatedDelta | Mamba2

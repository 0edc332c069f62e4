"""Layers that keep a state of all tokens so far in place of a row of each; `kind` says which.

Knows no layer around it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from .ranges import Strict

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
        """Numbers of a sequence's state."""
        return (self.kernel_size - 1) * hidden_size


Recurrent = ShortConvolution

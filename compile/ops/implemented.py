"""Check that kernels exist for all features of a configuration.

Only this module refuses a model because of the operations of its layers. To add a kernel, delete its line here. NumPy
(`ReferenceOps`) computes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixlm.runtime.artifact.model_config import (
    Attention,
    DenseAndExperts,
    GatedDelta,
    LatentAttention,
    LayerConfig,
    Mamba2,
    ModelConfig,
)
from radixlm.runtime.errors import UnsupportedArchitecture

from ..weights.layout import ROW_BLOCK

ATTENTION: dict[str, Callable[[Attention], bool]] = {
    "a LayerNorm of all heads together, or a norm of them after rotation": lambda a: (
        a.qk_norm is not None and a.qk_norm.over == "width" and (a.qk_norm.kind == "layer" or a.qk_norm.after_rope)
    ),
    "chunks whose tokens see those after them": lambda a: a.bidirectional and (a.chunk is not None or a.skips_first),
    "a window and chunks in one layer": lambda a: a.window is not None and a.chunk is not None,
}
LAYER: dict[str, Callable[[LayerConfig], bool]] = {
    "latent attention of heads whose sizes are no multiples of 16": lambda layer: (
        isinstance(layer.mixer, LatentAttention) and _has_odd_sizes(layer.mixer)
    ),
    "the delta rule with heads whose sizes are no multiples of 16": lambda layer: (
        isinstance(layer.mixer, GatedDelta)
        and any(size % ROW_BLOCK for size in (layer.mixer.key_dim, layer.mixer.value_dim))
    ),
    "Mamba-2 with sizes that are no multiples of 16": lambda layer: (
        isinstance(layer.recurrent, Mamba2) and _has_odd_parts(layer.recurrent)
    ),
    "biases of experts whose inputs are weighed": lambda layer: (
        layer.experts is not None and layer.experts.bias and layer.experts.input_scaled
    ),
    "a bias of a router behind a norm of its own": lambda layer: (
        layer.experts is not None and layer.experts.router.bias and layer.experts.router.input_norm
    ),
}
MODEL: dict[str, Callable[[ModelConfig], bool]] = {
    "LayerNorm behind a branch": lambda model: (
        model.norm != "rms"
        and any(layer.norms in ("post", "sandwich") or isinstance(layer.ffn, DenseAndExperts) for layer in model.layers)
    ),
    "numbers of layers that are no multiple of 16": lambda model: (
        model.layer_inputs is not None and model.layer_inputs.size % 16 != 0
    ),
}


def check_implemented(label: str, config: ModelConfig) -> None:
    """Raise UnsupportedArchitecture that names the features without a kernel, if there are any."""
    missing = list(dict.fromkeys(_missing(config)))
    if missing:
        needs = f"{config.architecture} needs {', '.join(missing)}"
        raise UnsupportedArchitecture(f"{label}: {needs}, which no kernel computes yet; take another model")


def _has_odd_sizes(mixer: LatentAttention) -> bool:
    """Return whether a head's sizes do not fit vectors: rows have no padding between tokens."""
    sizes = (mixer.latent_dim, mixer.value_dim, mixer.num_heads * mixer.query_size)
    return any(size % ROW_BLOCK for size in sizes)


def _has_odd_parts(mamba: Mamba2) -> bool:
    """Return whether a part's size does not fit vectors: convolved parts have no padding."""
    sizes = (mamba.head_dim, mamba.convolved_width if mamba.is_convolved_alike else mamba.keys_width)
    return any(size % ROW_BLOCK for size in sizes)


def _missing(config: ModelConfig) -> Iterator[str]:
    """Yield the names of features that no kernel supports."""
    yield from (name for name, needs in MODEL.items() if needs(config))
    for layer in config.all_layers:
        if isinstance(layer.mixer, Attention):
            yield from (name for name, needs in ATTENTION.items() if needs(layer.mixer))
        yield from (name for name, needs in LAYER.items() if needs(layer))

"""What a model is: each layer, and with which numbers; every number range-checked. Defaults are Llama's.

A mixer, a feed-forward layer and a stretching of rotary frequencies are tagged unions: `kind` says which.
"""

from .attention import (
    AnyAttention,
    Attention,
    DynamicScaling,
    FactorsScaling,
    Gate,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QKNorm,
    Rope,
    RopeScaling,
    Temperature,
    YarnScaling,
)
from .decoder import STATE_ITEM_BYTES, LayerConfig, LayerInputs, Mixer, ModelConfig
from .feed_forward import Dense, DenseAndExperts, Experts, Function, Router, SharedExpert, is_gated
from .ranges import ContextLength, Dimension, HeadDim, Heads, Positive, Strict
from .recurrent import GatedDelta, Mamba2, Recurrent, ShortConvolution

__all__ = [
    "STATE_ITEM_BYTES",
    "AnyAttention",
    "Attention",
    "ContextLength",
    "Dense",
    "DenseAndExperts",
    "Dimension",
    "DynamicScaling",
    "Experts",
    "FactorsScaling",
    "Function",
    "Gate",
    "GatedDelta",
    "HeadDim",
    "Heads",
    "LatentAttention",
    "LayerConfig",
    "LayerInputs",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mamba2",
    "Mixer",
    "ModelConfig",
    "Positive",
    "ProportionalScaling",
    "QKNorm",
    "Recurrent",
    "Rope",
    "RopeScaling",
    "Router",
    "SharedExpert",
    "ShortConvolution",
    "Strict",
    "Temperature",
    "YarnScaling",
    "is_gated",
]

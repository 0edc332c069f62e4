"""What a model is: each layer, and with which numbers; every number range-checked. Defaults are Llama's.

A mixer, a feed-forward layer and a stretching of rotary frequencies are tagged unions: `kind` says which.
"""

from .attention import Attention, Gate, LatentAttention, Mixer, QKNorm, Temperature
from .decoder import LayerConfig, LayerInputs, ModelConfig
from .feed_forward import Dense, DenseAndExperts, Experts, Function, Router, SharedExpert, is_gated
from .ranges import ContextLength, Dimension, HeadDim, Heads, Positive, Strict
from .rope import (
    DynamicScaling,
    FactorsScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

__all__ = [
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
    "HeadDim",
    "Heads",
    "LatentAttention",
    "LayerConfig",
    "LayerInputs",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mixer",
    "ModelConfig",
    "Positive",
    "ProportionalScaling",
    "QKNorm",
    "Rope",
    "RopeScaling",
    "Router",
    "SharedExpert",
    "Strict",
    "Temperature",
    "YarnScaling",
    "is_gated",
]

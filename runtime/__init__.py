"""Artifact to tokens: the engine, its cache and its server.

The names below load on first use, so that reading a manifest or raising an error does not load a model
runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .completion import Completion, Delta
    from .engine import Engine
    from .engine_stats import EngineStats
    from .generation_stream import GenerationStream
    from .sampling_params import SamplingParams

__all__ = ["Completion", "Delta", "Engine", "EngineStats", "GenerationStream", "SamplingParams"]

_MODULE_OF = {
    "Completion": "completion",
    "Delta": "completion",
    "Engine": "engine",
    "EngineStats": "engine_stats",
    "GenerationStream": "generation_stream",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

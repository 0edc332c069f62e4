"""Artifact to tokens: the engine, its cache and its server.

The names below load on first use, so that reading a manifest or raising an error does not load a model
runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.completion import Completion, Delta
    from .engine.engine import Engine
    from .engine.engine_stats import EngineStats
    from .engine.generation_stream import GenerationStream
    from .engine.sampling_params import SamplingParams

__all__ = ["Completion", "Delta", "Engine", "EngineStats", "GenerationStream", "SamplingParams"]

_MODULE_OF = {
    "Completion": "engine.completion",
    "Delta": "engine.completion",
    "Engine": "engine.engine",
    "EngineStats": "engine.engine_stats",
    "GenerationStream": "engine.generation_stream",
    "SamplingParams": "engine.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

"""The runtime, from artifact to tokens: the engine, its cache and its server.

The names below are imported on first use, so that reading a manifest or raising an error does not load a model
runtime. `radixlm` exports the same names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .chat.grammar import Grammar
    from .chat.tools.tool_format import Tool
    from .engine.calls.batch import PromptResult
    from .engine.completion import Completion, Delta
    from .engine.engine import Engine
    from .engine.engine_options import EngineOptions
    from .engine.engine_stats import EngineStats
    from .engine.generation_stream import GenerationStream
    from .engine.request_options import Message, Prompt, RequestOptions
    from .engine.sampling_params import SamplingParams
    from .engine.vectors.results import DocumentScore, Embedding
    from .errors import (
        ArtifactError,
        ConstraintFailed,
        ContextLengthExceeded,
        EmptyPrompt,
        EngineClosed,
        EngineDied,
        EngineError,
        EngineOverloaded,
        InvalidArgument,
        InvalidGrammar,
        InvalidParameter,
        InvalidRequest,
        RadixLMError,
        StepFailed,
    )

__all__ = [
    "ArtifactError",
    "Completion",
    "ConstraintFailed",
    "ContextLengthExceeded",
    "Delta",
    "DocumentScore",
    "Embedding",
    "EmptyPrompt",
    "Engine",
    "EngineClosed",
    "EngineDied",
    "EngineError",
    "EngineOptions",
    "EngineOverloaded",
    "EngineStats",
    "GenerationStream",
    "Grammar",
    "InvalidArgument",
    "InvalidGrammar",
    "InvalidParameter",
    "InvalidRequest",
    "Message",
    "Prompt",
    "PromptResult",
    "RadixLMError",
    "RequestOptions",
    "SamplingParams",
    "StepFailed",
    "Tool",
]

_MODULE_OF = {
    "Completion": "engine.completion",
    "Delta": "engine.completion",
    "DocumentScore": "engine.vectors.results",
    "Embedding": "engine.vectors.results",
    "Engine": "engine.engine",
    "EngineOptions": "engine.engine_options",
    "EngineStats": "engine.engine_stats",
    "GenerationStream": "engine.generation_stream",
    "Grammar": "chat.grammar",
    "Message": "engine.request_options",
    "Prompt": "engine.request_options",
    "PromptResult": "engine.calls.batch",
    "RequestOptions": "engine.request_options",
    "SamplingParams": "engine.sampling_params",
    "Tool": "chat.tools.tool_format",
}
"""The module of each name; all other names are in `errors`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF.get(name, 'errors')}", __name__), name)

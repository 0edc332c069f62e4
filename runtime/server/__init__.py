"""An HTTP server for engines, with OpenAI's, Anthropic's and Ollama's APIs.

The names below are imported on first use, so that reading the server's options does not import the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .app import create_app
    from .http.loading import Loading

__all__ = ["Loading", "create_app"]

_MODULE_OF = {"Loading": "http.loading", "create_app": "app"}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)

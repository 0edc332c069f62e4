"""The engine over HTTP, in OpenAI's shapes."""

from .app import create_app

__all__ = ["create_app"]

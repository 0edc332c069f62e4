"""The engine over HTTP, in OpenAI's shapes."""

from .app import create_app
from .http.loading import Loading

__all__ = ["Loading", "create_app"]

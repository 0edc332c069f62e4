"""What the server is, and what it does not do.

Knows no requests for text.
"""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from .errors import HTTPError
from .replies import VersionReply
from .served import json_response


class About:
    """The endpoints that need no model."""

    async def version(self, request: Request) -> Response:
        """`GET /version`: of radixlm."""
        return json_response(VersionReply(version("radixlm")))

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`: 501, which OpenAI's clients are told not to try again."""
        message = "there are no embeddings here: models are compiled to write text"
        raise HTTPError(501, message, code="not_implemented", headers={"x-should-retry": "false"})

"""What the server is and has, and what it does not do.

Knows no requests for text.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from .errors import HTTPError
from .openai.replies import ModelList, ModelReply, VersionReply
from .served import Served, json_response


@dataclass(frozen=True)
class About:
    """The endpoints for one served model."""

    served: Served

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_response(ModelList([self._model()]))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model_id}`."""
        self.served.check_model(request.path_params["model_id"])
        return json_response(self._model())

    async def version(self, request: Request) -> Response:
        """`GET /version`: of radixlm."""
        return json_response(VersionReply(version("radixlm")))

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`: 501, which OpenAI's clients are told not to try again."""
        message = "there are no embeddings here: models are compiled to write text"
        raise HTTPError(501, message, code="not_implemented", headers={"x-should-retry": "false"})

    def _model(self) -> ModelReply:
        engine = self.served.engine
        return ModelReply(self.served.model_id, self.served.created, max_model_len=engine.context_length)

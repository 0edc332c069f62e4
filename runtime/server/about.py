"""Which model the server has, which version it is, and what it does not do."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .app_state import AppState, json_response
from .errors import HTTPError


@dataclass(frozen=True)
class About:
    """The endpoints for one served model."""

    state: AppState

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_response(ModelList([self._model()]))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model_id}`."""
        self.state.check_model(request.path_params["model_id"])
        return json_response(self._model())

    async def version(self, request: Request) -> Response:
        """`GET /version`: of radixlm."""
        return json_response(VersionReply(version("radixlm")))

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`: 501, which OpenAI's clients are told not to try again."""
        message = "there are no embeddings here: models are compiled to write text"
        raise HTTPError(501, message, code="not_implemented", headers={"x-should-retry": "false"})

    def _model(self) -> ModelReply:
        engine = self.state.engine
        return ModelReply(self.state.model_id, self.state.created, max_model_len=engine.context_length)


class ModelReply(msgspec.Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "radixlm"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET  # vLLM's: tokens of prompt and reply together


class ModelList(msgspec.Struct):
    data: list[ModelReply]
    object: str = "list"


class VersionReply(msgspec.Struct):
    version: str

"""Which model the server has, which version it is, and what it does not do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
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
        model = self._model()
        return json_response(ModelList([model], first_id=model.id, last_id=model.id))

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
        created = datetime.fromtimestamp(self.state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        model_id, most = self.state.model_id, self.state.engine.context_length
        return ModelReply(model_id, self.state.created, model_id, created, max_model_len=most, max_input_tokens=most)


class ModelReply(msgspec.Struct):
    """The model in both dialects: clients of each find their fields."""

    id: str
    created: int  # Unix time
    display_name: str  # Anthropic's, as the next four
    created_at: str  # as RFC 3339 has it
    max_input_tokens: int
    type: str = "model"
    lifecycle: str = "active"
    object: str = "model"
    owned_by: str = "radixlm"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET  # vLLM's: tokens of prompt and reply together


class ModelList(msgspec.Struct):
    data: list[ModelReply]
    object: str = "list"
    has_more: bool = False  # Anthropic's, as the next two
    first_id: str | None = None
    last_id: str | None = None


class VersionReply(msgspec.Struct):
    version: str

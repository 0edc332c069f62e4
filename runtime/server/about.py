"""Which model the server has, which version it is, and what it does not do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..artifact.manifest import SamplingDefaults
from .app_state import AppState, json_response
from .errors import HTTPError
from .truncation import Truncation

if TYPE_CHECKING:
    from ..engine.engine import Engine


@dataclass(frozen=True)
class About:
    """The endpoints for one served model."""

    state: AppState

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        models = [self._model(name) for name in self.state.models.listed]
        return json_response(ModelList(models, first_id=models[0].id, last_id=models[-1].id))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model_id}`."""
        return json_response(self._model(self.state.models.named(request.path_params["model_id"])))

    async def version(self, request: Request) -> Response:
        """`GET /version`: of radixlm."""
        return json_response(VersionReply(version("radixlm")))

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`: 501, which OpenAI's clients are told not to try again."""
        message = "there are no embeddings here: models are compiled to write text"
        raise HTTPError(501, message, code="not_implemented", headers={"x-should-retry": "false"})

    def _model(self, name: str) -> ModelReply:
        created = datetime.fromtimestamp(self.state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        most = self.state.engine.context_length
        sampling = self.state.engine.default_params.defaults
        return ModelReply(name, self.state.created, name, created, most, max_model_len=most, default_sampling=sampling)


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
    default_sampling: SamplingDefaults | msgspec.UnsetType = msgspec.UNSET  # ours: what a request has that says nothing


class ModelList(msgspec.Struct):
    data: list[ModelReply]
    object: str = "list"
    has_more: bool = False  # Anthropic's, as the next two
    first_id: str | None = None
    last_id: str | None = None


def fingerprint_of(engine: Engine, truncation: Truncation) -> str:
    """What OpenAI's replies say of the server: a digest of the version, of the artifact, with weights, module and
    target, and of the options with which the same request may have another reply.

    One fingerprint, seed and request are the same bytes, where no prefix was found by text or as an alias, nor in part,
    no call of a tool came back, and the chat template does not write the day.
    """
    options = {name: value for name, value in engine.reply_options.items() if value is not None}  # those of an extra
    means = (version("radixlm"), engine.manifest.digest, truncation, options)
    return "fp_" + sha256(msgspec.json.encode(means)).hexdigest()[:16]


class VersionReply(msgspec.Struct):
    version: str

"""Endpoints that list the server's models and return its version."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..artifact.manifest import SamplingDefaults
from ..version import VERSION
from .models import Models
from .served import Served, json_response


async def list_models(models: Models, request: Request) -> Response:
    """`GET /v1/models`: list all models, each under each of its names."""
    replies = [_describe_model(served, name) for served, name in models.listed]
    return json_response(ModelList(replies, first_id=replies[0].id, last_id=replies[-1].id))


async def describe_model(models: Models, request: Request) -> Response:
    """`GET /v1/models/{model_id}`: describe one model. Raises HTTPError 404 if there is none of this name."""
    name = request.path_params["model_id"]
    return json_response(_describe_model(models.named(name), name))


async def tell_version(models: Models, request: Request) -> Response:
    """`GET /version`: return radixlm's version."""
    return json_response(VersionReply(VERSION))


def _describe_model(served: Served, name: str) -> ModelReply:
    """Return the entry of a model, under one of its names, in the list of models."""
    most = served.engine.context_length
    sampling = served.engine.default_params.defaults
    created = created_at(served.created)
    reply = ModelReply(
        name,
        served.created,
        name,
        created,
        most,
        max_model_len=most,
        default_sampling=sampling,
        has_chat_template=served.engine.prompts.chat_template is not None,
    )
    if served.lora is not None:
        reply.parent = served.parent
    return reply


def created_at(created: int) -> str:
    """Return a Unix time in RFC 3339 format.

    >>> created_at(0)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ModelReply(msgspec.Struct):
    """A model, with the fields of OpenAI's and of Anthropic's API together."""

    id: str
    created: int  # Unix time
    display_name: str  # Anthropic's, as the next four
    created_at: str  # RFC 3339
    max_input_tokens: int
    type: str = "model"
    lifecycle: str = "active"
    object: str = "model"
    owned_by: str = "radixlm"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET  # vLLM's: maximum tokens of prompt and reply together
    default_sampling: SamplingDefaults | msgspec.UnsetType = msgspec.UNSET  # radixlm's: used if a request sets none
    has_chat_template: bool | msgspec.UnsetType = msgspec.UNSET  # radixlm's: false: it answers completions only
    parent: str | msgspec.UnsetType = msgspec.UNSET  # vLLM's: the model of a LoRA adapter


class ModelList(msgspec.Struct):
    data: list[ModelReply]
    object: str = "list"
    has_more: bool = False  # Anthropic's, as the next two
    first_id: str | None = None
    last_id: str | None = None


class VersionReply(msgspec.Struct):
    version: str

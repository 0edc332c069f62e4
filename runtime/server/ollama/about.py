"""Ollama's endpoints about models: listing and describing them, and refusing to fetch or delete them.

Knows models and formats, not how a reply is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...artifact.manifest import Manifest
from ...artifact.model_config import Dense, ModelConfig
from ...version import VERSION
from ..errors import HTTPError
from ..http.request_body import decode_json, read_json
from ..models import ModelEndpoint, Models
from ..served import Served, json_response
from .answer import MEDIA_TYPE
from .names import tagged
from .replies import (
    NEVER,
    ModelDetails,
    OllamaModel,
    OllamaModelList,
    OllamaShowReply,
    OllamaVersionReply,
    StatusReply,
    timestamp,
)
from .requests import NamedModel, ReplyRequest

API_VERSION = "0.13.0"
"""The version of Ollama whose API this server implements. Clients refuse servers that are too old."""

MAX_BODY_BYTES = 1 << 16
_FORMATS = {"gguf": "gguf", "huggingface": "safetensors", "mlc": "mlc"}
_OPTIONS = {"repetition_penalty": "repeat_penalty"}  # Ollama's names of sampling parameters


async def list_tags(models: Models, request: Request) -> Response:
    """`GET /api/tags`: list the models."""
    found = [_describe_model(served, name, modified_at=timestamp(served.created)) for served, name in _named(models)]
    return json_response(OllamaModelList(found))


async def list_loaded(models: Models, request: Request) -> Response:
    """`GET /api/ps`: list the loaded models."""
    found = [
        _describe_model(served, name, expires_at=NEVER, size_vram=0, context_length=served.engine.context_length)
        for served, name in _named(models)
    ]
    return json_response(OllamaModelList(found))


async def tell_version(models: Models, request: Request) -> Response:
    """`GET /api/version`: return the version of Ollama's API, and radixlm's own."""
    return json_response(OllamaVersionReply(API_VERSION, VERSION))


async def show(served: Served, request: Request, asked: NamedModel) -> Response:
    """`POST /api/show`: describe a model and its capabilities."""
    engine = served.engine
    template = engine.prompts.chat_template
    params = msgspec.structs.asdict(engine.default_params.defaults)
    lines = [f"{_OPTIONS.get(name, name):<30} {value:g}" for name, value in params.items()]
    source = "" if template is None else template.source
    return json_response(
        OllamaShowReply(
            modelfile=f"FROM {served.called(asked.model)}\n",
            parameters="\n".join(lines),
            template=source,
            details=_describe_format(engine.manifest),
            model_info=_model_info(engine.manifest, engine.context_length),
            capabilities=await asyncio.to_thread(capabilities, served),  # the first call renders the template
            modified_at=timestamp(served.created),
        )
    )


SHOW = ModelEndpoint(NamedModel, lambda served, request, body: body, show, max_bytes=MAX_BODY_BYTES)


async def pull(models: Models, request: Request) -> Response:
    """`POST /api/pull`: report success for a model that is served; others are not downloaded.

    Raises:
        HTTPError: 403 if there is no such model.
    """
    asked = decode_json(await read_json(request, max_bytes=MAX_BODY_BYTES), NamedModel)
    try:
        models.named(asked.model)
    except HTTPError as error:
        raise pull_refused(str(error)) from error
    done = json_response(StatusReply("success"))
    return done if asked.stream is False else Response(bytes(done.body) + b"\n", media_type=MEDIA_TYPE)


async def delete(models: Models, request: Request) -> Response:
    """`DELETE /api/delete`: refuse with 403."""
    raise delete_refused()


def pull_refused(why: str = "") -> HTTPError:
    """Return the error for a client that cannot pull a model."""
    message = "this server does not download models; run radixlm pull on its machine, or serve with --allow-pull"
    return HTTPError(403, f"{message}; {why}" if why else message, code="pull_not_allowed")


def delete_refused() -> HTTPError:
    """Return the error for a client that cannot delete a model."""
    message = "this server deletes only models that clients pulled; run radixlm rm on its machine"
    return HTTPError(403, message, code="delete_not_allowed")


def capabilities(served: Served) -> list[str]:
    """Return a model's capabilities by Ollama's names."""
    prompts = served.engine.prompts
    manifest = served.engine.manifest
    if not manifest.writes_text:
        return [] if manifest.embedding is None else ["embedding"]
    found = ["completion"]
    if prompts.chat_template is not None:
        found.append("tools")
    if prompts.reasoning.format is not None:
        found.append("thinking")
    return found


def require_thinking(served: Served, body: ReplyRequest) -> None:
    """Raise HTTPError 400 if a request asks for thinking, and the model does not support it."""
    if body.think and "thinking" not in capabilities(served):
        name = served.called(body.model)
        raise HTTPError(400, f"{name!r:.200} does not support thinking; remove think", param="think")


def _named(models: Models) -> list[tuple[Served, str]]:
    return [(served, tagged(name)) for served, name in models.listed]


def _describe_model(served: Served, name: str, **fields: Any) -> OllamaModel:
    """Return a model's entry in Ollama's lists.

    Args:
        fields: further fields, of one list.
    """
    manifest = served.engine.manifest
    num_bytes = sum(file.size for file in manifest.files.values())
    return OllamaModel(
        name=name, model=name, size=num_bytes, digest=manifest.digest, details=_describe_format(manifest), **fields
    )


def _describe_format(manifest: Manifest) -> ModelDetails:
    """Return a model's `details` in Ollama's replies: format, family, size and quantization."""
    num_parameters, family = _num_parameters(manifest), manifest.model.architecture
    kinds = manifest.quantization.kinds
    most = max(kinds.values(), key=lambda kind: kind.bytes, default=None)
    return ModelDetails(
        format=_FORMATS[manifest.source.format],
        family=family,
        families=[family],
        parameter_size="" if num_parameters is None else rounded(num_parameters),
        quantization_level="" if most is None else "/".join(most.source),
    )


def _model_info(manifest: Manifest, context_length: int) -> Mapping[str, Any]:
    """Return a model's dimensions by their names in GGUF files."""
    model, family = manifest.model, manifest.model.architecture
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": manifest.name,
        "general.parameter_count": _num_parameters(manifest),
        f"{family}.context_length": context_length,
        f"{family}.embedding_length": model.hidden_size,
        f"{family}.block_count": model.num_hidden_layers,
        f"{family}.vocab_size": model.vocab_size,
    }
    if model.attentions:
        info[f"{family}.attention.head_count"] = model.num_attention_heads
        info[f"{family}.attention.head_count_kv"] = model.num_key_value_heads
    return {name: value for name, value in info.items() if value is not None}


def _num_parameters(manifest: Manifest) -> int | None:
    """Return the number of parameters; None if only the number read per token is known."""
    model, read = manifest.model, manifest.quantization.token_weights
    if read is None or not _is_dense(model):
        return None
    return read + (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)


def _is_dense(model: ModelConfig) -> bool:
    return all(layer.ffn is None or isinstance(layer.ffn, Dense) for layer in model.layers)


def rounded(number: int) -> str:
    """Return a number of parameters in short form.

    >>> rounded(134_515_008), rounded(1_720_574_976), rounded(32_000_000_000)
    ('134.52M', '1.7B', '32.0B')
    """
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"

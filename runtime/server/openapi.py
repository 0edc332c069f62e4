"""`GET /openapi.json`: describe the API in OpenAPI 3.1, from the types that validate requests.

Knows what each path takes and returns, in a table. `app.py` has the endpoints, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..version import VERSION
from .about import ModelList, ModelReply, VersionReply
from .anthropic.error_replies import MessagesErrorReply
from .anthropic.replies import CountTokensReply, MessageReply
from .anthropic.requests import CountTokensRequest, MessagesRequest
from .cache import CacheReply, ClearedReply
from .embeddings.replies import EmbeddingsReply, RerankReply, ScoresReply
from .embeddings.requests import EmbeddingsRequest, RerankRequest, ScoreRequest
from .errors import ErrorReply
from .ollama.embed import OllamaEmbeddingsReply, OllamaEmbeddingsRequest, OllamaEmbedReply, OllamaEmbedRequest
from .ollama.error_replies import OllamaErrorReply
from .ollama.replies import (
    OllamaChatReply,
    OllamaGenerateReply,
    OllamaModelList,
    OllamaShowReply,
    OllamaVersionReply,
    StatusReply,
)
from .ollama.requests import NamedModel, OllamaChatRequest, OllamaGenerateRequest
from .openai.chat_request import ChatRequest
from .openai.replies import ChatReply, TextReply
from .openai.requests import CompletionRequest
from .openai.response_replies import ResponseReply
from .openai.response_requests import ResponseRequest
from .openai.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest, TokenizerInfoReply
from .request_log import HEALTH_PATHS
from .stored.operations import BODILESS, STORED, names_in

Schema = dict[str, Any]
_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is invalid; the message names the value and what is allowed.",
    401: "The API key is missing or wrong.",
    403: "The request came from a web page of another origin, or names a host that is not the server's.",
    404: "There is no such model or object.",
    408: "The body did not come in time.",
    413: "The body is too long, or has too many values.",
    429: "The queue is full; Retry-After has the seconds to wait.",
    500: "The request failed.",
    503: "The server is loading, or stopping.",
}


@dataclass(frozen=True)
class Operation:
    """One method of one path: its summary, parameters, body and reply."""

    method: str
    path: str
    summary: str
    reply: Any  # a type, or a media type other than JSON
    body: Any = None
    streams: bool = False  # the body can ask for a stream
    stream_type: str = "text/event-stream"
    status: int = 200
    in_path: tuple[str, ...] = ()
    in_query: tuple[str, ...] = ()
    asks_for_model: bool = False  # in the query, if there are several models
    error: type[msgspec.Struct] = ErrorReply
    needs_body: bool = True  # ignored if there is no body type


def _ollama_operation(
    method: str, name: str, summary: str, reply: Any, body: Any = None, *, status: int = 200, streams: bool = False
) -> Operation:
    """Return the operation `/api/NAME` of Ollama's API, which streams lines of JSON."""
    path, lines = f"/api/{name}", "application/x-ndjson"
    return Operation(
        method, path, summary, reply, body, streams=streams, stream_type=lines, status=status, error=OllamaErrorReply
    )


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", ChatReply, ChatRequest, streams=True),
    Operation("post", "/v1/completions", "Continue prompts", TextReply, CompletionRequest, streams=True),
    Operation("post", "/v1/responses", "Respond to an input", ResponseReply, ResponseRequest, streams=True),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation in Anthropic's format",
        MessageReply,
        MessagesRequest,
        streams=True,
        error=MessagesErrorReply,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation",
        CountTokensReply,
        CountTokensRequest,
        error=MessagesErrorReply,
    ),
    Operation("post", "/v1/embeddings", "Embed texts", EmbeddingsReply, EmbeddingsRequest),
    Operation("post", "/v1/rerank", "Rank documents by relevance to a query", RerankReply, RerankRequest),
    Operation("post", "/v2/rerank", "Rank documents by relevance to a query", RerankReply, RerankRequest),
    Operation("post", "/v1/score", "Score pairs of texts", ScoresReply, ScoreRequest),
    Operation("get", "/v1/models", "List the models", ModelList),
    Operation("get", "/v1/models/{model_id}", "Describe a model", ModelReply, in_path=("model_id",)),
    *(
        Operation(*row[:4], body=row[4], needs_body=row[1] not in BODILESS, in_path=names_in(row[1]), in_query=row[5])
        for row in STORED
    ),
    Operation(
        "get",
        "/v1/cache",
        "Show the caller's cached prefixes",
        CacheReply,
        in_query=("cache_salt", "prompt_cache_key", "run"),
        asks_for_model=True,
    ),
    Operation(
        "delete",
        "/v1/cache",
        "Delete the caller's cached prefixes",
        ClearedReply,
        in_query=("cache_salt", "prompt_cache_key"),
        asks_for_model=True,
    ),
    _ollama_operation(
        "post", "chat", "Answer a conversation in Ollama's format", OllamaChatReply, OllamaChatRequest, streams=True
    ),
    _ollama_operation(
        "post",
        "generate",
        "Continue a prompt in Ollama's format",
        OllamaGenerateReply,
        OllamaGenerateRequest,
        streams=True,
    ),
    _ollama_operation("get", "tags", "List the models in Ollama's format", OllamaModelList),
    _ollama_operation("get", "ps", "List the loaded models", OllamaModelList),
    _ollama_operation("post", "show", "Describe a model in Ollama's format", OllamaShowReply, NamedModel),
    _ollama_operation("get", "version", "Return the version of Ollama's API", OllamaVersionReply),
    _ollama_operation(
        "post", "pull", "Check that a model is available; nothing is downloaded", StatusReply, NamedModel, streams=True
    ),
    _ollama_operation("delete", "delete", "Refuse to delete a model", OllamaErrorReply, status=403),
    _ollama_operation("post", "embed", "Embed texts in Ollama's format", OllamaEmbedReply, OllamaEmbedRequest),
    _ollama_operation(
        "post", "embeddings", "Embed one text in Ollama's older format", OllamaEmbeddingsReply, OllamaEmbeddingsRequest
    ),
    Operation("post", "/tokenize", "Encode a text or a conversation", TokenizeReply, TokenizeRequest),
    Operation("post", "/detokenize", "Decode token ids", DetokenizeReply, DetokenizeRequest),
    Operation(
        "get",
        "/tokenizer_info",
        "Return the tokens that begin and end a text",
        TokenizerInfoReply,
        asks_for_model=True,
    ),
    Operation("get", "/version", "Return radixlm's version", VersionReply),
    Operation("get", "/health", "Report whether the engine makes progress", dict[str, Any]),
    Operation("get", "/health/ready", "Report whether requests are served", dict[str, Any]),
    Operation("get", "/health/live", "Report that the process responds", dict[str, Any]),
    Operation("get", "/metrics", "Return metrics for Prometheus", "text/plain"),
    Operation("get", "/prometheus/metrics", "Return metrics for Prometheus", "text/plain"),
    Operation("get", "/openapi.json", "Describe this API", dict[str, Any]),
)


class OpenAPI:
    """The endpoint `/openapi.json`, whose document is made on the first request.

    Args:
        has_keys: the server requires API keys.
        has_choice: a query string chooses among models, or among the adapters of one.
        more: operations of this server in addition to `OPERATIONS`.
    """

    def __init__(self, *, has_keys: bool, has_choice: bool = False, more: Sequence[Operation] = ()) -> None:
        self._has_keys = has_keys
        self._has_choice = has_choice
        self._operations = (*OPERATIONS, *more)

    async def answer(self, request: Request) -> Response:
        """`GET /openapi.json`: return the document."""
        return Response(self._make_document, media_type="application/json")

    @cached_property
    def _make_document(self) -> bytes:
        """Return the OpenAPI document as JSON."""
        types = [kind for operation in self._operations for kind in (operation.body, operation.reply) if _is_type(kind)]
        types += [ErrorReply, MessagesErrorReply, OllamaErrorReply]
        schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
        by_type = {repr(kind): schema for kind, schema in zip(types, schemas, strict=False)}
        paths: dict[str, Schema] = {}
        for operation in self._operations:
            paths.setdefault(operation.path, {})[operation.method] = _describe_operation(
                operation, by_type, self._has_choice
            )
        document: Schema = {
            "openapi": "3.1.0",
            "info": {"title": "radixlm", "version": VERSION, "license": {"name": "Apache-2.0"}},
            "paths": paths,
            "components": {"schemas": components},
        }
        if self._has_keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            for path in HEALTH_PATHS:
                paths[path]["get"]["security"] = []
        return msgspec.json.encode(document)


def _describe_operation(operation: Operation, by_type: dict[str, Schema], has_choice: bool) -> Schema:
    """Return an operation as OpenAPI describes it: its parameters, body and responses.

    Args:
        by_type: references to schemas, by the `repr` of their types.
        has_choice: whether a query can name one of several models.
    """
    replies = {str(status): _error(text, operation.error) for status, text in _ERRORS.items()}
    replies[str(operation.status)] = {"description": "The answer.", "content": _reply_content(operation, by_type)}
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').translate(_NAMES)}",
        "responses": dict(sorted(replies.items())),
    }
    if operation.body is not None:
        content = {"application/json": {"schema": by_type[repr(operation.body)]}}
        described["requestBody"] = {"required": operation.needs_body, "content": content}
    parameters = [_parameter(name, "path") for name in operation.in_path]
    in_query = (*operation.in_query, "model") if has_choice and operation.asks_for_model else operation.in_query
    parameters += [_parameter(name, "query") for name in in_query]
    return {**described, "parameters": parameters} if parameters else described


_NAMES = str.maketrans({"/": "_", ".": "_", "{": None, "}": None})


def _reply_content(operation: Operation, by_type: dict[str, Schema]) -> Schema:
    """Return the `content` of an operation's successful response in OpenAPI: schemas by media type."""
    if not _is_type(operation.reply):
        return {operation.reply: {"schema": {"type": "string"}}}
    content: Schema = {"application/json": {"schema": by_type[repr(operation.reply)]}}
    if operation.streams:
        content[operation.stream_type] = {}  # OpenAPI 3.1 cannot describe the events
    return content


def _error(description: str, kind: type[msgspec.Struct]) -> Schema:
    schema = {"$ref": _REF.format(name=kind.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _parameter(name: str, place: str) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _is_type(kind: object) -> bool:
    return kind is not None and not isinstance(kind, str)
